"""support/files/rewrite.py: raw annotations into the published layout, by a language model; interrupted and resumed."""
import json

import pytest

from commands import data as data_command
from helpers import TOY
from support.common.errors import BadData
from support.files import rewrite


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


@pytest.fixture
def root(tmp_path):
    write(tmp_path / "EPIC_100_validation.csv", "video_id,narration_timestamp,start_timestamp,narration,verb\n"
          "P01,00:00:01.0,00:00:01,open door,open\nP01,00:00:03.0,00:00:01,take cup,take\n")
    return tmp_path


LLM = str(TOY / "llm")


def run(root, name="ek100", llm=LLM):
    data_command.run(["rewrite", "--data", name, "--root", str(root), "--llm", llm, "--device", "cpu"])


@pytest.mark.parametrize("torn", ["", '["You take the cup.", "You ta', "[", "\xff"])
def test_rewrite_resumes(root, torn):
    """Sentences of an earlier run are kept; half a line at the end, left by a kill, is written anew."""
    kept = root / "annotations" / "refined_val_narrations.jsonl"
    first = json.dumps([f"{LLM}: You open the door.", "You pull the door open."]) + "\n"
    write(kept, "").write_bytes(first.encode() + torn.encode("latin-1"))
    run(root)
    rows = json.loads((root / "annotations" / "refined_val_narrations.json").read_text())["P01"]
    assert rows[0] == {"time": 1.0, "text": "You pull the door open."} and rows[1]["text"].strip()
    lines = kept.read_text().splitlines()
    assert len(lines) == 2 and lines[0] + "\n" == first
    assert json.loads(lines[1]) == [f"{LLM}: You take the cup.", rows[1]["text"]]
    with pytest.raises(BadData, match="exists"):
        run(root)


@pytest.mark.parametrize("before", ["", "another/model: "])
def test_sentences_of_another_model_are_not_used(root, before, capsys):
    """Nor those of a file that does not name one, as they once were; one line says so, and they stay in the file."""
    kept = root / "annotations" / "refined_val_narrations.jsonl"
    first = json.dumps([f"{before}You open the door.", "Not this one."]) + "\n"
    write(kept, first)
    run(root)
    rows = json.loads((root / "annotations" / "refined_val_narrations.json").read_text())["P01"]
    assert "Not this one." not in [row["text"] for row in rows] and kept.read_text().startswith(first)
    assert len(kept.read_text().splitlines()) == 3
    assert f"{kept}: 1 sentences are of another model than {LLM}, or of none that is named" in capsys.readouterr().err


def test_unseen_descriptions_stay_unseen(tmp_path, monkeypatch):
    """What is rewritten can be trained on and streamed as the raw annotations."""
    described = [{"timestamp": 1.0, "text": "C sits.", "ego_visible": False},
                 {"timestamp": 2.0, "text": "C cuts.", "ego_visible": True}]
    write(tmp_path / "atomic_descriptions_val.json", json.dumps({"annotations": {"t": [{"descriptions": described}]}}))
    kept = tmp_path / "annotations" / "refined_egocentric_atomic_descriptions_gpt_val.jsonl"
    pairs = ("C sits.", "You sit."), ("C cuts.", "You cut.")
    write(kept, "".join(json.dumps([f"{LLM}: {text}", sentence]) + "\n" for text, sentence in pairs))
    run(tmp_path, "egoexo4d")
    notes = rewrite.Notes()
    track, = rewrite.every_track("egoexo4d", tmp_path, "val", notes)
    assert (track.narrations, track.unseen) == ([(2.0, "You cut.")], [(1.0, "You sit.")])
