"""The miniature kitchen: it is deterministic, its labels are right, its words need memory."""
import collections
import hashlib
import itertools
import re
from functools import cache

import numpy as np
import pytest

from support.common.errors import BadData
from toy import world
from toy.world import COLOUR, DOOR, HAND, HELD, LABELS, OTHER, PLACES, SIZES, TYPE, Kitchen


@cache
def videos_of(name: str) -> list[Kitchen]:
    """50 videos of a world."""
    return [Kitchen(seed, 12, world.WORLDS[name]) for seed in range(50)]


@cache
def plain_videos() -> list[Kitchen]:
    """200 videos of the plain world."""
    return [Kitchen(seed) for seed in range(200)]


def frames_of(video: Kitchen) -> list[int]:
    """The last frame of each segment, as annotated."""
    return [narration.frame for narration in video.narrations]


def words_of(texts) -> set[str]:
    return {word for text in texts for word in re.findall(r"\w+", text)}


def narrated(videos: list[Kitchen]) -> list[str]:
    """All sentences of some videos."""
    return [narration.text for video in videos for narration in video.narrations]


def shares(counter: collections.Counter) -> dict:
    total = counter.total()
    return {key: count / total for key, count in counter.items()}


def rising(numbers: list[int]) -> bool:
    return all(first < second for first, second in itertools.pairwise(numbers))


# ------------------------------------------------------------- the plain world

def test_a_video_is_a_function_of_its_seed():
    first = Kitchen(7)
    second = Kitchen(7)
    assert first.narrations == second.narrations
    assert np.array_equal(first.labels(), second.labels())
    # Rendering has no state: in any order, the pixels are the same.
    for frame in (len(first) - 1, 0, 5, 5, 0, len(first) - 1):
        assert np.array_equal(first.render(frame), second.render(frame))


def test_the_plain_world_stays_as_it_was():
    """The bundled narrator and all reported numbers are of these videos."""
    documents = itertools.islice(world.documents(5), 50)
    content = hashlib.sha256("\n".join(documents).encode())
    for seed in (0, 7, 1_000_003, 3_000_001):
        kitchen = Kitchen(seed, 11)
        narrations = [(n.frame, n.text, n.memory_words) for n in kitchen.narrations]
        content.update(repr(narrations).encode())
        content.update(kitchen.labels().tobytes())
    expected = "356742fc4215f0f7ebffe1b248585e691f498f2eb3efceef6bf328917504498b"
    assert content.hexdigest() == expected
    # Means over cells, as roundings may differ between machines.
    cells = Kitchen(7, 11).render(20).reshape(3, 32, 3, 32, 3).mean((1, 3, 4))
    known = [143.68, 132.44, 196.24, 87.49, 180.21, 179.54, 139.06, 112.04, 105.19]
    assert cells.ravel() == pytest.approx(known, abs=0.05)


def test_seeds_and_frames_differ():
    first = Kitchen(1)
    second = Kitchen(2)
    assert first.narrations != second.narrations
    assert not np.array_equal(first.render(0), second.render(0))
    assert not np.array_equal(first.render(0), first.render(1))


def test_frames_and_labels_have_their_shapes():
    kitchen = Kitchen(3)
    frame = kitchen.render(4)
    labels = kitchen.labels()
    assert frame.shape == (world.SIZE, world.SIZE, 3)
    assert frame.dtype == np.uint8
    assert labels.shape == (len(kitchen), 9, len(LABELS))
    assert labels.dtype == np.int8


def test_labels_are_consistent():
    labels = np.concatenate([video.labels() for video in plain_videos()])              # [T, 9, A]
    for label, classes in enumerate(SIZES):
        assert set(np.unique(labels[..., label])) == set(range(classes))
    assert np.array_equal(labels[..., TYPE] > 0, labels[..., COLOUR] > 0)

    containers = np.array([name in world.CONTAINERS for name in PLACES])
    assert ((labels[..., DOOR] > 0) == containers).all()
    closed = labels[..., DOOR] == world.CLOSED
    assert (labels[closed][:, TYPE] == 0).all()                # a door hides

    hand = labels[..., HAND] > 0
    glove = labels[..., OTHER] > 0
    assert (hand.sum(1) <= 1).all()
    assert (glove.sum(1) <= 1).all()
    acting = labels[..., HAND] == world.ACT
    assert not (acting & glove).any()                          # never both at work in one place
    assert hand[labels[..., HELD] == world.YOURS].all()
    assert glove[labels[..., HELD] == world.THEIRS].all()


def test_the_picture_shows_what_the_labels_say():
    """A pixel in the middle of a bowl has the bowl's colour."""
    bowl = 1 + world.TYPES.index("bowl")
    hues = [np.array(rgb) / np.linalg.norm(rgb) for rgb in world.RGB]
    for video in plain_videos()[:20]:
        cells = video.labels()[0]
        picture = video.render(0)
        for place in np.flatnonzero(cells[:, TYPE] == bowl):
            x, y = world.anchor(int(place), (16, 18))
            pixel = picture[y - 1:y + 2, x - 1:x + 2].mean((0, 1))
            assert np.argmax([hue @ pixel for hue in hues]) == cells[place, COLOUR] - 1


def test_segments_end_where_they_are_annotated():
    for video in plain_videos():
        frames = frames_of(video)
        assert video.narrations[0] == world.Annotation(0, world.OPENING)
        assert frames[-1] == len(video) - 1
        assert len(frames) == 13
        lengths = np.diff(frames)
        assert lengths.min() >= 2
        assert lengths.max() <= 14
        assert not video.labels()[0, :, [HAND, OTHER]].any()


def test_when_a_thing_was_last_seen():
    """A sentence's thing was in a place or in a hand at that frame, and in no place since."""
    for video in plain_videos():
        labels = video.labels()
        for narration in video.narrations:
            assert (narration.seen is None) == (not narration.memory_words)
            if narration.seen is None:
                continue
            shows = []                         # frames in which a place shows such a thing
            for frame in range(narration.frame):
                for kind, colour in labels[frame][:, [TYPE, COLOUR]]:
                    if kind and video.world.words(kind, colour) == narration.memory_words:
                        shows.append(frame)
            carried = (labels[narration.seen, :, HELD] > 0).any()
            assert carried or narration.seen in shows
            assert narration.seen < narration.frame


def test_ends_are_ambiguous():
    """The nominal end is the second raised hand in a row. Annotations are some frames away from it,
    and in between hands rise, too.
    """
    offsets = collections.Counter()            # {frames from the nominal end: narrations}
    pauses = 0
    for video in plain_videos():
        pose = video.labels()[..., HAND].max(1)
        lifted = pose == world.LIFT
        acting = pose == world.ACT
        ends = np.flatnonzero(lifted[1:] & lifted[:-1]) + 1
        for frame, end in zip(frames_of(video)[1:-1], ends):
            offsets[int(frame - end)] += 1
        pauses += int((acting[:-2] & lifted[1:-1] & acting[2:]).sum())
    assert shares(offsets) == pytest.approx(world.JITTER, abs=0.04)
    assert pauses > 200


def test_only_who_fills_comes_with_something():
    """Your hand carries a thing to a place that is filled, and to no other.

    It still holds the thing when a door opens on an empty container: so a fill is not a check.
    """
    fills = {f"You fill the {name}." for name in world.CONTAINERS}
    for video in plain_videos():
        labels = video.labels()
        open_on_nothing = (labels[..., DOOR] == world.OPEN) & (labels[..., TYPE] == 0)
        assert (labels[open_on_nothing][:, HELD] == world.YOURS).all()
        texts = [narration.text for narration in video.narrations]
        assert open_on_nothing.sum() == sum(text in fills for text in texts)

        reach = (labels[..., HAND] == world.REACH).any(1)
        reach = np.concatenate([[False], reach])
        starts = np.flatnonzero(reach[1:] & ~reach[:-1])
        carried = [bool((labels[start, :, HELD] == world.YOURS).any()) for start in starts]
        assert carried == [text.startswith("You fill") for text in texts[1:]]


def acted_at(video: Kitchen) -> list[int]:
    """The place of each narration's event: where your hand acts; -1 for the opening."""
    acting = video.labels()[..., HAND] == world.ACT            # [T, 9]
    places = [-1]
    for before, frame in itertools.pairwise(frames_of(video)):
        in_segment = acting[before + 1:frame + 1].any(0)       # [9]
        places.append(int(np.flatnonzero(in_segment)[0]))
    return places


def brought_since(video: Kitchen, places: list[int], m: int, n: int) -> bool:
    """Whether the place of narration n got a new thing after narration m."""
    narrations = video.narrations
    cell = video.labels()[narrations[m].frame:narrations[n].frame + 1, places[n]]
    shown = cell[:, TYPE] > 0
    if cell[0, DOOR] == 0:                     # an open place: seen empty, then with a thing
        return bool((shown[1:] & ~shown[:-1]).any())
    fill = video.world.sentence("fill", video.world.places[places[n]], None)
    # A container: filled by you, or restocked by the other cook.
    filled = any(narration.text == fill for narration in narrations[m + 1:n])
    restocked = (cell[:, OTHER] > 0) & (cell[:, DOOR] == world.OPEN)
    return filled or bool(restocked.any())


@pytest.mark.parametrize("name", ["plain", "idle", "second"])
def test_memory_narrations_need_memory(name):
    """The thing was seen there before the previous segment began, and no narration named it."""
    delays = []
    for video in plain_videos() if name == "plain" else videos_of(name):
        labels = video.labels()
        narrations = video.narrations
        places = acted_at(video)
        for n, narration in enumerate(narrations):
            if not narration.memory_words:
                continue
            cell = labels[:narration.frame + 1, places[n]]
            last = np.flatnonzero(cell[:, TYPE])[-1]           # the last frame that shows a thing
            words = video.world.words(cell[last, TYPE], cell[last, COLOUR])
            assert narration.memory_words == words
            assert last <= narrations[n - 2].frame             # a whole other segment lies between
            delays.append(narration.frame - last)
            # If it was named here before, that was another thing that looked the same.
            for m in range(1, n):
                if places[m] == places[n] and " ".join(words) in narrations[m].text:
                    assert brought_since(video, places, m, n)
    assert 8 < np.median(delays) < 40


def test_memory_words_are_in_the_text():
    for video in plain_videos():
        for narration in video.narrations:
            verb = narration.text.split()[1]
            assert bool(narration.memory_words) == (verb in ("tap", "wipe"))
            assert narration.text.endswith(" ".join(narration.memory_words) + ".")


def test_frequencies():
    verbs = collections.Counter(
        narration.text.split()[1] for video in plain_videos() for narration in video.narrations[1:])
    share = shares(verbs)
    assert 0.4 < share["tap"] + share["wipe"] < 0.6
    assert 0.7 < share["tap"] / share["wipe"] < 1.4
    assert 0.2 < share["wash"] + share["heat"] + share["shake"] + share["polish"] < 0.35
    assert all(0.04 < share[verb] < 0.12 for verb in ("check", "fill", "clear"))
    assert np.mean([video.labels()[..., OTHER].any() for video in plain_videos()]) > 0.6


@pytest.mark.parametrize("arguments", [(-1,), (0, 0), (0, -3)])
def test_bad_arguments(arguments):
    with pytest.raises(ValueError):
        Kitchen(*arguments)


def test_there_is_no_frame_after_the_last():
    with pytest.raises(IndexError):
        Kitchen(0, 1).render(1000)


# ------------------------------------------------------------- documents

def test_vocabulary_is_small_and_shared():
    texts = list(itertools.islice(world.documents(0), 2000))
    written = words_of(texts)
    assert words_of(narrated(plain_videos())) <= written
    assert len(written) <= 60
    for text in texts:
        assert 3 <= len(text.splitlines()) <= 10
        assert "You " in text
    assert texts[:9] == list(itertools.islice(world.documents(0), 9))
    assert texts[:9] != list(itertools.islice(world.documents(1), 9))


def test_documents_tell_the_truth():
    """What is tapped is what the last inventory line of that place says."""
    checked = 0
    for text in itertools.islice(world.documents(3), 2000):
        contents = {}
        for line in text.splitlines():
            listed = re.match(r"(?:the )?(\w+): (.+)", line)
            tapped = re.match(r"You tap the (\w+) hiding the (.+)\.", line)
            if listed:
                contents[listed[1]] = listed[2]
            elif tapped:
                assert contents[tapped[1]] == tapped[2]
                checked += 1
    assert checked > 300


# ------------------------------------------------------------- splits

def test_splits_are_disjoint():
    assert list(world.SEEDS) == ["train", "val", "test"]
    ranges = list(world.SEEDS.values())
    assert ranges[0].start > 100_000           # demonstrations stay below
    for first, second in itertools.pairwise(ranges):
        assert first.stop <= second.start


def test_splits_are_reproducible():
    for split in world.SEEDS:
        seeds = [seed for seed, _ in world.kitchens(split, 4)]
        assert seeds == list(world.SEEDS[split][:4])
    first = list(world.kitchens("val", 6, (2, 5)))
    second = list(world.kitchens("val", 6, (2, 5)))
    for (seed, video), (same_seed, same_video) in zip(first, second):
        assert video.seed == seed == same_seed == same_video.seed
        assert video.narrations == same_video.narrations
    assert sum(1 for _ in world.kitchens("val")) == world.VIDEOS["val"]


@pytest.mark.parametrize("split, segments, counts", [
    ("train", (2, 5), {2, 3, 4, 5}),
    ("test", world.SEGMENTS, {8, 9, 10, 11, 12}),
])
def test_numbers_of_segments(split, segments, counts):
    videos = world.kitchens(split, 40, segments)
    assert {len(video.narrations) - 1 for _, video in videos} == counts        # less the opening


@pytest.mark.parametrize("arguments, says", [
    (("dev",), "unknown split"),
    (("val", 0), "give from 1"),
    (("val", 10 ** 6), "give from 1"),
    (("val", 1, (0, 3)), "segments"),
    (("val", 1, (4, 3)), "segments"),
])
def test_refusals_of_splits(arguments, says):
    with pytest.raises(BadData, match=says):
        world.kitchens(*arguments)


# ------------------------------------------------------------- idle time

def stretches(video: Kitchen) -> list[np.ndarray]:
    """The frames of each stretch of idle time."""
    frames = np.flatnonzero(video.idle())
    if len(frames) == 0:
        return []
    return np.split(frames, np.flatnonzero(np.diff(frames) > 1) + 1)


def kind_of(video: Kitchen, frames: np.ndarray) -> str:
    """What kind of idle time these frames show, by the pictures and labels alone."""
    labels = video.labels()[frames]
    first, second, third = (video.render(int(frame)) for frame in frames[:3])
    if np.array_equal(first, second) and np.array_equal(second, third):
        return "still"
    if labels[..., HAND].any():
        return "rest"
    if labels.any():
        return "away"
    return "dark" if first.mean() < 6 else "covered"


def test_in_idle_time_nothing_is_narrated():
    """No segment ends in an idle frame: the target of all of them is [SKIP]."""
    for video in videos_of("idle"):
        frames = frames_of(video)
        assert not video.idle()[frames].any()
        assert len(stretches(video)) == 1


def test_kinds_of_idle_time():
    lengths = []
    kinds = set()
    for video in videos_of("idle"):
        stretch, = stretches(video)
        lengths.append(len(stretch))
        kind = kind_of(video, stretch)
        kinds.add(kind)
        labels = video.labels()
        before = int(stretch[0]) - 1
        if kind in ("rest", "still"):          # as in the last frame of the segment before
            assert (labels[stretch][..., HAND] == labels[before, :, HAND]).all()
            assert set(labels[before, :, HAND]) <= {0, world.LIFT}
        if kind == "still":
            assert np.array_equal(video.render(before), video.render(int(stretch[-1])))
        if kind in ("dark", "covered"):
            assert not labels[stretch].any()
    assert kinds == set(world.IDLE)
    assert 10 <= min(lengths) < 20
    assert 60 < max(lengths) <= 240
    assert 0.8 < np.mean([length <= 60 for length in lengths]) < 1


def test_a_covered_camera_sees_nothing():
    video = Kitchen(3, 8, world.WORLDS["idle"]._replace(kinds=("covered",)))

    def strongest_edge(frame):
        rows = video.render(frame).astype(float).mean(1)       # [96, 3]
        return np.abs(np.diff(rows, axis=0)).max()

    covered = int(stretches(video)[0][0])
    assert strongest_edge(covered) < 5         # the noise
    assert strongest_edge(0) > 10              # furniture


@pytest.mark.parametrize("name, kind", [("still", "still"), ("night", "dark")])
def test_idle_time_is_put_into_the_same_video(name, kind):
    """Without the other cook, what happens is what happens in the plain video, later."""
    for plain, video in zip(plain_videos(), videos_of(name)):
        assert narrated([video]) == narrated([plain])
        stretch, = stretches(video)
        assert len(stretch) == 240 == len(video) - len(plain)
        assert kind_of(video, stretch) == kind
        rest = np.delete(video.labels(), stretch, 0)
        # Afterwards your hand may come from elsewhere.
        assert np.array_equal(rest[..., :HAND], plain.labels()[..., :HAND])


def test_the_other_cook_works_in_idle_time():
    videos_with_work = 0
    for video in videos_of("idle"):
        labels = video.labels()
        glove = labels[..., OTHER] > 0
        cooking = glove.any(1) & video.idle()
        videos_with_work += cooking.any()
        hand = labels[..., HAND] > 0
        assert not (hand & glove)[cooking].any()
    assert 5 < videos_with_work < 40


def test_a_share_of_the_videos_has_idle_time():
    half = world.find_world("plain", 0.5)
    videos = [Kitchen(seed, 12, half) for seed in range(200)]
    assert 0.4 < np.mean([video.idle().any() for video in videos]) < 0.6
    for plain, video in zip(plain_videos(), videos):
        if not video.idle().any():             # the same as the plain video
            assert video.narrations == plain.narrations
            assert np.array_equal(video.labels(), plain.labels())
    # Training does not get much slower.
    assert sum(map(len, videos)) < 1.4 * sum(map(len, plain_videos()))


# ------------------------------------------------------------- other worlds

def test_worlds_are_found_by_name():
    assert world.find_world("hard") == world.WORLDS["hard"]
    assert world.find_world("idle").idle == 1
    with pytest.raises(BadData, match="choose one of plain, idle"):
        world.find_world("kitchen")


def test_hard_ends_are_hard():
    """Annotations are further from the ends than in the plain world. More often, frames look like
    an end but are none.
    """
    offsets = collections.Counter()            # {frames from the nominal end: narrations}
    false_ends = 0
    true_ends = 0
    for video in videos_of("hard"):
        pose = video.labels()[..., HAND].max(1)
        lifted = pose == world.LIFT
        frames = frames_of(video)
        assert rising(frames)
        ends = np.flatnonzero((pose[1:] == world.REACH) & lifted[:-1])
        for frame, end in zip(frames[1:], ends):
            offsets[int(frame - end)] += 1
        second_lifts = np.flatnonzero(lifted[1:] & lifted[:-1]) + 1
        false_ends += len(set(second_lifts) - set(ends))
        true_ends += len(ends)
    assert shares(offsets) == pytest.approx(world.WORLDS["hard"].jitter, abs=0.05)
    assert false_ends > 0.4 * true_ends        # two raised hands in a row mean little


def test_the_second_kitchen_has_other_words():
    """Other colours and verbs; the same things and furniture."""
    second = world.WORLDS["second"]
    words = words_of(narrated(videos_of("second")))
    assert words & words_of(narrated(plain_videos())) == {*world.TYPES, *PLACES, "You", "the"}
    assert words >= set(second.colours)
    assert not set(second.rgb) & set(world.RGB)
    written = words_of(itertools.islice(world.documents(0, second), 500))
    assert words <= written
    assert not written & set(world.COLOURS)
    for video in videos_of("second"):
        for narration in video.narrations:
            if narration.memory_words:
                assert narration.memory_words[0] in second.colours
                assert narration.text.endswith(" ".join(narration.memory_words) + ".")


def test_the_second_kitchen_has_furniture_elsewhere_and_longer_segments():
    doors = [name in world.CONTAINERS for name in world.WORLDS["second"].places]
    for video in videos_of("second"):
        assert ((video.labels()[..., DOOR] > 0) == doors).all()
    plain = np.mean([frames_of(video)[-1] for video in videos_of("plain")])
    second = np.mean([frames_of(video)[-1] for video in videos_of("second")])
    assert second > 1.25 * plain


def test_it_gets_dark():
    """Only the light differs from the plain video: at its darkest the picture is almost black."""
    lights = []
    for plain, video in zip(plain_videos(), videos_of("dark")):
        assert video.narrations == plain.narrations
        assert np.array_equal(video.labels(), plain.labels())
        lights_of_video = [video.light(frame) for frame in range(len(video))]
        lights += lights_of_video
        darkest = int(np.argmin(lights_of_video))
        light = lights_of_video[darkest]
        in_daylight = plain.render(darkest).mean()
        assert video.render(darkest).mean() <= in_daylight * (light + 0.1) / 0.7
    assert min(lights) < 0.05
    assert max(lights) > 0.9
    assert 0.2 < np.mean(np.array(lights) < 0.2) < 0.6


def test_clutter_is_seen_but_never_used():
    for plain, video in zip(plain_videos(), videos_of("clutter")[:10]):
        assert video.narrations == plain.narrations
        assert np.array_equal(video.labels(), plain.labels())
        difference = np.abs(video.render(0).astype(int) - plain.render(0).astype(int))
        for place, thing in enumerate(video.clutter):
            x, y = world.anchor(place, (0, 0))
            changed = difference[y + 3:y + 29, x + 3:x + 29].max()
            if thing is None:
                assert changed == 0
            else:
                assert changed > 20
                assert PLACES[place] not in world.CONTAINERS


def test_how_much_clutter_there_is():
    cluttered = []
    for video in videos_of("clutter"):
        for name, thing in zip(PLACES, video.clutter):
            if name not in world.CONTAINERS:
                cluttered.append(thing is not None)
    assert 0.7 < np.mean(cluttered) < 0.9


@pytest.mark.parametrize("seed, idle", [(1000258, 0.5), (1000530, None), (1000613, 0.5)])
def test_narrations_stay_in_order(seed, idle):
    """Where annotations stray far and the last one is held back, no two are of one frame."""
    segments = int(np.random.default_rng((seed, 0)).integers(8, 13))           # as world.kitchens
    kitchen = world.Kitchen(seed, segments, world.find_world("hard", idle))
    frames = frames_of(kitchen)
    assert rising(frames)
    assert frames[-1] == len(kitchen) - 1
