"""What memories know, by a linear read-out."""
import torch

from experiments import knowledge
from experiments.knowledge import (
    Moments, in_a_row, score, seconds_since, sightings_by_age, train_read_out,
)
from helpers import TOY
from test_evaluate import command
from toy.stages import Scene


def test_time_since_a_place_showed_a_thing():
    labels = torch.zeros(6, 9, 2, dtype=torch.long)
    labels[1, 0] = 3                           # place 0 shows a thing at frame 1 alone
    labels[2:4, 1] = 5                         # place 1 at frames 2 and 3
    inf = torch.inf
    times = seconds_since(labels)
    assert times[:, 0].tolist() == [inf, 0, 0.5, 1, 1.5, 2]
    assert times[:, 1].tolist() == [inf, inf, 0, 0, 0.5, 1]
    assert (times[:, 2:] == inf).all()


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
    return Moments(tokens, things, ages, hidden)


def test_a_read_out_finds_what_is_there():
    read_out = train_read_out(moments(0))
    test = moments(1)
    one_place = test.hidden.clone()
    one_place[:, 1] = False
    found = score(read_out, Moments(test.tokens, test.things, test.ages, one_place))
    assert found["right"] > 0.99 and found["sure"] > 0.8 and found["factor"] < 1.5
    assert found["by_age"]["<= 5 s"]["places"] == int((test.ages[:, 0] <= 5).sum())
    assert found["by_age"].keys() == {"<= 5 s", "<= 10 s", "<= 20 s", "<= 40 s"}
    other_place = ~one_place & test.hidden
    found = score(read_out, Moments(test.tokens, test.things, test.ages, other_place))
    assert found["right"] < 0.15               # as by chance


def test_a_sighting_counts_once():
    """A place that is seen at frame 0, and hidden until the end; all is dark in the second half."""
    labels = torch.zeros(40, 9, 2, dtype=torch.long)
    labels[0, 3] = 2
    labels[:20, 4] = 1
    counts = sightings_by_age([Scene(torch.zeros(40, 10, 4), [], labels)])
    assert counts["<= 5 s"] == {"sightings": 2, "dark": 2 / 4}         # frames 3 and 7; 23 and 27
    assert counts["<= 10 s"] == {"sightings": 2, "dark": 3 / 6}        # 11, 15, 19; 31, 35, 39
    assert counts["<= 20 s"] == {"sightings": 1, "dark": 1.0}          # 23 to 39


def test_the_command(monkeypatch, tmp_path):
    """Even a read-out of few videos finds something in the bundled narrator's memory."""
    monkeypatch.setattr(knowledge, "MINUTES", 0.5)
    monkeypatch.setattr(knowledge, "LONG_IDLE", knowledge.world.World())
    monkeypatch.setattr(knowledge, "TEST_SEEDS", {"work": [1], "idle": [3]})
    png = tmp_path / "map.png"
    found = command("--model", TOY, "--videos", 8, "--png", png, "--json",
                    main=knowledge.main)
    assert found.keys() == {"work", "idle"}
    assert found["work"]["right"] > 0.15      # 0.03 by chance
    assert png.stat().st_size > 10_000


def test_a_narrator_without_memory_is_refused(tmp_path, monkeypatch):
    class NoMemory:
        class layout:
            M = 0

    monkeypatch.setattr(knowledge, "load_narrator", lambda *_, **__: NoMemory)
    error = command("--model", tmp_path, main=knowledge.main, ok=False)
    assert error.endswith("has no memory that could be read out")
