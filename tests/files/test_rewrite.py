"""support/files/rewrite.py: raw annotations into the published layout, by a language model;
interrupted and resumed.
"""
import json

import pytest

from commands import data as data_command
from helpers import TOY
from support.common.errors import BadData
from support.files.annotations import every_track
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


def rewritten(root):
    """The written annotations of the video, and the lines of the file of kept sentences."""
    path = root / "annotations" / "refined_val_narrations.json"
    rows = json.loads(path.read_text())["P01"]
    return rows, path.with_suffix(".jsonl").read_text().splitlines()


@pytest.mark.parametrize("torn", ["", '["You take the cup.", "You ta', "[", "\xff"])
def test_rewrite_resumes(root, torn):
    """Sentences of an earlier run are kept. An incomplete last line, left by a kill, is written
    anew.
    """
    kept = root / "annotations" / "refined_val_narrations.jsonl"
    first_line = json.dumps([f"{LLM}: You open the door.", "You pull the door open."])
    kept.write_bytes(first_line.encode() + b"\n" + torn.encode("latin-1"))
    run(root)
    rows, lines = rewritten(root)
    assert rows[0] == {"time": 1.0, "text": "You pull the door open."}
    assert rows[1]["text"].strip()
    assert len(lines) == 2 and lines[0] == first_line
    assert json.loads(lines[1]) == [f"{LLM}: You take the cup.", rows[1]["text"]]
    with pytest.raises(BadData, match="exists"):
        run(root)


@pytest.mark.parametrize("model", ["", "another/model: "])
def test_sentences_of_another_model_are_not_used(root, model, capsys):
    """Nor those without the name of a model. One line says so, and they stay in the file."""
    kept = root / "annotations" / "refined_val_narrations.jsonl"
    first_line = json.dumps([f"{model}You open the door.", "Not this one."])
    kept.write_text(first_line + "\n")
    run(root)
    rows, lines = rewritten(root)
    assert "Not this one." not in [row["text"] for row in rows]
    assert len(lines) == 3 and lines[0] == first_line
    warning = (f"{kept}: 1 sentences are of another model than {LLM}, "
               f"or of none that is named")
    assert warning in capsys.readouterr().err


def test_unseen_descriptions_stay_unseen(tmp_path):
    """The rewritten annotations are read like the raw ones."""
    descriptions = [{"timestamp": 1.0, "text": "C sits.", "ego_visible": False},
                    {"timestamp": 2.0, "text": "C cuts.", "ego_visible": True}]
    content = {"annotations": {"take": [{"descriptions": descriptions}]}}
    (tmp_path / "atomic_descriptions_val.json").write_text(json.dumps(content))
    folder = tmp_path / "annotations"
    folder.mkdir()
    lines = [json.dumps([f"{LLM}: C sits.", "You sit."]),
             json.dumps([f"{LLM}: C cuts.", "You cut."])]
    name = "refined_egocentric_atomic_descriptions_gpt_val"
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    run(tmp_path, "egoexo4d")
    assert (folder / f"{name}.json").exists()
    track, = every_track("egoexo4d", tmp_path, "val", Notes())
    assert track.narrations == [(2.0, "You cut.")]
    assert track.unseen == [(1.0, "You sit.")]
