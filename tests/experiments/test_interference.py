"""What a place has shown, one thing after another, and what a narrator writes of it."""
from collections import defaultdict

from experiments import interference
from experiments.interference import count_words, sightings
from test_evaluate import command
from toy import world


def test_a_narration_names_the_last_thing_that_its_place_has_shown():
    several = 0
    for seed in range(6):
        kitchen = world.Kitchen(seed, 30)
        for narration in kitchen.narrations:
            if narration.memory_words:
                *before, thing = sightings(kitchen, narration)
                assert kitchen.world.words(*thing) == narration.memory_words
                several += bool(before)
    assert several > 10


def test_words_are_counted_by_what_the_place_has_shown():
    """Whoever writes the thing before is right only about a word that both things have."""
    kitchen = world.lasting(3, 120)
    texts = []
    for narration in kitchen.narrations:
        words = narration.memory_words
        if words:
            things = list(sightings(kitchen, narration))
            words = kitchen.world.words(*things[-2:][0])       # of the thing before, or of the only one
        texts.append(f"You wipe the sink after the {' '.join(words)}.")
    counts = defaultdict(list)
    count_words(kitchen, texts, counts)
    assert all(counts["one, <= 60 s"]) and counts["one, <= 60 s"]
    assert all(counts["the one before"]) and counts["the one before"]
    several = counts["several, <= 60 s"] + counts["several, later"]
    assert several.count(False) == len(counts["the one before"])
    for number in ("one", "several"):
        by_time = counts[f"{number}, <= 60 s"] + counts[f"{number}, later"]
        by_sight = counts[f"{number}, seen <= 2 s"] + counts[f"{number}, seen longer"]
        assert sorted(by_time) == sorted(by_sight)


def test_the_command(monkeypatch):
    """The bundled narrator remembers, also where a place has shown several things."""
    monkeypatch.setattr(interference, "VIDEOS", [5_100_000])
    monkeypatch.setattr(interference, "SECONDS", 90)
    written = command("--json", main=interference.main)["written"]
    assert written["one, <= 60 s"] > 0.8
    assert written["several, later"] > 0.6
    assert written["the one before"] < 0.3
