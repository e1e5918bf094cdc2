"""support/files/rewrite.py: raw annotations into the published layout, by a language model;
interrupted and resumed.
"""
import json

import pytest

from commands import data as data_command
from helpers import TOY
from support.common.errors import BadData
from support.files.annotations import every_track
from support.files.rewrite import TEMPLATE
from support.files.tracks import Notes

LLM = str(TOY / "llm")


@pytest.fixture
def root(tmp_path):
    """EPIC's annotations of one video: "You open the door.", "You take the cup."."""
    (tmp_path / "annotations").mkdir()
    (tmp_path / "EPIC_100_validation.csv").write_text(
        "video_id,narration_timestamp,start_timestamp,narration,verb\n"
        "P01,00:00:01.0,00:00:01,open door,open\n"
        "P01,00:00:03.0,00:00:01,take cup,take\n")
    return tmp_path


def run(root, name="ek100"):
    data_command.run(["rewrite", "--data", name, "--root", str(root), "--llm", LLM,
                      "--device", "cpu"])


def answered(note, sentence, llm=LLM):
    """A line of kept answers."""
    return json.dumps([f"{llm}: {TEMPLATE.format(note=note.strip('.'))}", sentence])


def rewritten(root):
    """The written annotations of the video, and the lines of the file of kept sentences."""
    path = root / "annotations" / "refined_val_narrations.json"
    rows = json.loads(path.read_text())["P01"]
    return rows, path.with_suffix(".jsonl").read_text().splitlines()


def test_rewrite_resumes(root):
    """Sentences of an earlier run are kept."""
    kept = root / "annotations" / "refined_val_narrations.jsonl"
    first_line = answered("You open the door.", "You pull the door open.\nNote: more")
    kept.write_text(first_line + "\n")
    run(root)
    rows, lines = rewritten(root)
    assert rows[0] == {"time": 1.0, "text": "You pull the door open."}
    assert rows[1]["text"].strip()
    assert len(lines) == 2 and lines[0] == first_line
    with pytest.raises(BadData, match="exists"):
        run(root)


def test_sentences_of_another_model_are_not_used(root):
    kept = root / "annotations" / "refined_val_narrations.jsonl"
    kept.write_text(answered("You open the door.", "Not this one.", "another/model") + "\n")
    run(root)
    rows, lines = rewritten(root)
    assert "Not this one." not in [row["text"] for row in rows]
    assert len(lines) == 3


def test_unseen_descriptions_stay_unseen(tmp_path):
    """The rewritten annotations are read like the raw ones."""
    descriptions = [{"timestamp": 1.0, "text": "C sits.", "ego_visible": False},
                    {"timestamp": 2.0, "text": "C cuts.", "ego_visible": True}]
    content = {"annotations": {"take": [{"descriptions": descriptions}]}}
    (tmp_path / "atomic_descriptions_val.json").write_text(json.dumps(content))
    folder = tmp_path / "annotations"
    folder.mkdir()
    lines = [answered("C sits.", "You sit."), answered("C cuts.", "You cut.")]
    name = "refined_egocentric_atomic_descriptions_gpt_val"
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    run(tmp_path, "egoexo4d")
    assert (folder / f"{name}.json").exists()
    track, = every_track("egoexo4d", tmp_path, "val", Notes())
    assert track.narrations == [(2.0, "You cut.")]
    assert track.unseen == [(1.0, "You sit.")]
