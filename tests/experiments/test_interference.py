"""What a place has shown, one thing after another, and what a narrator writes of it."""
from collections import defaultdict

import pytest

from experiments import interference
from experiments.interference import group_pairs, things_of_place
from support.files.narrations import Sentence
from test_evaluate import command
from toy import world
from toy.words import recall_of_words


def test_a_narration_names_the_last_thing_that_its_place_has_shown():
    several = 0
    for seed in range(6):
        kitchen = world.Kitchen(seed, 30)
        for narration in kitchen.narrations:
            if narration.memory_words:
                *before, thing = things_of_place(kitchen, narration)
                assert kitchen.world.words(*thing) == narration.memory_words
                several += bool(before)
    assert several > 10


def test_words_are_counted_by_what_the_place_has_shown():
    """Whoever writes the thing before is right only about a word that both things have."""
    kitchen = world.lasting(3, 120)
    pairs = []
    for narration in kitchen.narrations:
        words = narration.memory_words
        if words:
            *before, _ = things_of_place(kitchen, narration)
            if before:
                words = kitchen.world.words(*before[-1])
        sentence = Sentence(narration.frame / world.FPS, narration.text, narration.memory_words)
        pairs.append((sentence, f"You wipe the sink after the {' '.join(words)}."))
    groups = defaultdict(list)
    group_pairs(kitchen, pairs, groups)
    assert recall_of_words(groups["one, <= 60 s"])["memory_words"] == 1
    assert recall_of_words(groups["the one before"])["memory_words"] == 1
    several = groups["several, <= 60 s"] + groups["several, later"]
    asked = sum(len(sentence.memory_words) for sentence, _ in several)
    wrong = sum(len(sentence.memory_words) for sentence, _ in groups["the one before"])
    assert recall_of_words(several)["memory_words"] == pytest.approx(1 - wrong / asked)
    for number in ("one", "several"):
        by_time = groups[f"{number}, <= 60 s"] + groups[f"{number}, later"]
        by_sight = groups[f"{number}, seen <= 2 s"] + groups[f"{number}, seen longer"]
        assert by_time and sorted(by_time, key=str) == sorted(by_sight, key=str)


def test_the_command(monkeypatch):
    """The bundled narrator remembers, also where a place has shown several things."""
    monkeypatch.setattr(interference, "VIDEOS", [5_100_000])
    monkeypatch.setattr(interference, "SECONDS", 90)
    written = command("--json", main=interference.main)["written"]
    assert written["one, <= 60 s"] > 0.8
    assert written["several, later"] > 0.6
    assert written["the one before"] < 0.3
