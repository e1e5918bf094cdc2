"""Feature files (§3.1): ranges are read, not files; encoding videos, killed and gone on with."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import data
from support import features
from support.common import BadData
from helpers import ROOT, TOY
from narrator import VisionEncoder


def store(root, path, saver):
    (root / "features_metadata.json").write_text(json.dumps({"v": {"duration": 9.5, "path": path}}))
    x = torch.arange(20.0)[:, None, None].expand(20, 10, 4).contiguous()
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    saver(x, root / path)
    return features.Store(root), x


@pytest.mark.parametrize("path, saver", [
    ("v.pt", torch.save), ("features/full_scale_2fps/v.pt", torch.save), ("v.safetensors", lambda x, p: save_file({"any": x}, p)),
    ("v.pt", lambda x, p: torch.save(x, p, _use_new_zipfile_serialization=False)), ("v.pt", lambda x, p: torch.save(x.bfloat16(), p))])
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


def test_a_mapped_file_is_not_read_whole(tmp_path):
    """Of a 100 MB file, the memory of this process grows by a hundredth when a hundredth is read."""
    resource = pytest.importorskip("resource")
    torch.save(torch.zeros(2500, 10, 1000), tmp_path / "v.pt")
    (tmp_path / "features_metadata.json").write_text(json.dumps({"v": {"duration": 1250, "path": "v.pt"}}))
    code = ("import sys, resource, pathlib; sys.path.insert(0, sys.argv[1]); import features\n"
            "s = features.Store(pathlib.Path(sys.argv[2])); s.read('v', 0, 1)\n"
            "a = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; x = s.read('v', 1000, 1025)\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - a)")
    run = subprocess.run([sys.executable, "-c", code, str(ROOT), str(tmp_path)], capture_output=True, text=True)
    grown = int(run.stdout) * (1 if sys.platform == "darwin" else 1024)
    assert resource and grown < 20e6, run.stderr


# ---------------------------------------------------------------------- encode

@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("videos")
    data.main(["toy", "--seed", "4", "--minutes", "0.2", "--count", "3", "--output", str(folder)])
    return sorted(map(str, folder.glob("*.mp4")))


def encode(videos, output, *more):
    data.main(["encode", *videos, "--output", str(output), "--vision", str(TOY / "vision"), "--device", "cpu", *more])


def test_encode_is_what_streaming_sees(videos, tmp_path):
    encode(videos, tmp_path / "features", "--batch", "7")
    vision, found = VisionEncoder(str(TOY / "vision")), features.Store(tmp_path)
    for video in videos:
        name = os.path.basename(video)[:-4]
        x = torch.cat([vision(torch.from_numpy(picture)[None]) for picture in data.Video(video, 2.0)])
        encoded = found.read(name, 0, None)
        assert encoded.shape == x.shape and found.entry(name)["duration"] == len(x) / 2
        assert torch.allclose(encoded, x, atol=0.02, rtol=0.02)                      # stored in bf16
        with safe_open(tmp_path / "features" / f"{name}.safetensors", "pt") as file:
            assert file.get_slice("features").get_dtype() == "BF16"


def test_killed_and_gone_on_with(videos, tmp_path):
    """kill -9 after the first video: no half file; the second run makes what the first would have made."""
    encode(videos, tmp_path / "whole")
    line = [sys.executable, str(ROOT / "data.py"), "encode", *videos, "--output", str(tmp_path / "killed"), "--vision",
            str(TOY / "vision"), "--device", "cpu", "--batch", "1"]
    process = subprocess.Popen(line, stderr=subprocess.DEVNULL)
    while process.poll() is None and not list((tmp_path / "killed").glob("*.safetensors")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = sorted((tmp_path / "killed").glob("*.safetensors"))
    stamps = [path.stat().st_mtime_ns for path in done]
    assert done and all(load_file(path) for path in done)
    encode(videos, tmp_path / "killed")
    assert [path.stat().st_mtime_ns for path in done] == stamps
    for path in (tmp_path / "whole").glob("*.safetensors"):
        assert torch.allclose(load_file(path)["features"].float(), load_file(tmp_path / "killed" / path.name)["features"].float(), atol=0.02, rtol=0.02)
    assert (tmp_path / "whole" / "features_metadata.json").read_text() == (tmp_path / "killed" / "features_metadata.json").read_text()


def test_shards_make_the_same(videos, tmp_path):
    for shard in ("1/2", "2/2"):
        encode(videos, tmp_path, "--shard", shard)
    assert len(json.loads((tmp_path / "features_metadata.json").read_text())) == 3
    for shard in ("3/2", "0/2", "x", "1"):
        with pytest.raises(BadData, match="--shard"):
            encode(videos, tmp_path, "--shard", shard)


def test_damaged_videos_are_listed(videos, tmp_path, capsys):
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"no video")
    with pytest.raises(BadData, match="1 of 2 videos could not be encoded"):
        encode([str(broken), videos[0]], tmp_path / "out")
    assert "broken.mp4" in capsys.readouterr().err
    assert list(json.loads((tmp_path / "out" / "features_metadata.json").read_text())) == [os.path.basename(videos[0])[:-4]]


def test_settings_and_names_must_agree(videos, tmp_path):
    encode(videos[:1], tmp_path)
    with pytest.raises(BadData, match="other settings"):
        encode(videos[:1], tmp_path, "--fps", "1")
    shutil.copy(videos[0], tmp_path / os.path.basename(videos[0]))
    with pytest.raises(BadData, match="two of the videos are named"):
        encode([videos[0], str(tmp_path / os.path.basename(videos[0]))], tmp_path / "x")


def test_encoded_videos_are_a_data_set(videos, tmp_path):
    """Our own features with raw annotations, up to the last half second: every sample can be read."""
    encode(videos, tmp_path / "features")
    found = features.Store(tmp_path)
    name = os.path.basename(videos[0])[:-4]
    end = found.entry(name)["duration"]
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "refined_train_narrations.json").write_text(json.dumps(
        {name: [{"time": 0.1, "text": "You look."}, {"time": end - 0.1, "text": "You sit."}, {"time": end, "text": "You stand."}]}))
    sample, = data.load_dataset("ek100", tmp_path, "train", shape=(10, 128))
    assert [frame for frame, _ in sample.narrations][1:] == [found.rows(name) - 3, found.rows(name) - 2]
    assert len(sample.read(0, sample.num_frames)) == sample.num_frames == found.rows(name) - 1
