"""The miniature kitchen: it is deterministic, its labels are right, its words need memory."""
import hashlib
import itertools
from functools import cache

import numpy as np
import pytest

from toy import world
from toy.world import COLOUR, DOOR, PLACES, TYPE, Kitchen


@cache
def videos_of(name: str) -> list[Kitchen]:
    """20 videos of a world."""
    return [Kitchen(seed, 12, world.WORLDS[name]) for seed in range(20)]


@cache
def plain_videos() -> list[Kitchen]:
    """50 videos of the plain world."""
    return [Kitchen(seed) for seed in range(50)]


def frames_of(video: Kitchen) -> list[int]:
    """The last frame of each segment, as annotated."""
    return [narration.frame for narration in video.narrations]


def texts_of(video: Kitchen) -> list[str]:
    return [narration.text for narration in video.narrations]


def test_rendering_has_no_state():
    """In any order, the pixels are the same."""
    first = Kitchen(7)
    for frame in (len(first) - 1, 0, 5, 5, 0, len(first) - 1):
        assert np.array_equal(first.render(frame), Kitchen(7).render(frame))


@pytest.mark.parametrize("name, expected, means", [
    ("plain", "efc8ae4b491f219d", [110.71, 103.07, 88.28]),
    ("idle", "8e07a96e776ae17a", [105.29, 99.39, 85.90]),
    ("still", "8f09ccded0cf3d70", [121.23, 112.44, 94.40]),
    ("night", "970e9453fd7a8d41", [3.92, 3.63, 3.30]),
])
def test_the_worlds_stay_as_they_were(name, expected, means):
    """The bundled narrator and all reported numbers are of these videos."""
    content = hashlib.sha256()
    for seed in (0, 7, 1_000_003, 2_000_002, 3_000_001):
        kitchen = Kitchen(seed, 11, world.WORLDS[name])
        narrations = [(n.frame, n.text, n.memory_words) for n in kitchen.narrations]
        content.update(repr(narrations).encode())
        content.update(kitchen.labels().tobytes())
    assert content.hexdigest()[:16] == expected
    # Means over rows of cells, as roundings may differ between machines.
    picture = kitchen.render(len(kitchen) // 2).reshape(3, 32, -1)
    assert picture.mean((1, 2)) == pytest.approx(means, abs=0.05)


def test_labels_are_consistent():
    labels = np.concatenate([video.labels() for video in plain_videos()])              # [T, 9, A]
    assert np.array_equal(labels[..., TYPE] > 0, labels[..., COLOUR] > 0)

    containers = np.array([name in world.CONTAINERS for name in PLACES])
    assert ((labels[..., DOOR] > 0) == containers).all()
    closed = labels[..., DOOR] == world.CLOSED
    assert (labels[closed][:, TYPE] == 0).all()                # a door hides

    for video in plain_videos():                               # never both at work in one place
        for frame in video._frames:
            both = frame.you and frame.cook and frame.you.pose == world.ACT
            assert not (both and frame.you.place == frame.cook.place)


def acted_at(video: Kitchen) -> list[int]:
    """The place of each narration's event: where your hand acts; -1 for the opening."""
    places = [-1]
    for before, after in itertools.pairwise(frames_of(video)):
        acts = [frame.you for frame in video._frames[before + 1:after + 1]
                if frame.you and frame.you.pose == world.ACT]
        places.append(acts[0].place)
    return places


def brought_since(video: Kitchen, places: list[int], m: int, n: int) -> bool:
    """Whether the place of narration n got a new thing after narration m."""
    narrations = video.narrations
    cell = video.labels()[narrations[m].frame:narrations[n].frame + 1, places[n]]
    shown = cell[:, TYPE] > 0
    if cell[0, DOOR] == 0:                     # an open place: seen empty, then with a thing
        return bool((shown[1:] & ~shown[:-1]).any())
    fill = world.EVENTS["fill"].sentence.format(place=world.PLACES[places[n]])
    # A container: filled by you, or restocked by the other cook.
    filled = any(narration.text == fill for narration in narrations[m + 1:n])
    return filled or any(frame.cook and frame.cook.place == places[n] and frame.cook.opened
                         for frame in video._frames[narrations[m].frame:narrations[n].frame + 1])


@pytest.mark.parametrize("name", ["plain", "idle"])
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
            words = world.name_of_thing(cell[last, TYPE], cell[last, COLOUR]).split()
            assert list(narration.memory_words) == words
            assert last <= narrations[n - 2].frame             # a whole other segment lies between
            assert narration.text.endswith(" ".join(words) + ".")
            delays.append(narration.frame - last)
            # If it was named here before, that was another thing that looked the same.
            for m in range(1, n):
                if places[m] == places[n] and " ".join(words) in narrations[m].text:
                    assert brought_since(video, places, m, n)
    assert 8 < np.median(delays) < 40


def is_idle(video: Kitchen) -> np.ndarray:
    """Of each frame, whether it is idle time."""
    return np.array([frame.idle is not None for frame in video._frames])


def stretches(video: Kitchen) -> list[np.ndarray]:
    """The frames of each stretch of idle time; there is at least one."""
    frames = np.flatnonzero(is_idle(video))
    return np.split(frames, np.flatnonzero(np.diff(frames) > 1) + 1)


def test_in_idle_time_nothing_is_narrated():
    """No segment ends in an idle frame: the target of all of them is [SKIP]."""
    for video in videos_of("idle"):
        frames = frames_of(video)
        assert not is_idle(video)[frames].any()
        assert (np.diff(frames) > 0).all() and frames[-1] == len(video) - 1
        assert len(stretches(video)) == 1


@pytest.mark.parametrize("name, kind", [("still", "still"), ("night", "dark")])
def test_idle_time_is_put_into_the_same_video(name, kind):
    """Without the other cook, what happens is what happens in the plain video, later."""
    for plain, video in zip(plain_videos(), videos_of(name)):
        assert texts_of(video) == texts_of(plain)
        stretch, = stretches(video)
        assert len(stretch) == 240 == len(video) - len(plain)
        first, last = video.render(int(stretch[0])), video.render(int(stretch[-1]))
        assert np.array_equal(first, last) if kind == "still" else first.mean() < 6
        assert np.array_equal(np.delete(video.labels(), stretch, 0), plain.labels())


def test_a_share_of_the_videos_has_idle_time():
    videos = [Kitchen(seed, 12, world.World(idle=0.5)) for seed in range(50)]
    assert 0.35 < np.mean([is_idle(video).any() for video in videos]) < 0.65
    for plain, video in zip(plain_videos(), videos):
        if not is_idle(video).any():             # the same as the plain video
            assert video.narrations == plain.narrations
            assert np.array_equal(video.labels(), plain.labels())
