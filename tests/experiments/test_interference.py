"""What a place has shown, one thing after another, and what a narrator writes of it."""
from collections import defaultdict

from experiments import interference
from experiments.interference import count_words, things_shown
from test_evaluate import command
from toy import world


def test_a_narration_names_the_last_thing_that_its_place_has_shown():
    several = 0
    for seed in range(6):
        kitchen = world.Kitchen(seed, 30)
        for narration in kitchen.narrations:
            if narration.memory_words:
                things = things_shown(kitchen, narration)
                assert kitchen.world.words(*things[-1]) == narration.memory_words
                assert len(set(things)) == len(things)
                several += len(things) > 1
    assert several > 10


def test_words_are_counted_by_what_the_place_has_shown():
    """Whoever writes the thing before is right only about a word that both things have."""
    kitchen = world.lasting(3, 120)
    texts = []
    for narration in kitchen.narrations:
        things = things_shown(kitchen, narration) if narration.memory_words else []
        words = kitchen.world.words(*things[-2]) if len(things) > 1 else narration.memory_words
        texts.append(f"You wipe the sink after the {' '.join(words)}.")
    counts = defaultdict(list)
    count_words(kitchen, texts, counts)
    assert all(counts["one, <= 60 s"]) and counts["one, <= 60 s"]
    assert all(counts["the one before"]) and counts["the one before"]
    several = counts["several, <= 60 s"] + counts["several, later"]
    assert several.count(False) == len(counts["the one before"])


def test_the_command(monkeypatch):
    """The bundled narrator remembers, also where a place has shown several things."""
    monkeypatch.setattr(interference, "VIDEOS", [5_100_000])
    monkeypatch.setattr(interference, "SECONDS", 90)
    found = command("--json", main=interference.main)
    assert found["one, <= 60 s"]["written"] > 0.8
    assert found["several, later"]["written"] > 0.6
    assert found["the one before"]["written"] < 0.3
