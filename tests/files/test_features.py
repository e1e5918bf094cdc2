"""support/files/features.py: feature files read whole or by range, pictures encoded, metadata
checked.
"""
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from helpers import ROOT
from support.common.errors import BadData
from support.files import features
from support.files.features import is_features, load_features

FEATURES = ("a.safetensors", "a.safetensors:b", r"C:\x\a.safetensors", r"C:\x\a.safetensors:b:c",
            "a.PT", "/x.y/a.pt")
NO_FEATURES = ("a.mp4", r"C:\x\a.mp4", "pt", "a.pt.mp4", "a.safetensors.mkv", "safetensors:b.mp4",
               "a.pth")


def test_features_and_videos_are_distinguished():
    for spec in FEATURES:
        assert is_features(spec), spec
    for spec in NO_FEATURES:
        assert not is_features(spec), spec


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_features_are_loaded_as_stored(tmp_path, dtype):
    x = torch.randn(5, 10, 8).to(dtype)
    other = torch.randn(3, 10, 8).to(dtype)
    save_file({"x": x}, tmp_path / "one.safetensors")
    save_file({"x": x, "y:z": other}, tmp_path / "two.safetensors")
    torch.save(x, tmp_path / "x.pt")
    expected = {"one.safetensors": x, "one.safetensors:x": x, "two.safetensors:y:z": other,
                "x.pt": x}
    for spec, tensor in expected.items():
        loaded = load_features(str(tmp_path / spec), tokens=10, width=8)
        assert loaded.dtype == dtype and torch.equal(loaded, tensor)


@pytest.fixture(scope="module")
def bad_features(tmp_path_factory):
    """A folder of files that hold no usable features."""
    folder = tmp_path_factory.mktemp("bad")
    x = torch.randn(5, 10, 8)
    with_nan = x.clone()
    with_nan[2] = float("nan")
    tensors = {"x": x, "rank": x[0].clone(), "zero": x[:0].clone(), "whole": x.int(),
               "nan": with_nan, "inf": x.half() * 1e9}
    save_file(tensors, folder / "many.safetensors")
    save_file({}, folder / "none.safetensors")
    torch.save({"x": x}, folder / "dict.pt")
    torch.save(x.to_sparse(), folder / "sparse.pt")
    torch.save(x.to("meta"), folder / "meta.pt")
    torch.save(x, folder / "cut.pt")
    for complete, cut in (("many.safetensors", "cut.safetensors"), ("cut.pt", "cut.pt")):
        content = (folder / complete).read_bytes()
        (folder / cut).write_bytes(content[:len(content) // 2])
    (folder / "text.pt").write_text("hello")
    (folder / "empty.pt").touch()
    # a pickle that needs more than tensors
    torch.save(subprocess.Popen, folder / "code.pt")
    return folder


@pytest.mark.parametrize("spec, message", [
    ("gone.pt", "no such file"),
    ("gone.safetensors:x", "no such file"),
    ("a.mp4", "features are"),
    ("many.safetensors", r"holds 6 tensors.*inf, nan, rank.*\.\.\."),
    ("none.safetensors", "holds 0 tensors"),
    ("many.safetensors:w", "no tensor 'w'.*inf, nan"),
    ("many.safetensors:", "no tensor ''"),
    ("many.safetensors:rank", r"not \[10, 8\]"),
    ("many.safetensors:zero", r"not \[0, 10, 8\]"),
    ("many.safetensors:whole", "floating point, not int32"),
    ("many.safetensors:nan", "NaN"),
    ("many.safetensors:inf", "infinite"),
    ("dict.pt", "holds a dict"),
    ("sparse.pt", "sparse or an empty"),
    ("meta.pt", "sparse or an empty"),
    ("code.pt", "no plain tensor"),
    ("cut.safetensors", "damaged"),
    ("cut.pt", "damaged"),
    ("text.pt", "damaged"),
    ("empty.pt", "damaged"),
])
def test_features_that_cannot_be_used_are_named(bad_features, spec, message):
    with pytest.raises(BadData, match=message) as error:
        load_features(str(bad_features / spec))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("wanted, message", [
    ({"tokens": 5}, "10 tokens per frame.* 5"),
    ({"width": 1024}, "8 wide.* 1024"),
])
def test_features_of_another_shape_are_refused(bad_features, wanted, message):
    with pytest.raises(BadData, match=message):
        load_features(f"{bad_features}/many.safetensors:x", **wanted)


# ---------------------------------------------------------------------- a data set's features


def write_metadata(root, entries):
    (root / "features_metadata.json").write_text(json.dumps(entries))


def save_tensor(x, path):
    save_file({"any": x}, path)


def save_old_format(x, path):
    torch.save(x, path, _use_new_zipfile_serialization=False)


def save_bfloat16(x, path):
    torch.save(x.bfloat16(), path)


@pytest.mark.parametrize("path, save", [
    ("v.pt", torch.save),
    ("features/full_scale_2fps/v.pt", torch.save),
    ("v.safetensors", save_tensor),
    ("v.pt", save_old_format),
    ("v.pt", save_bfloat16),
])
def test_a_range_of_frames(tmp_path, path, save):
    write_metadata(tmp_path, {"v": {"duration": 9.5, "path": path}})
    x = torch.arange(20.0)[:, None, None].expand(20, 10, 4).contiguous()
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    save(x, tmp_path / path)
    store = features.Store(tmp_path)
    assert torch.equal(store.read("v", 3, 7), x[3:7])
    assert store.rows("v") == 20
    with pytest.raises(BadData, match="20 frames"):
        store.read("v", 18, 23)


def test_published_folders(tmp_path):
    """The file lies in features/SOME_LONG_NAME/; the metadata above it has only its name."""
    folder = tmp_path / "features" / "videos_2fps_max384"
    folder.mkdir(parents=True)
    torch.save(torch.ones(5, 10, 4), folder / "v.pt")
    write_metadata(tmp_path, {"v": {"duration": 2.0, "path": "v.pt"}})
    assert features.Store(tmp_path).read("v", 1, 4).shape == (3, 10, 4)


def test_a_look_up_does_not_list_the_folder(tmp_path, monkeypatch):
    """Folders are listed when the store is made. To find one of thousands of files, none is listed
    again.
    """
    folder = tmp_path / "features" / "videos_2fps_max384"
    folder.mkdir(parents=True)
    names = [f"v{n}" for n in range(3000)]
    for name in names:
        (folder / f"{name}.pt").touch()
    write_metadata(tmp_path, {name: {"duration": 2.0, "path": f"{name}.pt"} for name in names})
    listed = []
    for name in ("scandir", "listdir"):
        def recorded(*arguments, real=getattr(os, name)):
            listed.append(arguments)
            return real(*arguments)
        monkeypatch.setattr(os, name, recorded)
    store = features.Store(tmp_path)
    assert 0 < len(listed) <= 3
    listed.clear()
    for name in names:
        assert store.locate(name) == (folder / f"{name}.pt", None)
    assert not listed


@pytest.mark.parametrize("batch", [1, 2, 3, 20])
def test_encode_pictures(batch):
    """As one by one, whatever the batch. A picture that is the same array as the one before it, not
    merely an equal one, is encoded once.
    """
    a, b, c = (np.full((4, 6, 3), value, np.uint8) for value in (1, 2, 3))
    pictures = [a, a, a, a, b, b, c, a, a.copy()]
    encoded = []

    def vision(frames):
        encoded.extend(frames[:, 0, 0, 0].tolist())
        return frames[:, :1, :2].float()       # [B, J = 1, ...]

    tokens = list(features.encode_pictures(iter(pictures), vision, batch))
    assert [int(x.flatten()[0]) for x in tokens] == [1, 1, 1, 1, 2, 2, 3, 1, 1]
    assert encoded == [1, 2, 3, 1, 1]
    assert list(features.encode_pictures([], vision, batch)) == []


@pytest.mark.parametrize("key, values", [
    ("duration", ["x", float("nan"), -1, 0, True, 10 ** 400, None]),
    ("frames", [0, "x", 2.5, -3]),
    ("path", [3, "", ".", "../v.pt", "a/../../v.pt", "/etc/passwd", ".."]),
])
def test_invalid_metadata(tmp_path, key, values):
    """Named in one line. No path leads out of the data set's folder, even to a file that exists."""
    root = tmp_path / "root"
    root.mkdir()
    torch.save(torch.ones(5, 10, 4), tmp_path / "v.pt")
    for value in values:
        write_metadata(root, {"v": {"duration": 2.0, "path": "v.pt"} | {key: value}})
        with pytest.raises(BadData, match=f'features_metadata.json, video v: "{key}"') as error:
            features.Store(root).locate("v")
        assert "\n" not in str(error.value)


def test_the_name_of_a_video_leads_nowhere(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    torch.save(torch.ones(5, 10, 4), tmp_path / "ESCAPED.pt")
    write_metadata(root, {"../ESCAPED": {"duration": 2.0, "path": "x.pt"}})
    with pytest.raises(BadData, match="are not there"):
        features.Store(root).read("../ESCAPED", 0, 1)


@pytest.mark.parametrize("write", [
    lambda path: path.write_bytes(b"x" * 50),
    lambda path: path.write_bytes(b""),
    lambda path: torch.save({"v": 1}, path),
    lambda path: torch.save(torch.zeros(5), path),
    lambda path: torch.save(torch.full((5, 10, 4), torch.nan), path),
    lambda path: save_file({"v": torch.tensor(1.0)}, path),
    lambda path: save_file({"v": torch.zeros(5, 4)}, path),
    lambda path: save_file({"a": torch.zeros(5, 10, 4), "b": torch.zeros(5, 10, 4)}, path),
])
@pytest.mark.parametrize("name", ["v.pt", "v.safetensors"])
def test_damaged_feature_files(tmp_path, name, write):
    """One line that names the file, whether its frames are counted or read."""
    write(tmp_path / name)
    write_metadata(tmp_path, {"v": {"duration": 2.0, "path": name}})
    store = features.Store(tmp_path)
    errors = []
    for use in (lambda: store.rows("v"), lambda: store.read("v", 0, 3)):
        try:
            use()
        except BadData as error:
            errors.append(str(error))
    assert errors
    assert all(name in error and "\n" not in error for error in errors)


def test_a_mapped_file_is_not_read_whole(tmp_path):
    """If a hundredth of a 100 MB file is read, the process grows by much less than 100 MB."""
    pytest.importorskip("resource")
    torch.save(torch.zeros(2500, 10, 1000), tmp_path / "v.pt")
    write_metadata(tmp_path, {"v": {"duration": 1250, "path": "v.pt"}})
    code = """
import pathlib, resource, sys
sys.path.insert(0, sys.argv[1])
from support.files import features
store = features.Store(pathlib.Path(sys.argv[2]))
store.read("v", 0, 1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
x = store.read("v", 1000, 1025)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    process = subprocess.run([sys.executable, "-c", code, str(ROOT), str(tmp_path)],
                             capture_output=True, text=True)
    unit = 1 if sys.platform == "darwin" else 1024             # of ru_maxrss (bytes)
    assert int(process.stdout) * unit < 20e6, process.stderr


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool])
def test_a_store_takes_floating_point_only(tmp_path, dtype):
    """As stream.py: numbers of another kind are no features, and are not converted silently."""
    save_file({"x": torch.ones(5, 10, 8).to(dtype)}, tmp_path / "v.safetensors")
    write_metadata(tmp_path, {"v": {"duration": 2.5, "path": "v.safetensors"}})
    with pytest.raises(BadData, match="must be floating point"):
        features.Store(tmp_path).read("v", 0, 5)
