"""Ego4D, EgoExo4D, EPIC-Kitchens (§4.1): files give samples, or are refused in one line; what the
published loaders (App. B.4) gave of the same files (tests/golden/data)."""
import json

import pytest
import torch

import data
from helpers import ROOT, golden_data, save_features
from narrator import Config
from support.common.errors import BadData, NotDownloaded
from support.files import annotations
from support.files.sentences import Notes, Sentence, assign_frames


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def features(root, frames, width=4):
    """Features of videos, {name: frames}: every number of frame i is i."""
    for name, count in frames.items():
        numbers = torch.arange(count + 1.0)[:, None, None]
        save_features(root, {name: numbers.expand(count + 1, 10, width)})
    write(root / "features_metadata.json", {name: {"duration": count / 2, "path": f"{name}.pt"}
                                            for name, count in frames.items()})


def samples(name, root, split="train", **options):
    return list(data.load_dataset(name, root, split, **options))


def on_frames(narrations, duration, notes):
    """[(frame, text)] of narrations (seconds, text), at two frames a second."""
    sentences = [Sentence(time, text) for time, text in narrations]
    return [(frame, sentence.text)
            for frame, sentence in assign_frames(sentences, duration, 2.0, notes)]


def heard(sample):
    return [[(sentence.time, sentence.text) for sentence in sentences]
            for sentences in sample.annotators]


def test_repeats_and_what_lies_beyond_the_end_are_counted():
    """Nothing is lost within half a second."""
    notes = Notes()
    placed = on_frames([(0.2, "a"), (3.01, "b"), (3.4, "c"), (3.45, "d"), (6.0, "d"), (30, "e"),
                        (31, "f")], 12.3, notes)
    assert placed == [(1, "a"), (7, "b"), (8, "c"), (9, "d"), (24, "e")]
    assert {message: count for message, count in notes.counts.items() if count} == {
        "repeated sentences left out": 1,
        "narrations beyond the end of their video moved to its last frame": 1,
        "narrations beyond the end of their video left out": 1,
        "narrations moved by a frame or more, because another one has their frame": 2,
    }
    # at the end, each leaves room for those after it; there may be more than frames
    placed = on_frames([(5, "a"), (5, "b"), (9, "c")], 5.0, Notes())
    assert placed == [(8, "a"), (9, "b"), (10, "c")]
    placed = on_frames([(0, str(i)) for i in range(9)], 2.0, Notes())
    assert placed == [(i, str(i)) for i in range(5)]


def description(time, text, visible=True):
    return {"timestamp": time, "text": text, "ego_visible": visible}


def test_egoexo4d(tmp_path):
    """What the wearer cannot see is left out of training samples, not of what is streamed."""
    first_annotator = {"descriptions": [description(0.3, "You kneel.", visible=False),
                                        description(4.2, "You cut."),
                                        description(2.0, "You look.")]}
    second_annotator = {"descriptions": [description(1.0, "You stand.")]}
    only_unseen = {"descriptions": [description(1.0, "Hidden.", visible=False)]}
    file = "refined_egocentric_atomic_descriptions_gpt_val.json"
    write(tmp_path / "annotations" / file,
          {"take-1": [first_annotator, second_annotator], "take-2": [only_unseen]})
    features(tmp_path, {"take-1": 20, "take-2": 20})

    first, second = samples("egoexo4d", tmp_path, "val")
    assert first.narrations == [(0, "You look."), (5, "You cut.")]
    assert second.narrations == [(0, "You stand.")]
    assert first.read(0, 2)[:, 0, 0].tolist() == [4, 5]

    stream, hidden = samples("egoexo4d", tmp_path, "val", streaming=True)
    assert (stream.start, stream.origin, stream.num_frames) == (0.3, 0.0, 9)
    assert stream.name == "take-1_0_9"
    assert heard(stream) == [[(0.3, "You kneel."), (2.0, "You look."), (4.2, "You cut.")],
                             [(1.0, "You stand.")]]
    assert heard(hidden) == [[(1.0, "Hidden.")]]
    assert (hidden.num_frames, hidden.duration) == (1, 10)
    for visible in ("0", 0, "false"):
        take = [{"descriptions": [description(1.0, "You kneel.", visible)]}]
        write(tmp_path / "annotations" / file, {"take-1": take})
        with pytest.raises(BadData, match="ego_visible is .*; true, false and null are read"):
            samples("egoexo4d", tmp_path, "val")
        take = [{"descriptions": [description(1.0, "You kneel.")], "rejected": visible}]
        write(tmp_path / "annotations" / file, {"take-1": take})
        with pytest.raises(BadData, match="rejected is .*; true, false and null are read"):
            samples("egoexo4d", tmp_path, "val")


def test_a_part_of_a_data_set(tmp_path, capsys):
    rows = {f"v{n}": [{"time": 1, "text": "a"}] for n in range(5)}
    for split in ("train", "val"):
        write(tmp_path / "annotations" / f"refined_{split}_narrations.json", rows)
    features(tmp_path, {"v1": 20, "v2": 20, "v4": 20})
    names = [sample.name for sample in samples("ek100", tmp_path)]
    assert names == ["v1/0", "v2/0", "v4/0"]
    assert "annotators of videos without features left out: 2" in capsys.readouterr().err
    assert len(samples("ek100", tmp_path, limit=2)) == 2
    for streaming in (False, True):
        with pytest.raises(BadData, match="video v0 has no features"):
            samples("ek100", tmp_path, "val", streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_corrected_is_counted(tmp_path, capsys, streaming):
    write(tmp_path / "annotations" / "refined_train_narrations.json",
          {"v": [{"time": -0.7, "text": "a"}, {"time": 2, "text": "b"}], "w": []})
    features(tmp_path, {"v": 20})
    sample, = samples("ek100", tmp_path, streaming=streaming)
    if streaming:
        assert heard(sample) == [[(0.0, "a"), (2.0, "b")]]
    else:
        assert sample.narrations == [(0, "a"), (4, "b")]
    assert (sample.num_frames, sample.start) == (5, 0) and sample.read(0, 1)[0, 0, 0] == 0
    notes = capsys.readouterr().err
    assert "narrations moved from before the start of their video to 0 s: 1" in notes
    assert "annotators without narrations: 1" in notes


def benchmarks(root, val=(), test=()):
    for benchmark, key in annotations.BENCHMARKS.items():
        write(root / "annotations" / f"{benchmark}_val.json",
              {key: [{"video_uid": video} for video in val]})
        write(root / "annotations" / f"{benchmark}_test_unannotated.json",
              {key: [{"video_uid": video} for video in test]})


def redacted(time, text, annotator):
    """A row of Ego4D's all_narrations_redacted.json."""
    return {"time": time, "text": text, "_annotation_uid": annotator}


def test_ego4d_redacted(tmp_path):
    write(tmp_path / "annotations" / "all_narrations_redacted.json", {"videos": {"v": {
        "narrations": [redacted(5.0, "#C C opens the #unsure fridge", "a"),
                       redacted(1.1, "#C C looks around.", "a"),
                       redacted(2.0, "#c stirs", "b"),
                       redacted(3.0, "#O A man X walks", "b"),
                       redacted(4.0, "#C ", "b")]}}})
    benchmarks(tmp_path)
    features(tmp_path, {"v": 20})
    first, second = samples("ego4d", tmp_path)
    assert first.narrations == [(0, "C looks around."), (7, "C opens the fridge.")]
    assert second.narrations == [(0, "A man X walks.")]
    assert first.read(0, 1)[0, 0, 0] == 3


def test_ego4d_split(tmp_path):
    row = redacted(1.0, "#C C sits down", "a")
    write(tmp_path / "annotations" / "all_narrations_redacted.json",
          {"videos": {video: {"narrations": [row]} for video in ("v1", "v2", "v3")}})
    benchmarks(tmp_path, val=["v2"], test=["v3", "v2"])
    features(tmp_path, {"v1": 20, "v2": 20, "v3": 20})
    for split, name in (("train", "v1/a"), ("val", "v2/a"), ("test", "v3/a")):
        assert [sample.name for sample in samples("ego4d", tmp_path, split)] == [name]
    (tmp_path / "annotations" / "vq_val.json").unlink()
    with pytest.raises(BadData, match="vq_val.json"):
        samples("ego4d", tmp_path)


def test_egoexo4d_raw(tmp_path):
    row = description(1.0, "C cuts. ") | {"subject": "C", "best_exo": None, "unsure": False}
    write(tmp_path / "annotations" / "atomic_descriptions_train.json", {
        "take_cam_names": {},
        "annotations": {"uid-1": [
            {"descriptions": [row], "rejected": False},
            {"descriptions": [row], "rejected": True, "reject_reason": "x"}]}})
    write(tmp_path / "takes.json", [{"take_uid": "uid-1", "take_name": "cmu_bike01_2"}])
    features(tmp_path, {"cmu_bike01_2": 20})
    sample, = samples("egoexo4d", tmp_path)
    assert sample.narrations == [(0, "C cuts.")] and sample.read(0, 1).shape == (1, 10, 4)


@pytest.mark.parametrize("content, message", [
    ({"v": 3}, "narrations.json: expected what its owners"),
    ({"v": [{"time": 10 ** 400, "text": "x"}]}, "video v, annotator 0, narration 0: expected"),
    ({"v": []}, "no narrations"),
])
def test_damaged_files_are_named(tmp_path, content, message):
    features(tmp_path, {"v": 20})
    write(tmp_path / "annotations" / "refined_train_narrations.json", content)
    with pytest.raises(BadData, match=message) as error:
        samples("ek100", tmp_path)
    assert "\n" not in str(error.value)


INVALID = [
    None, 3, "x", [], [[]], {}, {"v": None}, {"v": [3]}, {"v": {"a": 3}}, {"v": [{"descriptions": 3}]},
    {"videos": {"v": 3}}, {"videos": {"v": {"narrations": 3}}}, {"videos": {"v": {"narrations": [{"text": 3}]}}},
    {"videos": {"v": {"narrations": [{"time": 1.0, "text": "#C C sits down"}]}}}, {"v": {"1, 2": 3}}, {"v": {"1.2.3, 4": {}}}, {"annotations": {"v": [3]}}, [{"video_uid": []}],
    {key: [{"video_uid": []}] for key in ("videos", "clips", "annotations")},
    {key: [{"video_id": "v"}] for key in ("videos", "clips", "annotations")},
]


@pytest.mark.parametrize("name, file", [
    ("ek100", "refined_val_narrations.json"),
    ("ego4d", "refined_narration_stream_val.json"),
    ("ego4d", "segment_summaries.json"),
    ("ego4d", "all_narrations_redacted.json"),
    ("ego4d", "nlq_val.json"),
    ("ego4d", "../features_metadata.json"),
    ("egoexo4d", "refined_egocentric_atomic_descriptions_gpt_val.json"),
    ("egoexo4d", "atomic_descriptions_val.json"),
    ("egoexo4d", "takes.json"),
])
def test_invalid_content_of_any_file_is_one_line(tmp_path, name, file):
    row = redacted(1.0, "#C C looks around", "a")
    write(tmp_path / "annotations" / "all_narrations_redacted.json",
          {"videos": {"v": {"narrations": [row]}}})
    write(tmp_path / "annotations" / "atomic_descriptions_val.json",
          {"annotations": {"v": [{"descriptions": [description(1, "a")]}]}})
    benchmarks(tmp_path, val=["v"])
    features(tmp_path, {"v": 20})
    for content in INVALID:
        write(tmp_path / "annotations" / file, json.dumps(content))
        for streaming in (False, True):
            try:
                samples(name, tmp_path, "val", streaming=streaming)
            except NotDownloaded:
                pass
            except BadData as error:
                assert "\n" not in str(error)


def test_features_that_do_not_fit(tmp_path):
    write(tmp_path / "annotations" / "refined_train_narrations.json",
          {"v": [{"time": 1, "text": "a"}, {"time": 9, "text": "b"}]})
    features(tmp_path, {"v": 20}, width=16)
    sample, = samples("ek100", tmp_path)
    data.check_sample(sample, Config(width=16))
    for settings, message in (({"width": 1024}, "16 wide .* needs 1024"),
                              ({"width": 16, "grid": 0}, "10 tokens"),
                              ({"width": 16, "fps": 1.0}, "2 frames a second, .* needs 1")):
        with pytest.raises(BadData, match=message):
            data.check_sample(sample, Config(**settings))


def test_a_row_too_few_loses_no_narration(tmp_path):
    write(tmp_path / "annotations" / "refined_train_narrations.json",
          {"v": [{"time": 1, "text": "a"}, {"time": 10, "text": "b"}]})
    features(tmp_path, {"v": 20})
    save_features(tmp_path, {"v": torch.zeros(20, 10, 4)})
    sample, = samples("ek100", tmp_path)
    assert sample.narrations == [(0, "a"), (17, "b")] and len(sample.read(0, sample.num_frames)) == 18


def test_times_that_no_video_has_are_refused(tmp_path, capsys):
    rows = [{"time": 1000 * time, "text": f"You open door {time}."} for time in range(1, 9)]
    write(tmp_path / "annotations/refined_narration_stream_train.json", {video: {"a": rows} for video in "vw"})
    features(tmp_path, {"v": 20, "w": 20})
    with pytest.raises(BadData, match="14 narrations are beyond .* 2 within; .* in milliseconds"):
        samples("ego4d", tmp_path)
    late = {"time": 12.0, "text": "You go."}
    write(tmp_path / "annotations/refined_narration_stream_val.json",
          {"v": {"a": [{"time": 1.0, "text": "You sit."}, late]}})
    capsys.readouterr()
    samples("ego4d", tmp_path, "val", streaming=True)
    assert "narrations beyond the end of their features, which cannot be found: 1" in capsys.readouterr().err


# ---------------------------------------------------------------------- the published loaders

EXPECTED = json.loads((ROOT / "tests" / "golden" / "data" / "expected.json").read_text())


def assert_is_of(case, x):
    assert list(x.shape) == case["shape"]
    assert x.sum().item() == pytest.approx(case["sum"], abs=1e-3)


@pytest.mark.parametrize("name", ["ek100", "ego4d"])
@pytest.mark.parametrize("max_frames, suffix", [(None, ""), (14, "_max_num_frames_14")])
def test_training_samples(tmp_path, name, max_frames, suffix):
    """Frames, sentences and features of the published loader, and one sentence that it loses.

    "You take two carrots." comes within half a second of another sentence; here it stands one frame
    later, and its repetition at 6.0 s is left out, as there.
    """
    expected = EXPECTED[f"{name}_narration{suffix}"]
    samples = list(data.load_dataset(name, golden_data(name, tmp_path / name), "val"))
    if max_frames:
        samples = data.shorten(samples, max_frames)
    assert len(samples) == len(expected)
    for sample, case in zip(samples, expected):
        frames = case["shape"][0]
        narrations = [(frame, text) for frame, text in case["narrations"] if frame < frames]
        if (4, "You take a carrot.") in narrations:
            narrations.append((5, "You take two carrots."))
        assert sample.narrations == sorted(narrations)
        assert_is_of(case, sample.read(0, sample.num_frames))


@pytest.mark.parametrize("name", ["ek100", "ego4d"])
def test_streaming_samples(tmp_path, name):
    expected = EXPECTED[f"{name}_segment_summary"]
    folder = golden_data(name, tmp_path / name)
    samples = list(data.load_dataset(name, folder, "val", streaming=True))
    assert [sample.name for sample in samples] == [case["name"] for case in expected]
    for sample, case in zip(samples, expected):
        assert_is_of(case, torch.stack(list(sample.tokens())))
        if name == "ek100":                    # begins with its first narration
            start = sample.annotators[0][0].time
            origin = 0.0
        else:                                  # its name holds its first frame
            start = float(sample.name.split("_")[1]) / 2
            origin = sample.start
        assert sample.start == pytest.approx(start, abs=0.5)
        assert sample.origin == origin


def test_intervals_of_the_same_frames_have_names_of_their_own(tmp_path, capsys):
    said = {"a": {"narration": [{"time": 3.0, "text": "You cut."}]}}
    times = ("1.77, 8.81", "1.87, 8.71", "1.6, 8.9", "2, 8.81")
    write(tmp_path / "segment_summaries.json", {"v": dict.fromkeys(times, said)})
    features(tmp_path, {"v": 20})
    samples = data.load_dataset("ego4d", tmp_path, "val", streaming=True)
    assert [sample.start for sample in samples] == [1.77, 1.87, 1.6, 2]
    assert samples[0].name == "v_3_18" and len({sample.name for sample in samples}) == 4
    write(tmp_path / "segment_summaries.json", {"v": {"3.5, 8": said}})
    data.load_dataset("ego4d", tmp_path, "val", streaming=True)
    assert "narrations before their interval, which cannot be found: 1" in capsys.readouterr().err
    for times in ("-0.5, 8", "nan, 8", "2, inf", "8, 2"):
        write(tmp_path / "segment_summaries.json", {"v": {times: said}})
        with pytest.raises(BadData, match="segment_summaries.json: expected what its owners put there"):
            data.load_dataset("ego4d", tmp_path, "val", streaming=True)


def test_ego4d_tags_are_removed():
    for text, cleaned in EXPECTED["clean"]:
        assert annotations.clean(text) == cleaned, text
    assert annotations.clean("#C") == annotations.clean(" #unsure . ") == ""


def test_frames_of_single_narrations(tmp_path):
    cases = {str(n): case for n, case in enumerate(EXPECTED["ceil"])}
    rows = {name: [{"time": time, "text": "You look."}] for name, (time, *_) in cases.items()}
    index = {name: {"duration": case[3], "path": f"{name}.pt"} for name, case in cases.items()}
    (tmp_path / "refined_val_narrations.json").write_text(json.dumps(rows))
    (tmp_path / "features_metadata.json").write_text(json.dumps(index))
    numbers = torch.arange(22.0)[:, None, None].repeat(1, 10, 4)
    save_features(tmp_path, dict.fromkeys(cases, numbers))
    samples = data.load_dataset("ek100", tmp_path, "val")
    for sample, (_, fps, *_, rounded) in zip(samples, cases.values(), strict=True):
        assert sample.read(0, sample.num_frames)[:, 0, 0].tolist() == [int(fps * rounded)]
