"""The miniature kitchen: it is deterministic, its labels are right, its memory narrations do need memory."""
import collections
import hashlib
import itertools
import re

import numpy as np
import pytest

from support.common import BadData
from toy import world
from toy.world import COLOUR, DOOR, HAND, HELD, Kitchen, LABELS, OTHER, PLACES, SIZES, TYPE

VIDEOS = [Kitchen(seed) for seed in range(200)]
OTHERS = {name: [Kitchen(seed, 12, variant) for seed in range(50)] for name, variant in world.WORLDS.items()}


def test_a_video_is_a_function_of_its_seed():
    one, two = Kitchen(7), Kitchen(7)
    assert one.narrations == two.narrations and np.array_equal(one.labels(), two.labels())
    order = [len(one) - 1, 0, 5]                               # rendering has no state: any order, the same pixels
    assert all(np.array_equal(one.render(f), two.render(f)) for f in order + order[::-1])


def test_the_plain_world_stays_as_it_was():
    """The bundled narrator and all reported numbers are of these videos, whatever else the world can do."""
    told = hashlib.sha256("\n".join(itertools.islice(world.documents(5), 50)).encode())
    for seed in (0, 7, 1_000_003, 3_000_001):
        kitchen = Kitchen(seed, 11)
        told.update(repr([(n.frame, n.text, n.memory_words) for n in kitchen.narrations]).encode())
        told.update(kitchen.labels().tobytes())
    assert told.hexdigest() == "356742fc4215f0f7ebffe1b248585e691f498f2eb3efceef6bf328917504498b"
    cells = Kitchen(7, 11).render(20).reshape(3, 32, 3, 32, 3).mean((1, 3, 4))         # means: roundings may differ
    known = [143.68, 132.44, 196.24, 87.49, 180.21, 179.54, 139.06, 112.04, 105.19]
    assert cells.ravel() == pytest.approx(known, abs=0.05)


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


@pytest.mark.parametrize("name", ["plain", "idle", "second"])
def test_memory_narrations_need_memory(name):
    """Checked from labels and texts alone: seen there, not since the previous segment began, never named."""
    delays = []
    for video in VIDEOS if name == "plain" else OTHERS[name]:
        labels, narrations, places = video.labels(), video.narrations, targets(video)
        for n, narration in enumerate(narrations):
            if not narration.memory_words:
                continue
            cell = labels[:narration.frame + 1, places[n]]
            shown = np.flatnonzero(cell[:, TYPE])
            last = cell[shown[-1]]
            assert narration.memory_words == (video.world.colours[last[COLOUR] - 1], world.TYPES[last[TYPE] - 1])
            assert shown[-1] <= narrations[n - 2].frame        # a whole other segment lies between
            delays.append(narration.frame - shown[-1])
            for m in range(1, n):                              # named before? then another thing has come since
                if places[m] == places[n] and " ".join(narration.memory_words) in narrations[m].text:
                    assert brought_since(video, places, m, n)
    assert 8 < np.median(delays) < 40


def brought_since(video: Kitchen, places: list[int], m: int, n: int) -> bool:
    """Whether the place of narration n got a new thing after narration m."""
    labels, narrations = video.labels(), video.narrations
    cell = labels[narrations[m].frame:narrations[n].frame + 1, places[n]]
    if cell[0, DOOR] == 0:                                     # an open place: seen empty, then with a thing
        return bool(((cell[1:, TYPE] > 0) & (cell[:-1, TYPE] == 0)).any())
    fill = video.world.sentence("fill", video.world.places[places[n]], None)
    filled = any(narrations[i].text == fill for i in range(m + 1, n))
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


# ------------------------------------------------------------------------------------------ other worlds

def stretches(video: Kitchen) -> list[np.ndarray]:
    """The frames of each stretch of idle time."""
    frames = np.flatnonzero(video.idle())
    return np.split(frames, np.flatnonzero(np.diff(frames) > 1) + 1) if len(frames) else []


def kind_of(video: Kitchen, frames: np.ndarray) -> str:
    """What kind of idle time these frames show, by the pictures and labels alone."""
    labels, pictures = video.labels()[frames], [video.render(int(frame)) for frame in frames[:3]]
    if (pictures[0] == pictures[1]).all() and (pictures[1] == pictures[2]).all():
        return "still"
    if labels[..., HAND].any():
        return "rest"
    if labels.any():
        return "away"
    return "dark" if pictures[0].mean() < 6 else "covered"


def test_in_idle_time_nothing_is_narrated():
    """Every target of an idle frame is [SKIP]: no segment ends there, and none where nothing is left to see."""
    lengths, kinds = [], collections.Counter()
    for video in OTHERS["idle"]:
        frames = [narration.frame for narration in video.narrations]
        assert not video.idle()[frames].any() and len(stretches(video)) == 1
        for stretch in stretches(video):
            lengths.append(len(stretch))
            assert stretch[0] > max(frame for frame in frames if frame < stretch[0])
            kind = kind_of(video, stretch)
            kinds[kind] += 1
            hands, before = video.labels()[stretch][..., HAND], video.labels()[stretch[0] - 1][..., HAND]
            if kind in ("rest", "still"):                      # as in the last frame of the segment before
                assert (hands == before).all() and set(before) <= {0, world.LIFT}
            if kind == "still":
                assert (video.render(int(stretch[0]) - 1) == video.render(int(stretch[-1]))).all()
            if kind in ("dark", "covered"):
                assert not video.labels()[stretch].any()
    assert set(kinds) == set(world.IDLE) and 10 <= min(lengths) < 20 and 60 < max(lengths) <= 240
    assert 0.8 < np.mean([length <= 60 for length in lengths]) < 1


def test_a_covered_camera_sees_nothing():
    covered = Kitchen(3, 8, world.WORLDS["idle"]._replace(kinds=("covered",)))
    picture = covered.render(int(stretches(covered)[0][0])).astype(float)
    assert np.abs(np.diff(picture.mean(1), axis=0)).max() < 5  # no edge of furniture; 5: the noise

    def edges(frame):
        return np.abs(np.diff(covered.render(frame).astype(float).mean(1), axis=0)).max()
    assert edges(0) > 10


def test_idle_time_is_put_into_the_same_video():
    """Without the other cook, what happens is what happens in the plain video, later."""
    for name in ("still", "night"):
        for plain, video in zip(VIDEOS, OTHERS[name]):
            assert [n.text for n in video.narrations] == [n.text for n in plain.narrations]
            stretch, = stretches(video)
            assert len(stretch) == 240 == len(video) - len(plain)
            assert kind_of(video, stretch) == ("still" if name == "still" else "dark")
            rest = np.delete(video.labels(), stretch, 0)       # your hand may come from elsewhere afterwards
            assert np.array_equal(rest[..., :HAND], plain.labels()[..., :HAND])


def test_the_other_cook_works_in_idle_time():
    moved = 0
    for video in OTHERS["idle"]:
        cooking = (video.labels()[..., OTHER] > 0).any(1) & video.idle()
        moved += cooking.any()
        hand = video.labels()[cooking][..., HAND] > 0
        assert not (hand & (video.labels()[cooking][..., OTHER] > 0)).any()
    assert 5 < moved < 40


def test_a_share_of_the_videos_has_idle_time():
    half = world.find_world("plain", 0.5)
    videos = [Kitchen(seed, 12, half) for seed in range(200)]
    assert 0.4 < np.mean([video.idle().any() for video in videos]) < 0.6
    for plain, video in zip(VIDEOS, videos):
        if not video.idle().any():                             # the very same
            assert video.narrations == plain.narrations and np.array_equal(video.labels(), plain.labels())
    assert sum(map(len, videos)) < 1.4 * sum(map(len, VIDEOS))                     # training does not get much slower
    assert world.find_world("hard") == world.WORLDS["hard"] and world.find_world("idle").idle == 1
    with pytest.raises(BadData, match="choose one of plain, idle"):
        world.find_world("kitchen")


def test_hard_ends_are_hard():
    """Annotations stray further than in the plain world, and more often something looks like an end but is none."""
    strays, false, true = collections.Counter(), 0, 0
    for video in OTHERS["hard"]:
        pose, frames = video.labels()[..., HAND].max(1), [n.frame for n in video.narrations]
        assert all(a < b for a, b in zip(frames, frames[1:]))
        ends = np.flatnonzero((pose[1:] == world.REACH) & (pose[:-1] == world.LIFT))
        strays.update(int(frame - end) for frame, end in zip(frames[1:], ends))
        lifts = np.flatnonzero((pose[1:] == world.LIFT) & (pose[:-1] == world.LIFT)) + 1
        false += len(set(lifts) - set(ends))
        true += len(ends)
    share = {stray: count / sum(strays.values()) for stray, count in strays.items()}
    assert share == pytest.approx(world.WORLDS["hard"].jitter, abs=0.05)
    assert false > 0.4 * true                                  # two raised hands in a row mean little


def test_the_second_kitchen():
    """Other colours and verbs, the same things and furniture elsewhere, longer segments; labels as in the first."""
    said, first = ({word for video in videos for n in video.narrations for word in re.findall(r"\w+", n.text)}
                   for videos in (OTHERS["second"], VIDEOS))
    assert said & first == {*world.TYPES, *PLACES, "You", "the"}
    assert said >= set(world.WORLDS["second"].colours)
    assert not set(world.WORLDS["second"].rgb) & set(world.RGB)
    mean = {name: np.mean([video.narrations[-1].frame for video in OTHERS[name]]) for name in ("plain", "second")}
    assert mean["second"] > 1.25 * mean["plain"]
    written = {word for text in itertools.islice(world.documents(0, world.WORLDS["second"]), 500)
               for word in re.findall(r"\w+", text)}
    assert said <= written and not written & set(world.COLOURS)
    for video in OTHERS["second"]:
        doors = [name in world.CONTAINERS for name in video.world.places]
        assert ((video.labels()[..., DOOR] > 0) == doors).all()
        for narration in video.narrations:
            words = narration.memory_words
            assert not words or (words[0] in video.world.colours and narration.text.endswith(" ".join(words) + "."))


def test_it_gets_dark():
    """Only the light differs from the plain video: in the dark the picture is black, in daylight it is the same."""
    lights = []
    for plain, video in zip(VIDEOS, OTHERS["dark"]):
        assert video.narrations == plain.narrations and np.array_equal(video.labels(), plain.labels())
        lights += [video.light(frame) for frame in range(len(video))]
        darkest = min(range(len(video)), key=video.light)
        assert video.render(darkest).mean() <= plain.render(darkest).mean() * (video.light(darkest) + 0.1) / 0.7
    assert min(lights) < 0.05 and max(lights) > 0.9 and 0.2 < np.mean(np.array(lights) < 0.2) < 0.6


def test_clutter_is_seen_but_never_used():
    for plain, video in zip(VIDEOS, OTHERS["clutter"][:10]):
        assert video.narrations == plain.narrations and np.array_equal(video.labels(), plain.labels())
        picture, clean = video.render(0).astype(int), plain.render(0).astype(int)
        for place, (name, thing) in enumerate(zip(PLACES, video.clutter)):
            x, y = world.anchor(place, (0, 0))
            changed = np.abs(picture - clean)[y + 3:y + 29, x + 3:x + 29].max()
            assert not (thing and name in world.CONTAINERS) and (changed > 20 if thing else changed == 0)
    assert 0.7 < np.mean([thing is not None for video in OTHERS["clutter"] for name, thing in
                          zip(PLACES, video.clutter) if name not in world.CONTAINERS]) < 0.9


@pytest.mark.parametrize("seed, idle", [(1000258, 0.5), (1000530, None), (1000613, 0.5)])
def test_narrations_stay_in_order(seed, idle):
    """Where annotations stray far and the last one is held back, no two are of one frame."""
    segments = int(np.random.default_rng((seed, 0)).integers(8, 13))                         # as world.kitchens has it
    kitchen = world.Kitchen(seed, segments, world.find_world("hard", idle))
    frames = [narration.frame for narration in kitchen.narrations]
    assert all(a < b for a, b in zip(frames, frames[1:])) and frames[-1] == len(kitchen) - 1
