"""Ego4D, EgoExo4D, EPIC-Kitchens (§4.1): published and raw files give the expected samples; a defect is one line."""
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
    content = content if isinstance(content, str | bytes) else json.dumps(content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def features(root, frames, width=4):
    """Features that say which frame of which video they are."""
    write(root / "features_metadata.json",
          {name: {"duration": n / 2, "path": f"{name}.pt"} for name, n in frames.items()})
    numbered = lambda n: torch.arange(n + 1.0)[:, None, None].expand(n + 1, 10, width).contiguous()
    save_file({name: numbered(n) for name, n in frames.items()},
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
        (frame, _), = annotations.assign_frames([(time, "x")], high, fps, Notes())
        assert frame == int(published * fps), time


@pytest.mark.parametrize("narration, verb, written", [
    ("open fridge", "open", "You open the fridge."), ("put down knife", "put-down", "You put down the knife."),
    ("turn on tap", "", "You turn on the tap."),
    ("take plate from cupboard", "take", "You take the plate from the cupboard."),
    ("pour water into the pan", "pour", "You pour the water into the pan."),
    ("wash hands", "wash", "You wash the hands."),
    ("stir", "stir", "You stir."), ("take two plates", "take", "You take two plates."),
    ("still stirring", "", "You still the stirring."),
    ("pick up", "pick-up", "You pick up."), ("cut onion and carrot", "cut", "You cut the onion and the carrot."),
    ("", "", "")])
def test_epic_sentences(narration, verb, written):
    assert annotations.sentence(narration, verb) == written


def test_clean_leaves_nothing_of_nothing():
    assert [annotations.clean(text) for text in ("#C", "", " #unsure . ", "#")] == [""] * 4


def test_assign_frames():
    """Nothing is lost within half a second; repeats and what lies beyond the end are counted."""
    notes = Notes()
    rows = [(0.2, "a"), (3.01, "b"), (3.4, "c"), (3.45, "d"), (6.0, "d"), (30, "e"), (31, "f")]
    assert annotations.assign_frames(rows, 12.3, 2.0, notes) == [(1, "a"), (7, "b"), (8, "c"), (9, "d"), (24, "e")]
    assert notes.counts["repeated sentences left out"] == 1
    assert sum(n for what, n in notes.counts.items() if "beyond the end" in what) == 2
    assert notes.counts["narrations moved by a frame or more, because another one has their frame"] == 2
    rows = [(5, "a"), (5, "b"), (9, "c")]
    assert annotations.assign_frames(rows, 5.0, 2.0, Notes()) == [(8, "a"), (9, "b"), (10, "c")]
    rows = [(0, str(i)) for i in range(9)]
    assert annotations.assign_frames(rows, 2.0, 2.0, Notes()) == [(i, str(i)) for i in range(5)]
    assert annotations.assign_frames([(-1.0, "a")], 5, 2, Notes()) == [(0, "a")]


# ---------------------------------------------------------------------- the published layout

@golden
@pytest.mark.parametrize("name", ["ek100", "ego4d"])
@pytest.mark.parametrize("most", [None, 14])
def test_published_training_samples(name, most):
    """Frames, sentences and features of the published loader, but for what it loses.

    It drops "You take two carrots." (within half a second of another sentence); here it stands one frame later, and its
    repetition at 6.0 s is left out, as there.
    """
    which = f"{name}_narration" + (f"_max_num_frames_{most}" if most else "")
    expected = json.loads((LAYOUT / "expected.json").read_text())["flownar"][which]
    found = samples(name, LAYOUT / name, "val", max_frames=most)
    lengths = {video: entry["duration"] for video, entry in
               json.loads((LAYOUT / name / "features_metadata.json").read_text()).items()}
    assert len(found) == len(expected)
    for sample, case in zip(found, expected):
        frame, rows = -1, []
        for message in case["conversation"]:
            if message["role"] == "stream":
                frame += message["num_frames"]
            if message["role"] == "assistant":
                rows.append((frame, message["content"]))
        rows = [pair for pair in rows if pair[0] < case["frames_shape"][0]]
        lost = [(5, "You take two carrots.")] if (4, "You take a carrot.") in rows else []
        assert sample.narrations == sorted(rows + lost) and sample.num_frames <= (most or sample.num_frames)
        assert sample.duration == lengths[sample.name.split("/")[0]] > sample.num_frames / 2
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
        start = sample.tracks[0][0][0] if name == "ek100" else float(sample.name.split("_")[1]) / 2
        assert sample.offset == pytest.approx(start, abs=0.5)
        assert sample.origin == (0.0 if name == "ek100" else sample.offset)


def test_egoexo4d(tmp_path):
    """As published, what the wearer cannot see is left out of training samples, the first description too, and is part
    of what is streamed: of its range and of its tracks. Two annotators are two samples."""
    rows = lambda *said: {"descriptions": [{"timestamp": t, "text": text, "ego_visible": seen}
                                           for t, text, seen in said]}
    write(tmp_path / "annotations" / "refined_egocentric_atomic_descriptions_gpt_val.json",
          {"take-1": [rows((0.3, "You kneel.", False), (4.2, "You cut.", True), (2.0, "You look.", True)),
                      rows((1.0, "You stand.", True))],
           "take-2": [rows((1.0, "Hidden.", False))]})
    features(tmp_path, {"take-1": 20, "take-2": 20})
    first, second = samples("egoexo4d", tmp_path, "val")
    assert first.narrations == [(0, "You look."), (5, "You cut.")] and second.narrations == [(0, "You stand.")]
    assert first.read(0, 2)[:, 0, 0].tolist() == [4, 5]
    stream, hidden = samples("egoexo4d", tmp_path, "val", streaming=True)
    assert (stream.offset, stream.origin, stream.num_frames) == (0.3, 0.0, 9) and stream.name == "take-1_0_9"
    assert stream.tracks == [[(0.3, "You kneel."), (2.0, "You look."), (4.2, "You cut.")], [(1.0, "You stand.")]]
    assert hidden.tracks == [[(1.0, "Hidden.")]] and hidden.num_frames == 1 and hidden.duration == 10


@pytest.mark.parametrize("read", [annotations.tracks, annotations.intervals])
def test_a_video_without_narrations_is_counted(tmp_path, read):
    """Left out, in training and in evaluation, but not silently."""
    write(tmp_path / "annotations" / "refined_val_narrations.json", {"v": [{"time": 2, "text": "b"}], "w": []})
    notes = Notes()
    assert [one.video for one in read("ek100", tmp_path, "val", notes)] == ["v"]
    assert str(notes) == "1 annotators without narrations"


@pytest.mark.parametrize("streaming", [False, True])
def test_times_before_the_start(tmp_path, streaming):
    """Moved to 0 in training and in evaluation, and counted."""
    write(tmp_path / "annotations" / "refined_train_narrations.json",
          {"v": [{"time": -0.7, "text": "a"}, {"time": 2, "text": "b"}]})
    features(tmp_path, {"v": 20})
    notes, (sample,) = Notes(), samples("ek100", tmp_path, streaming=streaming)
    assert (sample.tracks == [[(0.0, "a"), (2.0, "b")]]) if streaming else (sample.narrations == [(0, "a"), (4, "b")])
    assert sample.num_frames == 5 and sample.offset == 0 and sample.read(0, 1)[0, 0, 0] == 0
    annotations.tracks("ek100", tmp_path, "train", notes)
    assert str(notes) == "1 narrations moved from before the start of their video to 0 s"


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
        "v2": {"narrations": [said(1.0, "#C C sits down", "a")]},
        "v3": {"narrations": [said(1.0, "#C C gets up", "a")]}}})
    benchmarks(tmp_path, val=["v2"], test=["v3", "v2"])
    features(tmp_path, {"v1": 20, "v2": 20, "v3": 20})
    one, two = samples("ego4d", tmp_path)
    assert one.narrations == [(0, "C looks around."), (7, "C opens the fridge.")]
    assert two.narrations == [(0, "A man X walks.")]
    assert one.read(0, 1)[0, 0, 0] == 3
    assert [s.name for s in samples("ego4d", tmp_path, "val")] == ["v2/a"]
    assert [s.name for s in samples("ego4d", tmp_path, "test")] == ["v3/a"]
    (tmp_path / "annotations" / "vq_val.json").unlink()
    with pytest.raises(BadData, match="vq_val.json"):
        samples("ego4d", tmp_path)
    write(tmp_path / "annotations" / "narration_stream_video_uids_train.json", ["v3"])
    assert [s.name for s in samples("ego4d", tmp_path)] == ["v3/a"]


def test_ego4d_narration_json(tmp_path):
    said = lambda t, text: {"timestamp_sec": t, "timestamp_frame": int(t * 30), "narration_text": text,
                            "annotation_uid": "x"}
    write(tmp_path / "annotations" / "narration.json", {
        "v1": {"status": "complete",
               "narration_pass_1": {"narrations": [said(1.0, "#C C picks a cup")], "summaries": []},
               "narration_pass_2": {"narrations": [said(1.2, "#C C takes the cup"), said(2.2, "#C C drinks it")],
                                    "summaries": []}},
        "v2": {"status": "redacted"}})
    benchmarks(tmp_path)
    features(tmp_path, {"v1": 20})
    assert [s.narrations for s in samples("ego4d", tmp_path)] == [
        [(0, "C picks a cup.")], [(0, "C takes the cup."), (2, "C drinks it.")]]


def test_egoexo4d_raw(tmp_path):
    """Features may go by the take's name."""
    row = {"timestamp": 1.0, "text": "C cuts. ", "ego_visible": True, "subject": "C", "best_exo": None, "unsure": False}
    write(tmp_path / "annotations" / "atomic_descriptions_train.json", {"take_cam_names": {}, "annotations": {
        "uid-1": [{"descriptions": [row], "rejected": False},
                  {"descriptions": [row], "rejected": True, "reject_reason": "x"}]}})
    write(tmp_path / "takes.json", [{"take_uid": "uid-1", "take_name": "cmu_bike01_2"}])
    features(tmp_path, {"cmu_bike01_2": 20})
    with pytest.raises(BadData, match="holds no tensor"):      # all features in one file: under the annotations' name
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
    assert sample.narrations == [(0, "You open the door."), (8, "You put down the knife."),
                                 (12, "You take the plate from the rack.")]
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
    ("[1, 2", "not JSON"), ([], "top level"), ({"v": 3}, "video v"), ({"v": [3]}, "narration 0"),
    ({"v": [{"time": "1", "text": "x"}]}, "number"),
    ({"v": [{"time": 1, "text": None}]}, "narration 0"), ({"v": [{"time": float("nan"), "text": "x"}]}, "number"),
    ({"v": [{"time": 1e300, "text": "x"}]}, "number"), ({"v": [{"time": 10 ** 400, "text": "x"}]}, "number"),
    (b"\xff\xfe", "UTF-8"),
    ({"v": []}, "no narrations"),
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


@pytest.mark.parametrize("row, says", [
    (b"a,P01,00:00:01,00:00:01,00:00:02,open d\xf6\xf6r,open\r\n", "is not UTF-8"),
    (b"a,P01,00:00:01,\0,00:00:02,open door,open\r\n", "zero bytes"),
    (b"a,P01,00:00:01,00:00:01,00:00:02," + b"x" * 200_000 + b",open\r\n", "is not CSV"),
    (b"a,P01," + b"9" * 400 + b":00:01,00:00:01,00:00:02,open door,open\r\n", "HH:MM:SS"),
    (b"a,P01,999999999:00:01,00:00:01,00:00:02,open door,open\r\n", "number of seconds")])
def test_csv_with_bad_bytes(tmp_path, row, says):
    write(tmp_path / "EPIC_100_train.csv", ",".join(EPIC).encode() + b"\r\n" + row)
    with pytest.raises(BadData, match=says) as error:
        samples("ek100", tmp_path)
    assert "EPIC_100_train.csv" in str(error.value) and "\n" not in str(error.value)


NONSENSE = [None, True, 3, -1.5, "x", [], [[]], {}, {"v": None}, {"v": [3]}, {"v": {"a": 3}},
            {"v": [{"descriptions": 3}]},
            {"videos": {"v": {"narrations": 3}}}, {"videos": {"v": 3}}, {"v": {"narration_pass_1": {"narrations": 3}}},
            {"v": {"1, 2": 3}}, {"v": {"1.2.3, 4": {}}}, {"v": {"9" * 400 + ", 4": {}}}, {"annotations": {"v": [3]}},
            [{"video_uid": []}],
            {key: [{"video_uid": []}] for key in ("videos", "clips", "annotations")}]


@pytest.mark.parametrize("name, file", [
    ("ek100", "refined_val_narrations.json"), ("ego4d", "refined_narration_stream_val.json"),
    ("ego4d", "segment_summaries.json"),
    ("ego4d", "all_narrations_redacted.json"), ("ego4d", "narration_stream_video_uids_val.json"),
    ("ego4d", "nlq_val.json"),
    ("egoexo4d", "refined_egocentric_atomic_descriptions_gpt_val.json"), ("egoexo4d", "atomic_descriptions_val.json"),
    ("egoexo4d", "takes.json"), ("ego4d", "../features_metadata.json")])
def test_invalid_content_of_any_file_is_one_line(tmp_path, name, file):
    said = {"time": 1.0, "text": "#C C looks around", "_annotation_uid": "a"}
    write(tmp_path / "annotations" / "all_narrations_redacted.json", {"videos": {"v": {"narrations": [said]}}})
    write(tmp_path / "annotations" / "atomic_descriptions_val.json",
          {"annotations": {"v": [{"descriptions": [{"timestamp": 1, "text": "a"}]}]}})
    benchmarks(tmp_path, val=["v"])
    features(tmp_path, {"v": 20})
    for content in NONSENSE:
        write(tmp_path / "annotations" / file, content)
        for streaming in (False, True):
            try:
                samples(name, tmp_path, "val", streaming=streaming)
            except BadData as error:                                  # anything else is a defect
                assert "\n" not in str(error) or isinstance(error, NotDownloaded)


def test_features_that_do_not_fit(tmp_path):
    write(tmp_path / "annotations" / "refined_train_narrations.json",
          {"v": [{"time": 1, "text": "a"}, {"time": 9, "text": "b"}]})
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
    write(tmp_path / "annotations" / "refined_val_narrations.json",
          {"v": [{"time": 1, "text": "You look."}, {"time": 5, "text": "You sit down."}]})
    features(tmp_path, {"v": 20})
    data.main(["stats", "--data", "ek100", "--root", str(tmp_path), "--json"])
    printed = capsys.readouterr().out
    stats = json.loads(printed.splitlines()[-1])
    assert (stats["videos"], stats["length_mean"], stats["words_per_narration"]) == (1, 4.5, 2.5)
    assert "138" in printed and "493.9" in printed
