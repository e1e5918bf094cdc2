"""support/files/features.py: feature files read whole or by range, pictures encoded, metadata checked."""
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


def test_features_and_videos_are_distinguished():
    for spec in ("a.safetensors", "a.safetensors:b", r"C:\x\a.safetensors", r"C:\x\a.safetensors:b:c", "a.PT",
                 "/x.y/a.pt"):
        assert is_features(spec), spec
    for spec in ("a.mp4", r"C:\x\a.mp4", "pt", "a.pt.mp4", "a.safetensors.mkv", "safetensors:b.mp4", "a.pth"):
        assert not is_features(spec), spec


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_features_are_loaded_as_stored(tmp_path, dtype):
    x, y = torch.randn(5, 10, 8).to(dtype), torch.randn(3, 10, 8).to(dtype)
    save_file({"x": x}, tmp_path / "one.safetensors")
    save_file({"x": x, "y:z": y}, tmp_path / "two.safetensors")
    torch.save(x, tmp_path / "x.pt")
    for spec, expected in {"one.safetensors": x, "one.safetensors:x": x, "two.safetensors:y:z": y, "x.pt": x}.items():
        loaded = load_features(str(tmp_path / spec), tokens=10, width=8)
        assert loaded.dtype == dtype and torch.equal(loaded, expected)


def test_features_that_cannot_be_used_are_named(tmp_path):
    x = torch.randn(5, 10, 8)
    bad = {"rank": x[0].clone(), "zero": x[:0].clone(), "whole": x.int(),
           "nan": x.clone().index_fill_(0, torch.tensor(2), float("nan")),
           "inf": x.half() * 1e9}
    save_file({"x": x, **bad}, tmp_path / "many.safetensors")
    save_file({}, tmp_path / "none.safetensors")
    torch.save({"x": x}, tmp_path / "dict.pt")
    torch.save(x.to_sparse(), tmp_path / "sparse.pt")
    torch.save(x.to("meta"), tmp_path / "meta.pt")
    torch.save(x, tmp_path / "cut.pt")
    for name in ("many.safetensors", "cut.pt"):
        content = (tmp_path / name).read_bytes()
        (tmp_path / f"cut.{name.split('.')[1]}").write_bytes(content[:len(content) // 2])
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "empty.pt").touch()
    torch.save(subprocess.Popen, tmp_path / "code.pt")             # a pickle that wants more than tensors
    many = "many.safetensors"
    cases = {"gone.pt": "no such file", "gone.safetensors:x": "no such file", "a.mp4": "features are",
             many: r"holds 6 tensors.*inf, nan, rank.*\.\.\.", "none.safetensors": "holds 0 tensors",
             f"{many}:w": "no tensor 'w'.*inf, nan", f"{many}:": "no tensor ''",
             f"{many}:rank": r"not \[10, 8\]", f"{many}:zero": r"not \[0, 10, 8\]",
             f"{many}:whole": "floating point, not int32", f"{many}:nan": "NaN", f"{many}:inf": "infinite",
             "dict.pt": "holds a dict", "sparse.pt": "sparse or an empty", "meta.pt": "sparse or an empty",
             "code.pt": "no plain tensor", "cut.safetensors": "damaged", "cut.pt": "damaged",
             "text.pt": "damaged", "empty.pt": "damaged"}
    for spec, message in cases.items():
        with pytest.raises(BadData, match=message) as raised:
            load_features(str(tmp_path / spec))
        assert "\n" not in str(raised.value)
    for wanted, message in (({"tokens": 5}, "10 tokens per frame.* 5"), ({"width": 1024}, "8 wide.* 1024")):
        with pytest.raises(BadData, match=message):
            load_features(f"{tmp_path}/many.safetensors:x", **wanted)


# ---------------------------------------------------------------------- a data set's features

def store(root, path, saver):
    (root / "features_metadata.json").write_text(json.dumps({"v": {"duration": 9.5, "path": path}}))
    x = torch.arange(20.0)[:, None, None].expand(20, 10, 4).contiguous()
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    saver(x, root / path)
    return features.Store(root), x


@pytest.mark.parametrize("path, saver", [
    ("v.pt", torch.save), ("features/full_scale_2fps/v.pt", torch.save),
    ("v.safetensors", lambda x, p: save_file({"any": x}, p)),
    ("v.pt", lambda x, p: torch.save(x, p, _use_new_zipfile_serialization=False)),
    ("v.pt", lambda x, p: torch.save(x.bfloat16(), p))])
def test_a_range_of_frames(tmp_path, path, saver):
    found, x = store(tmp_path, path, saver)
    assert torch.equal(found.read("v", 3, 7), x[3:7]) and found.rows("v") == 20
    with pytest.raises(BadData, match="20 frames"):
        found.read("v", 18, 23)


def test_published_folders(tmp_path):
    """The file lies in features/SOME_LONG_NAME/, the metadata above it names it alone."""
    (tmp_path / "features" / "videos_2fps_max384").mkdir(parents=True)
    torch.save(torch.ones(5, 10, 4), tmp_path / "features" / "videos_2fps_max384" / "v.pt")
    (tmp_path / "features_metadata.json").write_text(json.dumps({"v": {"duration": 2.0, "path": "v.pt"}}))
    assert features.Store(tmp_path).read("v", 1, 4).shape == (3, 10, 4)


def test_a_look_up_does_not_list_the_folder(tmp_path, monkeypatch):
    """Folders are listed when the store is made; finding a file among thousands then takes no further listing."""
    folder = tmp_path / "features" / "videos_2fps_max384"
    folder.mkdir(parents=True)
    names = [f"v{n}" for n in range(3000)]
    for name in names:
        (folder / f"{name}.pt").touch()
    metadata = {name: {"duration": 2.0, "path": f"{name}.pt"} for name in names}
    (tmp_path / "features_metadata.json").write_text(json.dumps(metadata))
    listed = []
    for module, function in ((os, "scandir"), (os, "listdir")):
        real = getattr(module, function)
        monkeypatch.setattr(module, function, lambda *a, real=real: listed.append(a) or real(*a))
    found = features.Store(tmp_path)
    assert 0 < len(listed) <= 3
    listed.clear()
    assert all(found.locate(name) == (folder / f"{name}.pt", None) for name in names) and not listed


def test_encode_pictures():
    """As one by one, whatever the batch; a picture that stays (the same array, not merely an equal one) only once."""
    a, b, c = (np.full((4, 6, 3), k, np.uint8) for k in (1, 2, 3))
    pictures, encoded = [a, a, a, a, b, b, c, a, a.copy()], []

    def vision(frames):
        encoded.extend(frames[:, 0, 0, 0].tolist())
        return frames[:, :1, :2].float()                              # [B, J = 1, D...]

    for batch in (1, 2, 3, 20):
        encoded.clear()
        found = list(features.encode_pictures(iter(pictures), vision, batch))
        assert [int(x.flatten()[0]) for x in found] == [1, 1, 1, 1, 2, 2, 3, 1, 1] and encoded == [1, 2, 3, 1, 1]
    assert list(features.encode_pictures([], vision)) == []


@pytest.mark.parametrize("entry, says", [
    ({"duration": "x"}, '"duration"'), ({"duration": float("nan")}, '"duration"'), ({"duration": -1}, '"duration"'),
    ({"duration": 0}, '"duration"'), ({"duration": True}, '"duration"'), ({"duration": 10 ** 400}, '"duration"'),
    ({"duration": None}, '"duration"'), ({"frames": 0}, '"frames"'), ({"frames": "x"}, '"frames"'),
    ({"frames": 2.5}, '"frames"'),
    ({"frames": -3}, '"frames"'), ({"path": 3}, '"path"'), ({"path": ""}, '"path"'), ({"path": "."}, '"path"'),
    ({"path": "../v.pt"}, '"path"'), ({"path": "a/../../v.pt"}, '"path"'), ({"path": "/etc/passwd"}, '"path"'),
    ({"path": ".."}, '"path"')])
def test_invalid_metadata(tmp_path, entry, says):
    """Named in one line; no path leads out of the data set's folder, though the file that it names is there."""
    (tmp_path / "root").mkdir()
    torch.save(torch.ones(5, 10, 4), tmp_path / "v.pt")
    entry = {"duration": 2.0, "path": "v.pt"} | entry
    (tmp_path / "root" / "features_metadata.json").write_text(json.dumps({"v": entry}))
    with pytest.raises(BadData, match=f"features_metadata.json, video v: {says}") as error:
        features.Store(tmp_path / "root").locate("v")
    assert "\n" not in str(error.value)


def test_the_name_of_a_video_leads_nowhere(tmp_path):
    (tmp_path / "root").mkdir()
    torch.save(torch.ones(5, 10, 4), tmp_path / "ESCAPED.pt")
    entry = {"duration": 2.0, "path": "x.pt"}
    (tmp_path / "root" / "features_metadata.json").write_text(json.dumps({"../ESCAPED": entry}))
    with pytest.raises(BadData, match="are not there"):
        features.Store(tmp_path / "root").read("../ESCAPED", 0, 1)


@pytest.mark.parametrize("write", [
    lambda path: path.write_bytes(b"x" * 50), lambda path: path.write_bytes(b""),
    lambda path: torch.save({"v": 1}, path),
    lambda path: torch.save(torch.zeros(5), path), lambda path: torch.save(torch.full((5, 10, 4), torch.nan), path),
    lambda path: save_file({"v": torch.tensor(1.0)}, path), lambda path: save_file({"v": torch.zeros(5, 4)}, path),
    lambda path: save_file({"a": torch.zeros(5, 10, 4), "b": torch.zeros(5, 10, 4)}, path)])
@pytest.mark.parametrize("name", ["v.pt", "v.safetensors"])
def test_damaged_feature_files(tmp_path, name, write):
    """One line that names the file, whether its frames are counted or read."""
    write(tmp_path / name)
    (tmp_path / "features_metadata.json").write_text(json.dumps({"v": {"duration": 2.0, "path": name}}))
    found, errors = features.Store(tmp_path), []
    for use in (lambda: found.rows("v"), lambda: found.read("v", 0, 3)):
        try:
            use()
        except BadData as error:
            errors.append(str(error))
    assert errors and all(name in error and "\n" not in error for error in errors)


def test_a_mapped_file_is_not_read_whole(tmp_path):
    """Of a 100 MB file, the memory of this process grows by a hundredth when a hundredth is read."""
    resource = pytest.importorskip("resource")
    torch.save(torch.zeros(2500, 10, 1000), tmp_path / "v.pt")
    (tmp_path / "features_metadata.json").write_text(json.dumps({"v": {"duration": 1250, "path": "v.pt"}}))
    code = ("import sys, resource, pathlib; sys.path.insert(0, sys.argv[1]); from support.files import features\n"
            "s = features.Store(pathlib.Path(sys.argv[2])); s.read('v', 0, 1)\n"
            "a = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; x = s.read('v', 1000, 1025)\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - a)")
    run = subprocess.run([sys.executable, "-c", code, str(ROOT), str(tmp_path)], capture_output=True, text=True)
    grown = int(run.stdout) * (1 if sys.platform == "darwin" else 1024)
    assert resource and grown < 20e6, run.stderr


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool])
def test_a_store_takes_floating_point_only(tmp_path, dtype):
    """As stream.py: numbers of another kind are no features, and are not made some silently."""
    save_file({"x": torch.ones(5, 10, 8).to(dtype)}, tmp_path / "v.safetensors")
    (tmp_path / "features_metadata.json").write_text(json.dumps({"v": {"duration": 2.5, "path": "v.safetensors"}}))
    with pytest.raises(BadData, match="must be floating point"):
        features.Store(tmp_path).read("v", 0, 5)
