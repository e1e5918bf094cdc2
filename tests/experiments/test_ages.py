"""Memory words by the time since their thing was seen."""
import torch

from experiments import ages
from helpers import TOY
from test_evaluate import command
from toy import world


def test_groups_of_ages():
    words = [(2, True), (5, False), (5.5, True), (300, False), (9999, True)]
    assert ages.by_age(words) == {
        "<= 5 s": {"right": 0.5, "words": 2},
        "<= 10 s": {"right": 1.0, "words": 1},
        "<= 320 s": {"right": 0.0, "words": 1},
    }


def test_only_memory_words_are_written(monkeypatch):
    """All other sentences are given; of those the narrator writes, each word has the time since its
    thing was seen."""
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
    found = ages.written_words(Layouts, torch.zeros(0), kitchen)
    expected = []
    for narration in asked:
        seconds = (narration.frame - narration.seen) / 2
        expected += [(seconds, narration is asked[0])] * len(narration.memory_words)
    assert found == expected


def test_the_command(monkeypatch):
    """The bundled narrator knows what it saw some seconds ago."""
    monkeypatch.setattr(ages, "SEEDS", range(6_400_000, 6_400_003))
    monkeypatch.setattr(ages, "WORLD", world.World())
    found = command("--model", TOY, "--json", main=ages.main)
    assert found["by_age"].keys() <= {"<= 5 s", "<= 10 s", "<= 20 s", "<= 40 s"}
    assert found["right"] > 0.8
