"""What memories know, by a linear probe."""
from dataclasses import replace

import torch

from narrator import load
from experiments import knowledge
from experiments.knowledge import Moments, in_a_row, moments_of, score, train_probe
from helpers import TOY, tiny
from test_evaluate import command
from toy import world
from toy.stages import Scene, last_sight


def test_the_last_frame_that_showed_a_thing():
    labels = torch.zeros(6, 9, 2, dtype=torch.long)
    labels[1, 0] = 3                           # place 0 shows a thing at frame 1 alone
    labels[2:4, 1] = 5                         # place 1 at frames 2 and 3
    frames = last_sight(labels)
    assert frames[:, 0].tolist() == [-1, 1, 1, 1, 1, 1]
    assert frames[:, 1].tolist() == [-1, -1, 2, 3, 3, 3]
    assert (frames[:, 2:] == -1).all()


def test_videos_in_a_row(monkeypatch):
    monkeypatch.setattr(knowledge, "IN_A_ROW", 2)
    videos = [Scene(torch.full((n, 10, 4), float(n)), [], torch.full((n, 9, 2), n))
              for n in (2, 3, 4)]
    first, second = in_a_row(videos)
    assert first.x[:, 0, 0].tolist() == [2, 2, 3, 3, 3]
    assert first.labels[:, 0, 0].tolist() == [2, 2, 3, 3, 3]
    assert second.x[:, 0, 0].tolist() == [4] * 4


def moments(seed: int, count: int = 400) -> Moments:
    """Tokens that code the thing at place 0 and its age linearly, and nothing of place 1."""
    torch.manual_seed(seed)
    things = torch.randint(1, 7, (count, 9, 2))
    ages = 2 ** torch.randint(0, 6, (count, 9)).float()
    kinds = torch.eye(7)[things[:, 0, 0]]
    colours = torch.eye(7)[things[:, 0, 1]]
    tokens = torch.cat([kinds, colours, ages[:, :1].log2()], 1)
    hidden = torch.zeros(count, 9, dtype=torch.bool)
    hidden[:, :2] = True
    sightings = torch.arange(count * 9).view(count, 9)
    return Moments(tokens, things, ages, hidden, sightings)


def test_a_probe_finds_what_is_there():
    probe = train_probe(moments(0))
    test = moments(1)
    one_place = test.hidden.clone()
    one_place[:, 1] = False
    found = score(probe, replace(test, hidden=one_place))
    assert min(group["right_once"] for group in found.values()) > 0.95
    assert found["<= 5 s"]["sightings"] == int((test.ages[:, 0] <= 5).sum())
    assert found.keys() == {"<= 5 s", "<= 10 s", "<= 20 s", "<= 40 s"}
    other_place = ~one_place & test.hidden
    found = score(probe, replace(test, hidden=other_place))
    assert max(group["right_once"] for group in found.values()) < 0.2          # as by chance


def test_moments_tell_of_sightings():
    """A place is seen at frame 0, another one until frame 19; then all is dark until the end."""
    narrator = load(TOY)
    labels = torch.zeros(40, 9, 2, dtype=torch.long)
    labels[0, 3] = 2
    labels[:20, 4] = 1
    video = Scene(torch.randn(40, 10, narrator.config.width), [], labels)
    moments = moments_of(narrator.memory, [video, video])
    frames = torch.arange(3, 40, 4)            # 3, 7 .. 39
    assert moments.hidden[:, 3].all()
    assert torch.equal(moments.hidden[:, 4], (frames > 19).repeat(2))
    assert not moments.hidden[:, 5].any()      # never seen
    assert moments.ages[:10, 3].tolist() == (frames / 2).tolist()
    assert moments.ages[5:10, 4].tolist() == ((frames[5:] - 19) / 2).tolist()
    # One sighting of each place in each video, and no two have the same number.
    seen = moments.sightings[moments.hidden]
    assert len(seen) == 2 * (10 + 5)
    assert len(seen.unique()) == 4
    assert moments.sightings[0, 3] == moments.sightings[9, 3] != moments.sightings[10, 3]


def test_each_sighting_has_the_same_weight():
    """One sighting that is asked for nine times and always named, one asked for once and not."""
    probe = train_probe(moments(0))
    test = moments(1, 10)
    test.ages.fill_(4.0)
    test.hidden[:, 1] = False
    test.sightings[:, 0] = torch.tensor([7] * 9 + [2])
    test.things[9, 0] = test.things[9, 0] % 6 + 1          # another type, another colour
    assert score(probe, test)["<= 5 s"] == {"right_once": 0.5, "sightings": 2}


def test_the_command(monkeypatch):
    """Even a probe of few videos finds something in the bundled narrator's memory."""
    monkeypatch.setattr(knowledge, "LONG_IDLE", knowledge.world.World())
    monkeypatch.setattr(knowledge, "TEST_SEEDS", [1, 3])
    monkeypatch.setitem(world.VIDEOS, "train", 8)
    found = command("--model", TOY, "--json", main=knowledge.main)
    assert found["by_age"]["<= 5 s"]["right_once"] > 0.08       # 0.03 by chance


def test_a_narrator_without_memory_is_refused(tmp_path):
    tiny(memory="none").save(tmp_path)
    error = command("--model", tmp_path, main=knowledge.main, ok=False)
    assert error.endswith("has no memory that could be read out")
