"""Ego4D, EgoExo4D, EPIC-Kitchens (§4.1): published and raw files give the expected samples; every defect is one line."""
import csv
import json

import pytest
import torch
from safetensors.torch import save_file

from support import annotations
import data
from support.annotations import Notes
from support.common import BadData, NotDownloaded
from helpers import GOLDEN

golden = pytest.mark.skipif(not GOLDEN.exists(), reason="../shared/golden is not there")
LAYOUT = GOLDEN / "data_layout"


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def features(root, frames, width=4):
    """Features that say which frame of which video they are."""
    write(root / "features_metadata.json", {name: {"duration": n / 2, "path": f"{name}.pt"} for name, n in frames.items()})
    save_file({name: torch.arange(n + 1.0)[:, None, None].expand(n + 1, 10, width).contiguous() for name, n in frames.items()},
              root / "features.safetensors")


def samples(name, root, split="train", **more):
    return list(data.load_dataset(name, root, split, **more))


# ---------------------------------------------------------------------- sentences and times

@golden
def test_tags_and_times_are_the_published():
    expected = json.loads((LAYOUT / "expected.json").read_text())
    for text, cleaned in expected["ego4d_clean_text"]:
        assert annotations.clean(text) == cleaned, text
    for time, fps, low, high, published in expected["ceil_time_by_fps"]:
        assert low == 0
        (frame, _), = annotations.place([(time, "x")], high, fps, Notes())
        assert frame == int(published * fps), time


@pytest.mark.parametrize("narration, verb, told", [
    ("open fridge", "open", "You open the fridge."), ("put down knife", "put-down", "You put down the knife."),
    ("turn on tap", "", "You turn on the tap."), ("take plate from cupboard", "take", "You take the plate from the cupboard."),
    ("pour water into the pan", "pour", "You pour the water into the pan."), ("wash hands", "wash", "You wash the hands."),
    ("stir", "stir", "You stir."), ("take two plates", "take", "You take two plates."), ("still stirring", "", "You still the stirring."),
    ("pick up", "pick-up", "You pick up."), ("cut onion and carrot", "cut", "You cut the onion and the carrot."), ("", "", "")])
def test_epic_sentences(narration, verb, told):
    assert annotations.sentence(narration, verb) == told


def test_clean_leaves_nothing_of_nothing():
    assert [annotations.clean(text) for text in ("#C", "", " #unsure . ", "#")] == [""] * 4


def test_place():
    """Nothing is lost within half a second; repeats and what lies beyond the end are counted."""
    notes = Notes()
    told = [(0.2, "a"), (3.01, "b"), (3.4, "c"), (3.45, "d"), (6.0, "d"), (30, "e"), (31, "f")]
    assert annotations.place(told, 12.3, 2.0, notes) == [(1, "a"), (7, "b"), (8, "c"), (9, "d"), (24, "e")]
    assert notes.counts["repeated sentences left out"] == 1
    assert sum(n for what, n in notes.counts.items() if "beyond the end" in what) == 2
    assert notes.counts["narrations told a frame later or earlier, because another is told at theirs"] == 2
    assert annotations.place([(5, "a"), (5, "b"), (9, "c")], 5.0, 2.0, Notes()) == [(8, "a"), (9, "b"), (10, "c")]
    assert [f for f, _ in annotations.place([(0, str(i)) for i in range(9)], 2.0, 2.0, Notes())] == [0, 1, 2, 3, 4]
    assert annotations.place([(-1.0, "a")], 5, 2, Notes()) == [(0, "a")]


# ---------------------------------------------------------------------- the published layout

@golden
@pytest.mark.parametrize("name", ["ek100", "ego4d"])
@pytest.mark.parametrize("most", [None, 14])
def test_published_training_samples(name, most):
    """Frames, sentences and features of the published loader, but for what it loses.

    It drops "You take two carrots." (told within half a second of another sentence); here it is told one frame later,
    and its repetition at 6.0 s is left out, as there.
    """
    expected = json.loads((LAYOUT / "expected.json").read_text())["flownar"][f"{name}_narration" + (f"_max_num_frames_{most}" if most else "")]
    found = samples(name, LAYOUT / name, "val", max_frames=most)
    assert len(found) == len(expected)
    for sample, case in zip(found, expected):
        frame, told = -1, []
        for message in case["conversation"]:
            if message["role"] == "stream":
                frame += message["num_frames"]
            if message["role"] == "assistant":
                told.append((frame, message["content"]))
        told = [pair for pair in told if pair[0] < case["frames_shape"][0]]
        lost = [(5, "You take two carrots.")] if (4, "You take a carrot.") in told else []
        assert sample.narrations == sorted(told + lost)
        x = sample.read(0, sample.num_frames)
        assert list(x.shape) == case["frames_shape"] and x.sum().item() == pytest.approx(case["frames_sum"], abs=1e-3)


@golden
@pytest.mark.parametrize("name", ["ek100", "ego4d"])
def test_published_streaming_samples(name):
    expected = json.loads((LAYOUT / "expected.json").read_text())["flownar"][f"{name}_segment_summary"]
    found = samples(name, LAYOUT / name, "val", streaming=True)
    assert [sample.name for sample in found] == [case["sample_name"] for case in expected]
    for sample, case in zip(found, expected):
        x = torch.stack(list(sample.tokens()))
        assert list(x.shape) == case["frames_shape"] and x.sum().item() == pytest.approx(case["frames_sum"], abs=1e-3)
        assert sample.offset == pytest.approx(sample.tracks[0][0][0] if name == "ek100" else float(sample.name.split("_")[1]) / 2, abs=0.5)
        assert sample.origin == (0.0 if name == "ek100" else sample.offset)


def test_egoexo4d(tmp_path):
    """What the wearer cannot see is left out everywhere, the first description too; two annotators are two samples."""
    rows = lambda *told: {"descriptions": [{"timestamp": t, "text": text, "ego_visible": seen} for t, text, seen in told]}
    write(tmp_path / "annotations" / "refined_egocentric_atomic_descriptions_gpt_val.json",
          {"take-1": [rows((0.3, "You kneel.", False), (4.2, "You cut.", True), (2.0, "You look.", True)), rows((1.0, "You stand.", True))],
           "take-2": [rows((1.0, "Hidden.", False))]})
    features(tmp_path, {"take-1": 20, "take-2": 20})
    first, second = samples("egoexo4d", tmp_path, "val")
    assert first.narrations == [(0, "You look."), (5, "You cut.")] and second.narrations == [(0, "You stand.")]
    assert first.read(0, 2)[:, 0, 0].tolist() == [4, 5]
    stream, = samples("egoexo4d", tmp_path, "val", streaming=True)
    assert (stream.offset, stream.origin, len(stream.tracks)) == (1.0, 0.0, 2) and stream.num_frames == 9 - 2


# ---------------------------------------------------------------------- the owners' files

def benchmarks(root, val=(), test=()):
    for benchmark, key in annotations.BENCHMARKS.items():
        write(root / "annotations" / f"{benchmark}_val.json", {key: [{"video_uid": uid} for uid in val]})
        write(root / "annotations" / f"{benchmark}_test_unannotated.json", {key: [{"video_uid": uid} for uid in test]})


def test_ego4d_redacted(tmp_path):
    """Tags cleaned, annotators kept apart, times sorted, one-word narrations dropped, the split from the benchmarks."""
    said = lambda t, text, who: {"time": t, "text": text, "_annotation_uid": who}
    write(tmp_path / "annotations" / "all_narrations_redacted.json", {"videos": {
        "v1": {"narrations": [said(5.0, "#C C opens the #unsure fridge", "a"), said(1.1, "#C C looks around.", "a"),
                              said(2.0, "#c stirs", "b"), said(3.0, "#O A man X walks", "b"), said(4.0, "#C ", "b")]},
        "v2": {"narrations": [said(1.0, "#C C sits down", "a")]}, "v3": {"narrations": [said(1.0, "#C C gets up", "a")]}}})
    benchmarks(tmp_path, val=["v2"], test=["v3", "v2"])
    features(tmp_path, {"v1": 20, "v2": 20, "v3": 20})
    one, two = samples("ego4d", tmp_path)
    assert one.narrations == [(0, "C looks around."), (7, "C opens the fridge.")] and two.narrations == [(0, "A man X walks.")]
    assert one.read(0, 1)[0, 0, 0] == 3
    assert [s.name for s in samples("ego4d", tmp_path, "val")] == ["v2/a"]
    assert [s.name for s in samples("ego4d", tmp_path, "test")] == ["v3/a"]
    (tmp_path / "annotations" / "vq_val.json").unlink()
    with pytest.raises(BadData, match="vq_val.json"):
        samples("ego4d", tmp_path)
    write(tmp_path / "annotations" / "narration_stream_video_uids_train.json", ["v3"])
    assert [s.name for s in samples("ego4d", tmp_path)] == ["v3/a"]


def test_ego4d_narration_json(tmp_path):
    said = lambda t, text: {"timestamp_sec": t, "timestamp_frame": int(t * 30), "narration_text": text, "annotation_uid": "x"}
    write(tmp_path / "annotations" / "narration.json", {
        "v1": {"status": "complete", "narration_pass_1": {"narrations": [said(1.0, "#C C picks a cup")], "summaries": []},
               "narration_pass_2": {"narrations": [said(1.2, "#C C takes the cup"), said(2.2, "#C C drinks it")], "summaries": []}},
        "v2": {"status": "redacted"}})
    benchmarks(tmp_path)
    features(tmp_path, {"v1": 20})
    assert [s.narrations for s in samples("ego4d", tmp_path)] == [
        [(0, "C picks a cup.")], [(0, "C takes the cup."), (2, "C drinks it.")]]


def test_egoexo4d_raw(tmp_path):
    """Features may go by the take's name."""
    row = {"timestamp": 1.0, "text": "C cuts. ", "ego_visible": True, "subject": "C", "best_exo": None, "unsure": False}
    write(tmp_path / "annotations" / "atomic_descriptions_train.json", {"take_cam_names": {}, "annotations": {
        "uid-1": [{"descriptions": [row], "rejected": False}, {"descriptions": [row], "rejected": True, "reject_reason": "x"}]}})
    write(tmp_path / "takes.json", [{"take_uid": "uid-1", "take_name": "cmu_bike01_2"}])
    features(tmp_path, {"cmu_bike01_2": 20})
    with pytest.raises(BadData, match="holds no tensor"):            # all features in one file: under the annotations' name
        samples("egoexo4d", tmp_path)[0].read(0, 1)
    save_file({"features": torch.zeros(21, 10, 4)}, tmp_path / "cmu_bike01_2.safetensors")
    sample, = samples("egoexo4d", tmp_path)
    assert sample.narrations == [(0, "C cuts.")] and sample.read(0, 1).shape == (1, 10, 4)


EPIC = ["narration_id", "video_id", "narration_timestamp", "start_timestamp", "stop_timestamp", "narration", "verb"]


def epic_csv(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([EPIC, *rows])


def test_epic_csv(tmp_path):
    """Rows in any order; without a timestamp the start of the action."""
    epic_csv(tmp_path / "EPIC_100_validation.csv", [
        ["P01_01_1", "P01_01", "00:00:05.500", "00:00:05.10", "00:00:06.00", "put down knife", "put-down"],
        ["P01_01_0", "P01_01", "00:00:01.089", "00:00:00.14", "00:00:03.37", "open door", "open"],
        ["P01_01_2", "P01_01", "", "00:00:07.25", "00:00:08.00", "take plate from rack", "take"]])
    features(tmp_path, {"P01_01": 20})
    notes = Notes()
    sample, = samples("ek100", tmp_path, "val")
    assert sample.narrations == [(0, "You open the door."), (8, "You put down the knife."), (12, "You take the plate from the rack.")]
    annotations.tracks("ek100", tmp_path, "val", notes)
    assert "1 narrations without a timestamp" in str(notes) and "order of time" in str(notes)


# ---------------------------------------------------------------------- what can be wrong

@pytest.mark.parametrize("name", ["ego4d", "egoexo4d", "ek100"])
def test_nothing_there(tmp_path, name):
    with pytest.raises(NotDownloaded, match="--data toy"):
        samples(name, tmp_path)
    with pytest.raises(BadData, match="no split"):
        samples(name, tmp_path, "tran")


@pytest.mark.parametrize("content, says", [
    ("[1, 2", "not JSON"), ([], "top level"), ({"v": 3}, "video v"), ({"v": [3]}, "narration 0"), ({"v": [{"time": "1", "text": "x"}]}, "number"),
    ({"v": [{"time": 1, "text": None}]}, "narration 0"), ({"v": [{"time": float("nan"), "text": "x"}]}, "number"), ({"v": []}, "no narrations"),
    ({"w": [{"time": 1, "text": "x"}]}, "video w has no entry")])
def test_damaged_published_files(tmp_path, content, says):
    features(tmp_path, {"v": 20})
    path = write(tmp_path / "annotations" / "refined_train_narrations.json", content)
    with pytest.raises(BadData, match=says) as error:
        samples("ek100", tmp_path)
    assert "\n" not in str(error.value) and (path.name in str(error.value) or says.startswith(("no narr", "video w")))


@pytest.mark.parametrize("line, says", [
    (["a", "P01", "1:2", "00:00:01", "00:00:02", "open door", "open"], "HH:MM:SS"), (["a", "P01"], "columns"),
    (["a", "P01", "00:00:01", "00:00:01", "00:00:02", "open door", "open", "more"], "columns")])
def test_damaged_csv(tmp_path, line, says):
    epic_csv(tmp_path / "EPIC_100_train.csv", [line])
    features(tmp_path, {"P01": 20})
    with pytest.raises(BadData, match=says) as error:
        samples("ek100", tmp_path)
    assert "line 2" in str(error.value)
    (tmp_path / "EPIC_100_train.csv").write_text("a,b\n1,2\n")
    with pytest.raises(BadData, match="first line"):
        samples("ek100", tmp_path)


def test_features_that_do_not_fit(tmp_path):
    write(tmp_path / "annotations" / "refined_train_narrations.json", {"v": [{"time": 1, "text": "a"}, {"time": 9, "text": "b"}]})
    features(tmp_path, {"v": 20})
    sample, = samples("ek100", tmp_path, shape=(10, 1024))
    with pytest.raises(BadData, match="1024"):
        sample.read(0, 1)
    save_file({"v": torch.zeros(12, 10, 4)}, tmp_path / "features.safetensors")
    sample, = samples("ek100", tmp_path)
    with pytest.raises(BadData, match="12 frames, its annotations need 19"):
        sample.read(0, sample.num_frames)
    (tmp_path / "features.safetensors").write_bytes(b"x" * 50)
    with pytest.raises(BadData, match="cannot be read"):
        sample.read(0, 1)


def test_statistics_beside_the_paper(tmp_path, capsys):
    write(tmp_path / "annotations" / "refined_val_narrations.json", {"v": [{"time": 1, "text": "You look."}, {"time": 5, "text": "You sit down."}]})
    features(tmp_path, {"v": 20})
    data.main(["stats", "--data", "ek100", "--root", str(tmp_path), "--json"])
    printed = capsys.readouterr().out
    stats = json.loads(printed.splitlines()[-1])
    assert (stats["videos"], stats["length_mean"], stats["words_per_narration"]) == (1, 4.5, 2.5)
    assert "138" in printed and "493.9" in printed


def test_rewrite(tmp_path, monkeypatch):
    """Raw narrations through a language model into the published layout; it goes on where it was stopped."""
    from helpers import TOY
    epic_csv(tmp_path / "EPIC_100_validation.csv", [["a", "P01", "00:00:01.0", "00:00:01", "00:00:02", "open door", "open"],
                                                    ["b", "P01", "00:00:03.0", "00:00:01", "00:00:02", "take cup", "take"]])
    kept = tmp_path / "annotations" / "refined_val_narrations.jsonl"
    write(kept, json.dumps(["You open the door.", "You pull the door open."]) + "\n")
    data.main(["rewrite", "--data", "ek100", "--root", str(tmp_path), "--llm", str(TOY / "llm"), "--device", "cpu"])
    told = json.loads((tmp_path / "annotations" / "refined_val_narrations.json").read_text())["P01"]
    assert told[0] == {"time": 1.0, "text": "You pull the door open."} and told[1]["text"].strip()
    with pytest.raises(BadData, match="is there already"):
        data.main(["rewrite", "--data", "ek100", "--root", str(tmp_path), "--llm", str(TOY / "llm")])
