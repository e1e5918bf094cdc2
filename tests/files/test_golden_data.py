"""The published loaders of data sets (App. B.4): the same samples from the same files, against what
they gave (tests/golden/data)."""
import json

import pytest
import torch

import data
from helpers import ROOT, golden_data, save_features
from support.files import annotations

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
        samples = [data.shorten(sample, max_frames) for sample in samples]
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


def test_ego4d_tags_are_removed():
    for text, cleaned in EXPECTED["clean"]:
        assert annotations.clean(text) == cleaned, text
    assert annotations.clean("#C") == annotations.clean(" #unsure . ") == ""


def test_frames_of_single_narrations(tmp_path):
    """From features that say which frame they are."""
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
