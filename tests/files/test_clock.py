"""support/files/clock.py: made-up times of pictures, against the times that were meant."""
import numpy as np
import pytest

from support.files.clock import Decoded, presented

SEEDS = range(5)
RATES = [2, 30000 / 1001]
LONGEST = 60.0                                 # seconds, of a gap
SHORTEST = 10.0                                # the same where clocks may change on the way


def clip(length: int, rate: float, begin: float = 0.0) -> list[Decoded]:
    return [Decoded(n, begin + n / rate, 1 / rate) for n in range(length)]


def shown(claims: list[Decoded], longest_gap: float = LONGEST, start: float | None = None):
    """(the times at which pictures are shown, leaps)"""
    leaps = []
    copies = [Decoded(**vars(claim)) for claim in claims]
    times = [time for _, time in presented(copies, start, longest_gap, leaps)]
    assert len(times) == len(claims) and times == sorted(times)
    return np.array(times), leaps


@pytest.mark.parametrize("rate", RATES)
def test_missing_repeated_and_swapped_times_move_nothing(rate):
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        claims = clip(300, rate)
        k = 1
        while k < 295:
            kind = rng.choice(["missing", "repeated", "swapped"])
            if kind == "missing":
                claims[k].clock = None
            elif kind == "repeated":
                claims[k].clock = claims[k - 1].clock
            else:                              # as if times of decoding were those of presentation
                group = claims[k:k + 4]
                clocks = [claim.clock for claim in group]
                for claim, clock in zip(group, clocks[-1:] + clocks[:-1]):
                    claim.clock = clock
                k += 3
            k += int(rng.integers(2, 9))
        times, leaps = shown(claims)
        assert np.abs(times - np.arange(300) / rate).max() <= 4 / rate and leaps == []
        assert times[-1] == pytest.approx(299 / rate)


@pytest.mark.parametrize("at", ["zero", "where it was", "everywhere"])
def test_a_clock_that_stands_still_moves_nothing(at):
    """As cameras write it that lose their clock for some seconds. These pictures have no times."""
    claims = clip(1500, 25)
    stopped = claims if at == "everywhere" else claims[500:1000]
    for claim in stopped:
        claim.clock = claims[499].clock if at == "where it was" else 0.0
    times, leaps = shown(claims, SHORTEST)
    assert np.abs(times - np.arange(1500) / 25).max() <= 1.001 / 25 and leaps == []
    timeless = [claim for claim, _ in presented(claims, None, SHORTEST, []) if claim.clock is None]
    assert abs(len(timeless) - len(stopped)) <= 1


@pytest.mark.parametrize("shift", [20, -20])
def test_a_clock_that_leaves_for_several_pictures_is_told(shift):
    """Where it leaps, it may be a gap; where it goes back, it is another clock."""
    claims = clip(1500, 25, begin=7.0)
    for claim in claims[700:720]:
        claim.clock += shift
    times, leaps = shown(claims)
    assert times[:700] == pytest.approx(np.arange(700) / 25) and leaps == pytest.approx([-20])
    times, leaps = shown(claims, SHORTEST)
    assert times == pytest.approx(np.arange(1500) / 25) and leaps == pytest.approx([shift, -shift])


@pytest.mark.parametrize("start, first, told", [
    (4.0, 3.0, 0), (7.0, 0.0, 0), (9.0, 0.0, 0), (-500.0, 0.0, 1)])
def test_a_start_that_no_picture_has(start, first, told):
    """The sound begins earlier, or what the header says of the beginning is wrong."""
    times, leaps = shown(clip(20, 5, begin=7.0), SHORTEST, start)
    assert times == pytest.approx(first + np.arange(20) / 5) and len(leaps) == told


def test_the_first_pictures_without_a_time_come_before_those_that_have_one():
    claims = clip(20, 5, begin=7.0)
    for claim in claims[:3]:
        claim.clock = None
    times, leaps = shown(claims)
    assert times == pytest.approx(np.arange(20) / 5) and leaps == []
