"""The miniature kitchen: it is deterministic, its labels are right, its memory narrations do need memory."""
import collections
import itertools
import re

import numpy as np
import pytest

from support.common import BadData
from toy import world
from toy.world import COLOUR, DOOR, HAND, HELD, Kitchen, LABELS, OTHER, PLACES, SIZES, TYPE

VIDEOS = [Kitchen(seed) for seed in range(200)]


def test_a_video_is_a_function_of_its_seed():
    one, two = Kitchen(7), Kitchen(7)
    assert one.narrations == two.narrations and np.array_equal(one.labels(), two.labels())
    order = [len(one) - 1, 0, 5]                               # rendering has no state: any order, the same pixels
    assert all(np.array_equal(one.render(f), two.render(f)) for f in order + order[::-1])


def test_seeds_and_frames_differ():
    one, two = Kitchen(1), Kitchen(2)
    assert one.narrations != two.narrations
    assert not np.array_equal(one.render(0), two.render(0)) and not np.array_equal(one.render(0), one.render(1))


def test_frames_and_labels_are_what_they_say():
    kitchen = Kitchen(3)
    frame, labels = kitchen.render(4), kitchen.labels()
    assert frame.shape == (world.SIZE, world.SIZE, 3) and frame.dtype == np.uint8
    assert labels.shape == (len(kitchen), 9, len(LABELS)) and labels.dtype == np.int8
    every = np.concatenate([video.labels() for video in VIDEOS])
    for label, classes in enumerate(SIZES):
        assert set(np.unique(every[..., label])) == set(range(classes))
    assert np.array_equal(every[..., TYPE] > 0, every[..., COLOUR] > 0)
    doors = np.array([name in world.CONTAINERS for name in PLACES])
    assert ((every[..., DOOR] > 0) == doors).all()
    assert (every[every[..., DOOR] == world.CLOSED][:, TYPE] == 0).all()           # a door hides
    assert ((every[..., HAND] > 0).sum(1) <= 1).all() and ((every[..., OTHER] > 0).sum(1) <= 1).all()
    assert not ((every[..., HAND] == world.ACT) & (every[..., OTHER] > 0)).any()   # never both at work in one place
    assert (every[every[..., HELD] == world.YOURS][:, HAND] > 0).all()
    assert (every[every[..., HELD] == world.THEIRS][:, OTHER] > 0).all()


def test_the_picture_shows_what_the_labels_say():
    """A pixel in the middle of a bowl has the bowl's colour; behind a closed door it does not."""
    for video in VIDEOS[:20]:
        cells = video.labels()[0]
        for place in np.flatnonzero(cells[:, TYPE] == 1 + world.TYPES.index("bowl")):
            x, y = world.anchor(int(place), (16, 18))
            seen = video.render(0)[y - 1:y + 2, x - 1:x + 2].mean((0, 1))
            hues = [np.array(rgb) / np.linalg.norm(rgb) for rgb in world.RGB]
            assert np.argmax([hue @ seen for hue in hues]) == cells[place, COLOUR] - 1


def test_segments_end_where_they_are_annotated():
    for video in VIDEOS:
        frames = [narration.frame for narration in video.narrations]
        assert video.narrations[0] == world.Annotation(0, world.OPENING) and frames[-1] == len(video) - 1
        assert len(frames) == 13 and all(2 <= b - a <= 14 for a, b in zip(frames, frames[1:]))
        assert not video.labels()[0, :, [HAND, OTHER]].any()


def test_ends_are_ambiguous():
    """The nominal end is the second raised hand in a row; annotations stray from it, and hands rise in between."""
    strays, pauses = collections.Counter(), 0
    for video in VIDEOS:
        pose = video.labels()[..., HAND].max(1)
        ends = np.flatnonzero((pose[1:] == world.LIFT) & (pose[:-1] == world.LIFT)) + 1
        annotated = [narration.frame for narration in video.narrations[1:-1]]
        strays.update(int(frame - end) for frame, end in zip(annotated, ends))
        raised = (pose[1:-1] == world.LIFT) & (pose[:-2] == world.ACT) & (pose[2:] == world.ACT)
        pauses += int(raised.sum())
    share = {stray: count / sum(strays.values()) for stray, count in strays.items()}
    assert share == pytest.approx(world.JITTER, abs=0.04) and pauses > 200


def test_only_who_fills_comes_with_something():
    """Your hand carries a thing on the way to a place that is filled, on no other way; it still holds it when a door
    opens, on nothing: so a fill is not a check."""
    for video in VIDEOS:
        labels = video.labels()
        bare = (labels[..., DOOR] == world.OPEN) & (labels[..., TYPE] == 0)
        assert (labels[bare][:, HELD] == world.YOURS).all()
        filled = [n for n in video.narrations if n.text in {f"You fill the {name}." for name in world.CONTAINERS}]
        assert bare.sum() == len(filled)
        reach = np.concatenate([[False], (labels[..., HAND] == world.REACH).any(1)])
        starts = np.flatnonzero(reach[1:] & ~reach[:-1])
        carried = [bool((labels[start, :, HELD] == world.YOURS).any()) for start in starts]
        assert carried == [narration.text.startswith("You fill") for narration in video.narrations[1:]]


def targets(video: Kitchen) -> list[int]:
    """The place of each narration's event: where your hand acts."""
    hands, frames = video.labels()[..., HAND], [narration.frame for narration in video.narrations]
    return [-1] + [int(np.flatnonzero((hands[a + 1:b + 1] == world.ACT).any(0))[0]) for a, b in zip(frames, frames[1:])]


def test_memory_narrations_need_memory():
    """Checked from labels and texts alone: seen there, not since the previous segment began, never named."""
    delays = []
    for video in VIDEOS:
        labels, narrations, places = video.labels(), video.narrations, targets(video)
        for n, narration in enumerate(narrations):
            if not narration.memory_words:
                continue
            cell = labels[:narration.frame + 1, places[n]]
            shown = np.flatnonzero(cell[:, TYPE])
            last = cell[shown[-1]]
            assert narration.memory_words == (world.COLOURS[last[COLOUR] - 1], world.TYPES[last[TYPE] - 1])
            assert shown[-1] <= narrations[n - 2].frame        # a whole other segment lies between
            delays.append(narration.frame - shown[-1])
            for m in range(1, n):                              # named before? then another thing has come since
                if places[m] == places[n] and " ".join(narration.memory_words) in narrations[m].text:
                    assert brought_since(labels, narrations, places, m, n)
    assert 8 < np.median(delays) < 40


def brought_since(labels: np.ndarray, narrations: list, places: list[int], m: int, n: int) -> bool:
    """Whether the place of narration n got a new thing after narration m."""
    cell = labels[narrations[m].frame:narrations[n].frame + 1, places[n]]
    if cell[0, DOOR] == 0:                                     # an open place: seen empty, then with a thing
        return bool(((cell[1:, TYPE] > 0) & (cell[:-1, TYPE] == 0)).any())
    filled = any(narrations[i].text == f"You fill the {PLACES[places[n]]}." for i in range(m + 1, n))
    return filled or bool(((cell[:, OTHER] > 0) & (cell[:, DOOR] == world.OPEN)).any())


def test_memory_words_are_in_the_text():
    for narration in itertools.chain(*(video.narrations for video in VIDEOS)):
        first = narration.text.split()[1]
        assert bool(narration.memory_words) == (first in ("tap", "wipe"))
        assert narration.text.endswith(" ".join(narration.memory_words) + ".")


def test_vocabulary_is_small_and_shared():
    said = {word for video in VIDEOS for n in video.narrations for word in re.findall(r"\w+", n.text)}
    texts = list(itertools.islice(world.documents(0), 2000))
    written = {word for text in texts for word in re.findall(r"\w+", text)}
    assert said <= written and len(written) <= 60
    assert all(3 <= len(text.splitlines()) <= 10 and "You " in text for text in texts)
    assert texts[:9] == list(itertools.islice(world.documents(0), 9)) != list(itertools.islice(world.documents(1), 9))


def test_documents_tell_the_truth():
    """What is tapped is what the last inventory line of that place says."""
    checked = 0
    for text in itertools.islice(world.documents(3), 2000):
        facts = {}
        for line in text.splitlines():
            if fact := re.match(r"(?:the )?(\w+): (.+)", line):
                facts[fact[1]] = fact[2]
            elif tapped := re.match(r"You tap the (\w+) hiding the (.+)\.", line):
                assert facts[tapped[1]] == tapped[2]
                checked += 1
    assert checked > 300


def test_frequencies():
    verbs = collections.Counter(n.text.split()[1] for video in VIDEOS for n in video.narrations[1:])
    share = {verb: count / sum(verbs.values()) for verb, count in verbs.items()}
    assert 0.4 < share["tap"] + share["wipe"] < 0.6 and 0.7 < share["tap"] / share["wipe"] < 1.4
    assert 0.2 < share["wash"] + share["heat"] + share["shake"] + share["polish"] < 0.35
    assert all(0.04 < share[verb] < 0.12 for verb in ("check", "fill", "clear"))
    assert 0.6 < np.mean([video.labels()[..., OTHER].any() for video in VIDEOS])


@pytest.mark.parametrize("arguments", [(-1,), (0, 0), (0, -3)])
def test_bad_arguments(arguments):
    with pytest.raises(ValueError):
        Kitchen(*arguments)
    with pytest.raises(IndexError):
        Kitchen(0, 1).render(1000)


def test_splits_are_disjoint_and_reproducible():
    ranges = list(world.SEEDS.values())
    assert all(not set((a[0], a[-1])) & set(b) and a.stop <= b.start for a, b in zip(ranges, ranges[1:]))
    assert list(world.SEEDS) == ["train", "val", "test"]
    assert ranges[0].start > 100_000                               # demonstrations stay below
    seeds = {split: [seed for seed, _ in world.kitchens(split, 4)] for split in world.SEEDS}
    assert all(seeds[split] == list(world.SEEDS[split][:4]) for split in seeds)
    one, two = (list(world.kitchens("val", 6, (2, 5))) for _ in range(2))
    assert all(a.seed == seed == b.seed and a.narrations == b.narrations for (seed, a), (_, b) in zip(one, two))
    counts = {len(kitchen.narrations) - 1 for _, kitchen in world.kitchens("train", 40, (2, 5))}   # less the opening
    assert counts == {2, 3, 4, 5}
    assert {len(kitchen.narrations) - 1 for _, kitchen in world.kitchens("test", 40)} == {8, 9, 10, 11, 12}
    assert sum(1 for _ in world.kitchens("val")) == world.VIDEOS["val"]
    for arguments, says in ((("dev",), "unknown split"), (("val", 0), "give from 1"), (("val", 10 ** 6), "give from 1"),
                            (("val", 1, (0, 3)), "segments"), (("val", 1, (4, 3)), "segments")):
        with pytest.raises(BadData, match=says):
            world.kitchens(*arguments)
