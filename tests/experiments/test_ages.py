"""Memory words by the time since their thing was seen."""
from itertools import pairwise

import torch

from experiments import ages
from experiments.ages import Word
from helpers import TOY
from test_evaluate import command
from toy import world


def test_groups_of_ages():
    words = [Word(2, 0, True), Word(5, 0, False), Word(5.5, 0, True), Word(300, 20, False),
             Word(301, 20.5, True), Word(9999, 9000, True)]
    assert ages.by_age(words) == {
        "<= 5 s": {"right": 0.5, "words": 2, "read_soon": 2},
        "<= 10 s": {"right": 1.0, "words": 1, "read_soon": 1},
        "<= 320 s": {"right": 0.5, "words": 2, "read_soon": 1},
    }
    assert ages.share_right([]) == {"right": None, "words": 0, "read_soon": 0}


def test_only_memory_words_are_written(monkeypatch):
    """All other sentences are given; of those the narrator writes, each word has the time since its
    thing was seen, and the time from then to the beginning of the segment."""
    kitchen = next(video for _, video in world.kitchens("test", 20)
                   if any(narration.memory_words for narration in video.narrations))
    asked = [narration for narration in kitchen.narrations if narration.memory_words]

    class Step:
        def __init__(self, frame, text):
            self.frame = frame
            self.narration = type("Narration", (), {"text": text})

    def narrate(narrator, x, forced, context):
        assert forced.keys() == {narration.frame for narration in kitchen.narrations}
        assert [t for t, ids in forced.items() if ids is None] == [n.frame for n in asked]
        for narration in kitchen.narrations:
            right = narration is asked[0]
            yield Step(narration.frame, narration.text if right else "You wait.")

    class Layouts:
        class layout:
            encode = len

    monkeypatch.setattr(ages.stream, "narrate", narrate)
    monkeypatch.setattr(ages, "open_stream", lambda narrator: None)
    found = ages.narrated_words(Layouts, torch.zeros(0), kitchen)
    expected = []
    for before, narration in pairwise(kitchen.narrations):
        for _ in narration.memory_words:
            age = (narration.frame - narration.seen) / 2
            held = (before.frame - narration.seen) / 2
            expected.append(Word(age, held, narration is asked[0]))
    assert found == expected


def test_the_command(monkeypatch):
    """The bundled narrator knows what it saw some seconds ago."""
    monkeypatch.setattr(ages, "SEEDS", range(6_400_000, 6_400_003))
    monkeypatch.setattr(ages, "WORLD", world.World())
    found = command("--model", TOY, "--json", main=ages.main)
    assert found["by_age"].keys() <= {"<= 5 s", "<= 10 s", "<= 20 s", "<= 40 s"}
    assert found["all"]["right"] > 0.8
    assert found["soon"]["words"] + found["late"]["words"] == found["all"]["words"]
    assert found["kept"]["words"] <= found["soon"]["words"]
