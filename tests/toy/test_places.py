"""What the page has to know of a kitchen."""
import json

import pytest

from beyond.commands.data_command import write_toy
from helpers import ROOT
from toy.places import changes, kitchen_of, true_kitchen, words_of_memory
from toy.world import PLACES

KITCHEN = ROOT / "toy" / "kitchen.mp4"


def test_the_truth_of_the_bundled_kitchen():
    """Its .json says the seed; its sentences name what the places showed."""
    kitchen = true_kitchen(KITCHEN)
    truth = json.loads(KITCHEN.with_suffix(".json").read_text())
    assert len(kitchen) / 2 == truth["duration"]
    shown = {}
    for frame, place, thing in changes(kitchen):
        shown.setdefault(place, []).append((frame, thing))
    hidden = 0
    for narration in kitchen.narrations:
        thing = " ".join(narration.memory_words)
        assert words_of_memory(narration.text) == thing
        if thing:
            place = PLACES.index(narration.text.split()[3])
            last = [name for frame, name in shown[place] if frame <= narration.frame and name][-1]
            assert last == thing
            hidden += 1
    assert hidden > 10


@pytest.mark.parametrize("change", ["other seed", "no seed", "a list", "missing", "other world"])
def test_no_truth_where_the_kitchen_is_not_known(change, tmp_path):
    """Then the page shows what the memory says, and compares it with nothing."""
    video = tmp_path / "a.mp4"
    write_toy(1, 0.2, video, "idle" if change == "other world" else "plain")
    truth = video.with_suffix(".json")
    content = json.loads(truth.read_text())
    if change == "other seed":
        truth.write_text(json.dumps(content | {"seed": 2}))
    if change == "no seed":
        del content["seed"]
        truth.write_text(json.dumps(content))
    if change == "a list":
        truth.write_text("[]")
    if change == "missing":
        truth.unlink()
    about = kitchen_of(video)
    assert about["places"] == PLACES and "shown" not in about
    assert kitchen_of(None) == about
    assert len(about["pictures"]) == 36 and "red cup" in about["pictures"]
