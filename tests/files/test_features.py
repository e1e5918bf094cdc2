"""Feature files read whole or by range, pictures encoded, metadata checked."""
import json
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from helpers import resident_bytes
from narrator import Config
from support.common.errors import BadData
from support.files import features
from support.files.features import load_features
from support.files.sources import source_of

def test_features_and_videos_are_distinguished():
    for spec in ("a.safetensors", r"C:\x\a.safetensors", "a.safetensors:b:c", "a.PT"):
        assert source_of(spec).kind == "features", spec
    for spec in ("a.mp4", "pt", "a.pt.mp4", "a.safetensors.mkv", "safetensors:b.mp4", "a.pth"):
        assert source_of(spec).kind == "video", spec


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_are_loaded_as_stored(tmp_path, dtype):
    x = torch.randn(5, 10, 16).to(dtype)
    other = torch.randn(3, 10, 16).to(dtype)
    save_file({"x": x}, tmp_path / "one.safetensors")
    save_file({"x": x, "y:z": other}, tmp_path / "two.safetensors")
    torch.save(x, tmp_path / "x.pt")
    for spec, tensor in (("one.safetensors", x), ("one.safetensors:x", x), ("x.pt", x),
                         ("two.safetensors:y:z", other)):
        source = source_of(str(tmp_path / spec))
        loaded = load_features(source, Config(width=16))
        assert loaded.dtype == dtype and torch.equal(loaded, tensor)
        for wanted in ({"grid": 2, "width": 16}, {"width": 1024}):
            with pytest.raises(BadData, match="are 16 wide with 10 tokens a frame, .* needs"):
                load_features(source, Config(**wanted))


def test_what_features_say_of_themselves(tmp_path):
    path = tmp_path / "a.safetensors"
    ours = {"vision": "hub/siglip", "grid": "3", "fps": "2.0", "duration": "2.5"}
    for header, vision, message in (
            (ours, "hub/siglip", None),
            ({"fps": "4"}, "hub/siglip", None),
            (ours | {"fps": "4.0"}, "hub/siglip", "has 4 frames a second, the narrator needs 2"),
            (ours, "/models/siglip", None),
            (ours, "/models/dinov2", "they are of hub/siglip, .* through /models/dinov2; encode")):
        save_file({"features": torch.ones(5, 10, 16)}, path, header)
        with pytest.raises(BadData, match=message) if message else nullcontext():
            load_features(source_of(str(path)), Config(width=16, vision=vision))
    write_metadata(tmp_path, {"v": {"duration": 2.0, "path": "a.safetensors"}})
    assert features.Store(tmp_path, {}).find("v").header == ours


@pytest.fixture(scope="module")
def bad_features(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    x = torch.randn(5, 10, 8)
    with_nan = x.clone()
    with_nan[2] = float("nan")
    tensors = {"x": x, "rank": x[0].clone(), "zero": x[:0].clone(), "whole": x.int(),
               "nan": with_nan, "inf": x.half() * 1e9}
    save_file(tensors, folder / "many.safetensors")
    save_file({}, folder / "none.safetensors")
    torch.save({"x": x}, folder / "dict.pt")
    torch.save(with_nan, folder / "nan.pt")
    torch.save(x, folder / "cut.pt")
    for complete, cut in (("many.safetensors", "cut.safetensors"), ("cut.pt", "cut.pt")):
        content = (folder / complete).read_bytes()
        (folder / cut).write_bytes(content[:len(content) // 2])
    (folder / "text.pt").write_text("hello")
    # a pickle that needs more than tensors
    torch.save(subprocess.Popen, folder / "code.pt")
    return folder


@pytest.mark.parametrize("spec, message", [
    ("gone.pt", "no such file"),
    ("many.safetensors", "holds 6 tensors; give FILE:NAME, of inf, nan, rank"),
    ("none.safetensors", "holds 0 tensors"),
    ("many.safetensors:w", "holds 6 tensors; give FILE:NAME"),
    ("many.safetensors:rank", r"must be \[frames, tokens, width\] .* not \[10, 8\]"),
    ("many.safetensors:zero", r"none of them 0, not \[0, 10, 8\]"),
    ("many.safetensors:whole", r"floating point, .* not \[5, 10, 8\] in torch.int32"),
    ("many.safetensors:nan", "NaN"),
    ("many.safetensors:inf", "infinite"),
    ("nan.pt", "NaN"),
    *((name, "cannot be read as features .*what is read is .safetensors, or .pt with one tensor")
      for name in ("code.pt", "cut.safetensors", "cut.pt", "text.pt", "dict.pt")),
])
def test_features_that_cannot_be_used_are_named(bad_features, spec, message):
    with pytest.raises(BadData, match=message) as error:
        load_features(source_of(str(bad_features / spec)), Config())
    assert "\n" not in str(error.value)
    if "gone" not in spec and "many" not in spec:
        write_metadata(bad_features, {"v": {"duration": 2.5, "path": spec}})
        with pytest.raises(BadData, match=message):
            features.Store(bad_features, {}).find("v").read(0, 5)


def write_metadata(root, entries):
    (root / "features_metadata.json").write_text(json.dumps(entries))


@pytest.mark.parametrize("path, name, save", [
    ("features/full_scale_2fps/v.pt", "features/full_scale_2fps/v.pt", torch.save),
    ("features/videos_2fps_max384/v.pt", "v.pt", torch.save),          # as published
    ("features/v.safetensors", "v.safetensors", lambda x, path: save_file({"any": x}, path)),
])
def test_a_range_of_frames(tmp_path, path, name, save):
    write_metadata(tmp_path, {"v": {"duration": 9.5, "path": name}})
    x = (torch.arange(20.0) % 8)[:, None, None].expand(20, 10, 4).contiguous()
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    save(x, tmp_path / path)
    store = features.Store(tmp_path, {})
    assert store.find("w") is None
    found = store.find("v")
    assert torch.equal(found.read(3, 7), x[3:7])
    assert (found.shape, found.duration) == ((20, 10, 4), 9.5)
    with pytest.raises(BadData, match="ends at frame 20, its annotations need 23"):
        found.read(18, 23)
    (tmp_path / "features/other").mkdir(parents=True)
    save(x, tmp_path / "features/other" / Path(path).name)
    if path != name:                           # which one it is cannot be known
        with pytest.raises(BadData, match=" and .*: which of them is meant by v"):
            features.Store(tmp_path, {}).find("v")
    encoded = tmp_path / "features/v.safetensors"
    if not encoded.exists():                   # nor whether what was encoded since then is meant
        (tmp_path / "features/other" / Path(path).name).rename(encoded)
        with pytest.raises(BadData, match=" and .*: which of them is meant by .*v.pt"):
            features.Store(tmp_path, {}).find("v")
        encoded.unlink()
    (tmp_path / path).unlink()
    write_metadata(tmp_path, {"v": {"duration": 9.5, "path": f"elsewhere/{name}"}})
    assert features.Store(tmp_path, {}).find("v") is None


def test_invalid_metadata(tmp_path):
    for entry in (3, {"duration": 2.0, "path": 3}, {"duration": 0, "path": "v.pt"},
                  {"duration": "2", "path": "v.pt"}, {"duration": 1e300, "path": "v.pt"}):
        write_metadata(tmp_path, {"v": entry})
        with pytest.raises(BadData, match="features_metadata.json: expected .*duration"):
            features.Store(tmp_path, {})


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux")
def test_a_file_is_not_read_whole(tmp_path):
    torch.save(torch.zeros(1000, 10, 1000), tmp_path / "v.pt")
    found = features.Features(tmp_path / "v.pt", 500)
    found.read(0, 1)
    before = resident_bytes()
    found.read(500, 510)
    assert resident_bytes() - before < 10e6


@pytest.mark.parametrize("duration, rows, fits", [
    (20, 37, True), (20, 36, False), (20, 46, False),
    (3600, 7093, True), (3600, 6985, False)])              # in a long video they may differ by 2 %
def test_rows_are_compared_with_the_duration(tmp_path, duration, rows, fits):
    torch.save(torch.zeros(rows, 10, 1), tmp_path / "v.pt")
    of_video = features.Features(tmp_path / "v.pt", duration)
    if fits:
        assert of_video.shape == (rows, 10, 1)
        return
    with pytest.raises(BadData, match=f"has {rows} rows, .* {duration} s .* are needed"):
        of_video.read(0, 1)
