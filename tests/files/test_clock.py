"""support/files/clock.py: made-up times of pictures, against the times that were meant and against what
FFmpeg's constant rate makes of them."""
import numpy as np
import pytest

from support.files.clock import BACK, LOOKAHEAD, Decoded, presented

SEEDS = range(12)
RATES = [2, 5, 25, 30000 / 1001]
LONGEST = 60.0                                 # seconds, of a gap
SHORTEST = 10.0                                # the same where clocks may change on the way


def clip(rng, length: int, rate: float, begin: float = 0.0, varies: bool = False) -> list[Decoded]:
    """Pictures at a rate, or at one that varies, with right times. The first one is a key picture,
    others are sometimes."""
    steps = np.full(length, 1 / rate)
    if varies:
        steps *= rng.choice([0.3, 0.5, 1, 2, 8], length)
    clocks = begin + np.cumsum(steps) - steps
    return [Decoded(n, float(clock), 1 / rate, n == 0 or rng.random() < 0.02)
            for n, clock in enumerate(clocks)]


def shown(claims: list[Decoded], longest_gap: float = LONGEST) -> np.ndarray:
    times = [time for _, time in presented(iter(claims), None, longest_gap, [])]
    assert len(times) == len(claims) and times == sorted(times) and times[0] == 0
    return np.array(times)


def pictures(times, step: float) -> int:
    """How many pictures a constant rate of 2 a second makes of them."""
    return max(1, round(2 * (times[-1] + step)))


def ffmpeg(claims: list[Decoded], changes: bool) -> np.ndarray:
    """The times that FFmpeg's program gives pictures before it makes the rate constant (fftools).

    changes     whether the format's clock may change on the way (AVFMT_TS_DISCONT)
    """
    offset = -claims[0].clock
    times = []
    expected = 0.0
    for claim in claims:
        time = expected if claim.clock is None else claim.clock + offset
        if changes and (abs(time - expected) > 10 or time + 0.1 < expected):
            offset += expected - time
            time = expected
        times.append(max(time, times[-1] if times else 0.0))
        expected = time + claim.step
    return np.array(times)


def joined(rng, shortest: int, rate: float, begins) -> list[Decoded]:
    return [claim for _ in range(30)
            for claim in clip(rng, int(rng.integers(shortest, shortest + 5)), rate, begins())]


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("shortest", [1, 2, 3, 20])
def test_joined_clips_of_any_length(shortest, rate):
    """Each begins at about the same time of its own clock. Not one picture is lost."""
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        spread = 0.5 / rate if shortest > 1 else 0
        claims = joined(rng, shortest, rate, lambda: 1.4 + rng.uniform(0, spread))
        meant = np.arange(len(claims)) / rate
        for longest_gap in (SHORTEST, LONGEST):
            assert shown(claims, longest_gap) == pytest.approx(meant)
        if rate < 10:                              # FFmpeg takes less than 0.1 s for the same clip
            assert pictures(ffmpeg(claims, True), 1 / rate) == pictures(meant, 1 / rate)


@pytest.mark.parametrize("rate", RATES[2:])
def test_joined_clips_whose_rate_varies(rate):
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        claims, meant, end = [], [], 0.0
        for _ in range(20):
            pieces = clip(rng, int(rng.integers(3, 20)), rate, 1.4, varies=True)
            meant += [end + claim.clock - 1.4 for claim in pieces]
            end = meant[-1] + 1 / rate
            claims += pieces
        # a clip whose second picture comes late may seem to go on where another one has ended
        assert shown(claims) == pytest.approx(meant, abs=1), seed


@pytest.mark.parametrize("rate", [2, 5])
def test_clips_of_any_clocks_become_as_many_pictures_as_with_ffmpeg(rate):
    """A later begin may be a gap, an earlier one is a new clock. Where a clip begins by chance
    within a tenth of a picture of where another one has ended, nobody can know: in one film of ten.
    """
    same = 0
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        claims = joined(rng, 3, rate, lambda: rng.uniform(0, 30))
        counts = [pictures(times, 1 / rate)
                  for times in (shown(claims, SHORTEST), ffmpeg(claims, True))]
        same += abs(counts[0] - counts[1]) <= 1
    assert same >= 0.9 * len(SEEDS)


@pytest.mark.parametrize("rate", RATES)
def test_a_rate_that_varies_and_gaps_are_believed(rate):
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        claims = clip(rng, 300, rate, varies=True)
        for gap, longest_gap in ((9.0, SHORTEST), (59.0, LONGEST)):
            for k in rng.integers(1, 300, 3):
                for claim in claims[k:]:
                    claim.clock += gap - 8 / rate
            times = shown(claims, longest_gap)
            assert times == pytest.approx([claim.clock for claim in claims])
        assert pictures(times, 1 / rate) == pictures(ffmpeg(claims, False), 1 / rate)


@pytest.mark.parametrize("rate", RATES)
def test_a_longer_gap_is_left_out(rate):
    for longest_gap in (SHORTEST, LONGEST):
        claims = clip(np.random.default_rng(0), 100, rate)
        for claim in claims[40:]:
            claim.clock += longest_gap + 1
        gaps = []
        times = [time for _, time in presented(claims, None, longest_gap, gaps)]
        assert times == pytest.approx(np.arange(100) / rate)
        assert gaps == pytest.approx([longest_gap + 1])


@pytest.mark.parametrize("size", [0.3, 2, 8, 40, 7200, 1e9])
@pytest.mark.parametrize("varies", [False, True])
@pytest.mark.parametrize("rate", RATES)
def test_a_wrong_time_moves_its_picture_alone(rate, varies, size):
    """Spikes, forward and back. A picture beside it may be shown earlier or later by its
    neighbours' durations, where the spike is so small that it might be right."""
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        claims = clip(rng, 200, rate, varies=varies)
        meant = np.array([claim.clock for claim in claims])
        right = np.ones(200, bool)
        k = 1
        while k < 199:
            claims[k].clock += rng.choice([-1, 1]) * size * rng.uniform(0.5, 1)
            right[k] = False
            k += rng.integers(3, 40)
        error = np.abs(shown(claims) - meant)
        assert error[right].max() <= (16 if varies else 1) / rate + 1e-6, seed
        assert error[-1] < 1e-6


@pytest.mark.parametrize("rate, varies", [*((rate, False) for rate in RATES), (25, True)])
@pytest.mark.parametrize("longest_gap", [SHORTEST, LONGEST])
def test_a_clock_that_returns_is_the_old_one(rate, varies, longest_gap):
    """Several pictures are ahead, or behind. The end is where it would be without them."""
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        claims = clip(rng, round(100 * rate), rate, varies=varies)
        meant = [claim.clock for claim in claims]
        first = rng.integers(5, 30 * rate)
        shift = rng.choice([-1, 1]) * rng.uniform(1, 40)
        for claim in claims[first:first + rng.integers(2, 30)]:
            claim.clock += shift
        assert shown(claims, longest_gap)[-1] == pytest.approx(meant[-1]), seed


@pytest.mark.parametrize("rate", RATES)
def test_missing_and_repeated_times_move_nothing(rate):
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        claims = clip(rng, 300, rate)
        meant = np.array([claim.clock for claim in claims])
        for before, claim in zip(claims, claims[1:]):
            if rng.random() < 0.4:
                claim.clock = None
            elif rng.random() < 0.2 and not claim.is_key and before.clock is not None:
                claim.clock = before.clock
        assert np.abs(shown(claims) - meant).max() <= 3.001 / rate
        assert pictures(shown(claims), 1 / rate) == pictures(ffmpeg(claims, False), 1 / rate)


@pytest.mark.parametrize("at", ["zero", "where it was", "everywhere"])
@pytest.mark.parametrize("rate", RATES)
def test_a_clock_that_stands_still_moves_nothing(rate, at):
    """As cameras write it that lose their clock for some seconds."""
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        claims = clip(rng, round(100 * rate), rate)
        meant = [claim.clock for claim in claims]
        first = int(rng.integers(1, 30 * rate))
        stopped = claims[first:first + int(rng.integers(2, 30 * rate))]
        if at == "everywhere":
            stopped = claims
        for claim in stopped:
            claim.clock = 0.0 if at == "zero" else claims[first - 1].clock
        for longest_gap in (SHORTEST, LONGEST):
            assert np.abs(shown(claims, longest_gap) - meant).max() <= 1.001 / rate, seed


@pytest.mark.parametrize("rate", RATES)
def test_times_in_another_order_move_nothing(rate):
    """As if times of decoding had been taken for times of presentation."""
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        claims = clip(rng, 300, rate)
        meant = np.array([claim.clock for claim in claims])
        k = 1
        while k < 295:
            group = claims[k:k + rng.integers(2, 6)]
            clocks = [claim.clock for claim in group]
            for claim, clock in zip(group, clocks[-1:] + clocks[:-1]):
                claim.clock = clock
            k += len(group)
        assert np.abs(shown(claims) - meant).max() <= 6 / rate
        assert abs(shown(claims)[-1] - meant[-1]) <= 1.001 / rate


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("longest_gap", [SHORTEST, LONGEST])
def test_all_at_once(rate, longest_gap):
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        claims = []
        for _ in range(10):
            pieces = clip(rng, int(rng.integers(6, 60)), rate, 1.4)
            for k in range(2, len(pieces) - 2, 6):
                kind = rng.choice(["spike", "missing", "repeated", "right"])
                if kind == "spike":
                    pieces[k].clock += rng.choice([-50, -3, -1, 1, 3, 50, 5000])
                elif kind == "missing":
                    pieces[k].clock = None
                elif kind == "repeated" and not pieces[k].is_key:
                    pieces[k].clock = pieces[k - 1].clock
            claims += pieces
        meant = np.arange(len(claims)) / rate
        assert np.abs(shown(claims, longest_gap) - meant).max() <= 1.001 / rate, seed


@pytest.mark.parametrize("rate", RATES)
def test_a_small_step_back_is_no_new_clock(rate):
    """A sender corrects its clock now and then; what comes later stays at its time."""
    claims = clip(np.random.default_rng(0), 300, rate)
    for k in range(20, 300, 20):
        claims[k].is_key = False
        for claim in claims[k:]:
            claim.clock -= 0.9 * BACK + 1 / rate
    before_steps = slice(19, None, 20)
    meant = [claim.clock for claim in claims[before_steps]]
    assert shown(claims)[before_steps] == pytest.approx(meant)


@pytest.mark.parametrize("rate", RATES)
def test_pictures_wait_only_if_their_time_is_in_doubt(rate):
    """And then for two others. A picture without a time waits for none."""
    read = 0

    def reading(claims):
        nonlocal read
        for claim in claims:
            read += 1
            yield claim

    claims = clip(np.random.default_rng(0), 100, rate)
    claims[30].clock = None
    claims[60].clock += 40
    waited = [read - k for k, _ in enumerate(presented(reading(claims), None, LONGEST, []), 1)]
    assert max(waited[:60]) == 0
    assert max(waited) <= LOOKAHEAD == 2
    assert waited[-1] == 0


def test_a_start_that_no_picture_has():
    """The sound begins earlier, or what the header says of the beginning is wrong."""
    claims = clip(np.random.default_rng(0), 20, 5, begin=7.0)
    meant = np.arange(20) / 5
    for start, first in ((4.0, 3.0), (7.0, 0.0), (9.0, 0.0), (-500.0, 507.0), (-1000.0, 0.0)):
        for longest_gap in (SHORTEST, LONGEST):
            times = [time for _, time in presented(claims, start, longest_gap, [])]
            assert times == pytest.approx(first + meant)
