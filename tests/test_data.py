"""data.py: samples of the toy and of files, encoding, and the command line."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import data
from commands import data as data_command
from data import read_sample
from helpers import ROOT, TOY
from narrator import VisionEncoder
from support.common.errors import BadData
from support.files import encoding
from support.files.features import Store
from support.files.tracks import time_of
from support.files.video import Video, write_video
from toy import world


# ---------------------------------------------------------------------- samples


@pytest.mark.parametrize("fps", [2, 2.5, 8, 30000 / 1001])
def test_time_and_frame_are_inverse(fps):
    for frame in range(20_000):
        assert data.frame_at(time_of(frame, fps), fps) == frame


@pytest.mark.parametrize("time, frame", [(0, 0), (0.5, 0), (0.51, 1), (1, 1)])
def test_a_frame_covers_the_time_up_to_its_end(time, frame):
    assert data.frame_at(time, fps=2) == frame


def test_toy_round_trip_through_files(tmp_path):
    written = data_command.write_toy(3, 0.4, tmp_path / "k.mp4")
    read = read_sample(tmp_path / "k.json")
    assert (read.name, read.fps, read.num_frames) == ("k", 2, written.num_frames)
    assert read.narrations == written.narrations and len(read.narrations) > 3
    assert read.memory_words == written.memory_words
    assert abs(read.num_frames / 2 - 24) < 6
    assert sorted(os.listdir(tmp_path)) == ["k.json", "k.mp4"]


def test_toy_pictures_of_files_are_in_step(tmp_path):
    """The video is lossy, but each picture is closest to the one of the same frame."""
    written = list(data_command.write_toy(3, 0.4, tmp_path / "k.mp4").frames())
    read = [picture.astype(int) for picture in read_sample(tmp_path / "k.json").frames()]
    differences = [np.abs(a - b).mean() for a, b in zip(read, written, strict=True)]
    shifted = [np.abs(a - b).mean() for a, b in zip(read[1:], written)]
    assert max(differences) < 12
    assert np.mean(differences) < np.mean(shifted)


def test_an_interrupted_toy_leaves_no_ground_truth(tmp_path, monkeypatch):
    def stop(self, frame):
        raise KeyboardInterrupt
    monkeypatch.setattr(data.world.Kitchen, "render", stop)
    with pytest.raises(KeyboardInterrupt):
        data_command.write_toy(3, 0.2, tmp_path / "k.mp4")
    assert os.listdir(tmp_path) == []


GOOD = {"video": "v.mp4", "fps": 2, "duration": 10,
        "narrations": [{"time": 0.5, "text": "You look."}]}


def described(folder: Path, **changes) -> Path:
    """A .json file that describes v.mp4; a field that is changed to ... is left out."""
    content = {key: value for key, value in (GOOD | changes).items() if value is not ...}
    path = folder / "v.json"
    path.write_text(json.dumps(content))
    return path


def test_two_narrations_on_one_frame_the_later_stays(tmp_path):
    """Later in time; at the same time, later in the file."""
    rows = [{"time": 3.4, "text": "c", "memory": ["x"]}, {"time": 1.0, "text": "b"},
            {"time": 0.9, "text": "a"}, {"time": 3.4, "text": "d"}]
    sample = read_sample(described(tmp_path, narrations=rows))
    assert sample.narrations == [(1, "b"), (6, "d")]
    assert sample.memory_words == [(), ()]
    assert (sample.num_frames, sample.duration) == (20, 10)


@pytest.fixture
def four_narrations(tmp_path):
    """A file that describes 20 frames, with narrations on frames 0, 5, 12 and 17."""
    rows = [{"time": time, "text": "x", "memory": ["x"]} for time in (0.5, 3, 6.5, 9)]
    return described(tmp_path, narrations=rows)


@pytest.mark.parametrize("max_frames, narrations, frames", [
    (None, 4, 20), (20, 4, 20), (19, 4, 18), (18, 4, 18), (17, 3, 13), (13, 3, 13), (12, 2, 6),
    (1, 1, 1),
])
def test_shorten(four_narrations, max_frames, narrations, frames):
    """At most so many frames, up to the last narration that fits."""
    short = data.shorten(read_sample(four_narrations), max_frames)
    assert len(short.narrations) == len(short.memory_words) == narrations
    assert (short.num_frames, short.duration) == (frames, 10)


def test_samples_of_files_are_shortened(four_narrations):
    folder = four_narrations.parent
    pictures = (np.full((32, 48, 3), 10 * k, np.uint8) for k in range(20))
    write_video(folder / "v.mp4", pictures, 2)
    short = data.shorten(read_sample(four_narrations), 7)
    assert [round(picture.mean() / 10) for picture in short.frames()] == list(range(6))
    whole, = data.load_dataset("toy", folder)
    short, = data.load_dataset("toy", folder, max_frames=14)
    streamed, = data.load_dataset("toy", folder, max_frames=14, streaming=True)
    assert (whole.num_frames, short.num_frames, streamed.num_frames) == (20, 13, 20)


def one_narration(**fields):
    return {"narrations": [{"time": 1, "text": "x"} | fields]}


@pytest.mark.parametrize("changes, message", [
    ({"video": ...}, '"video"'),
    ({"video": 3}, '"video"'),
    ({"fps": 0}, '"fps"'),
    ({"fps": "2"}, '"fps"'),
    ({"fps": True}, '"fps"'),
    ({"duration": ...}, '"duration"'),
    ({"duration": "x"}, '"duration"'),
    ({"duration": 10 ** 400}, '"duration"'),
    ({"duration": float("nan")}, '"duration"'),
    ({"narrations": {}}, '"narrations"'),
    ({"narrations": ["x"]}, r"narrations\[0\] must be an object"),
    ({"narrations": [{"time": 1}]}, r'narrations\[0\]: "text"'),
    ({"narrations": [{"time": 1, "text": "x"}, {"text": "x"}]}, r'narrations\[1\]: "time"'),
    (one_narration(time=-1), r'narrations\[0\]: "time"'),
    (one_narration(time=10.2), r"narrations\[0\]: 10.2 s is after the end"),
    (one_narration(text=" "), r'narrations\[0\]: "text"'),
    (one_narration(memory="cup"), r'narrations\[0\]: "memory"'),
    (one_narration(memory=[1]), r'narrations\[0\]: "memory"'),
])
def test_malformed_ground_truth_is_named(tmp_path, changes, message):
    with pytest.raises(BadData, match=r"v\.json: .*" + message):
        read_sample(described(tmp_path, **changes))


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[]", b"3"])
def test_ground_truth_that_is_no_json(tmp_path, content):
    (tmp_path / "v.json").write_bytes(content)
    with pytest.raises(BadData, match=r"v\.json"):
        read_sample(tmp_path / "v.json")


def test_ground_truth_that_is_missing_or_lacks_its_video(tmp_path):
    with pytest.raises(BadData, match="cannot be read"):
        read_sample(tmp_path / "gone.json")
    sample = read_sample(described(tmp_path))
    with pytest.raises(BadData, match=r"v\.mp4: no such file"):
        next(sample.frames())
    pictures = (np.full((32, 48, 3), k, np.uint8) for k in range(15))
    write_video(tmp_path / "v.mp4", pictures, 2)
    with pytest.raises(BadData, match="has 15 frames, its .json promises 20"):
        list(sample.frames())


def test_toy_samples_are_the_kitchens():
    samples = list(data.load_dataset("toy", split="test", limit=3))
    for sample, (seed, kitchen) in zip(samples, world.kitchens("test", 3), strict=True):
        assert sample.name == f"toy-{seed}"
        assert sample.narrations == [(n.frame, n.text) for n in kitchen.narrations]
        assert sample.memory_words == [n.memory_words for n in kitchen.narrations]
        assert sample.duration == sample.num_frames / 2
        pictures = list(sample.frames())
        assert len(pictures) == len(kitchen)
        assert np.array_equal(pictures[0], kitchen.render(0))


def test_load_dataset(tmp_path):
    (tmp_path / "test").mkdir()
    for name in ("b", "a", "test/c"):
        data_command.write_toy(5, 0.1, tmp_path / f"{name}.mp4")
    assert [sample.name for sample in data.load_dataset("toy", tmp_path)] == ["a", "b"]
    assert [sample.name for sample in data.load_dataset("toy", tmp_path, limit=1)] == ["a"]
    assert [sample.name for sample in data.load_dataset("toy", tmp_path, "test")] == ["c"]


def test_load_another_world():
    night, = data.load_dataset("toy", limit=1, variant="night")
    (_, kitchen), = world.kitchens("val", 1)
    assert [text for _, text in night.narrations] == [n.text for n in kitchen.narrations]
    assert night.num_frames == len(kitchen) + 240


@pytest.mark.parametrize("name, settings, message", [
    ("ek100", {}, "--data toy"),
    ("ego5d", {}, "choose one of toy, ego4d"),
    ("toy", {"split": "dev"}, "unknown split"),
    ("toy", {"limit": 0}, "limit"),
    ("toy", {"max_frames": 0}, "limit"),
    ("toy", {"variant": "noon"}, "choose one of plain, idle"),
    ("toy", {"root": ".", "variant": "idle"}, "without --root"),
    ("ek100", {"variant": "idle"}, "toy's rendered"),
    ("toy", {"root": "."}, "no .json"),
    ("toy", {"root": "gone"}, "no such folder"),
])
def test_data_sets_that_cannot_be_loaded(tmp_path, monkeypatch, name, settings, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadData, match=message):
        data.load_dataset(name, **settings)


# ---------------------------------------------------------------------- encode


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("videos")
    data_command.run(["toy", "--seed", "4", "--minutes", "0.2", "--count", "3",
                      "--output", str(folder)])
    return sorted(map(str, folder.glob("*.mp4")))


def encode_arguments(videos, output, *options):
    return ["encode", *videos, "--output", str(output), "--vision", str(TOY / "vision"),
            "--device", "cpu", *options]


def encode(videos, output, *options):
    data_command.run(encode_arguments(videos, output, *options))


def test_encode_is_what_streaming_sees(videos, tmp_path):
    encode(videos, tmp_path / "features", "--batch", "7")
    vision = VisionEncoder(str(TOY / "vision"))
    store = Store(tmp_path)
    for video in videos:
        name = Path(video).stem
        tokens = [vision(torch.from_numpy(picture)[None]) for picture in Video(video, 2.0)]
        x = torch.cat(tokens)                  # [T, J, D]
        encoded = store.read(name, 0, None)
        assert store.entry(name)["duration"] == len(x) / 2
        assert encoded.shape == x.shape
        assert torch.allclose(encoded, x, atol=0.02, rtol=0.02)            # stored in bf16
        with safe_open(tmp_path / "features" / f"{name}.safetensors", "pt") as file:
            assert file.get_slice("features").get_dtype() == "BF16"


def test_encode_resumes_after_a_kill(videos, tmp_path):
    """kill -9 after the first video leaves no half file. The second run makes what the first one
    would have made.
    """
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    encode(videos, whole)
    line = [sys.executable, str(ROOT / "data.py"),
            *encode_arguments(videos, killed, "--batch", "1")]
    process = subprocess.Popen(line, stderr=subprocess.DEVNULL)
    while process.poll() is None and not list(killed.glob("*.safetensors")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = sorted(killed.glob("*.safetensors"))
    times = [path.stat().st_mtime_ns for path in finished]
    assert finished and all(load_file(path) for path in finished)

    encode(videos, killed)
    assert [path.stat().st_mtime_ns for path in finished] == times
    for path in whole.glob("*.safetensors"):
        expected = load_file(path)["features"].float()
        resumed = load_file(killed / path.name)["features"].float()
        assert torch.allclose(resumed, expected, atol=0.02, rtol=0.02)
    metadata = "features_metadata.json"
    assert (killed / metadata).read_text() == (whole / metadata).read_text()


def test_shards_make_the_same(videos, tmp_path):
    for shard in ("1/2", "2/2"):
        encode(videos, tmp_path, "--shard", shard)
    assert len(json.loads((tmp_path / "features_metadata.json").read_text())) == 3


def feature_file(path, frames=4):
    x = torch.zeros(frames, 10, 8)
    save_file({"features": x}, path, metadata={"duration": str(frames / 2)})


def test_metadata_of_processes_that_end_at_once(tmp_path):
    """One process has seen one file, and is slow to write. Meanwhile another one adds its file and
    writes.
    """
    feature_file(tmp_path / "a.safetensors")
    slow_process = """
import pathlib, sys, time
sys.path.insert(0, sys.argv[1])
from support.files import encoding
folder = pathlib.Path(sys.argv[2])
write = encoding.write_json
def wait(path, content):
    (folder / "looked").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    write(path, content)
encoding.write_json = wait
encoding.write_metadata(folder)
"""
    process = subprocess.Popen([sys.executable, "-c", slow_process, str(ROOT), str(tmp_path)])
    try:
        while not (tmp_path / "looked").exists():
            assert process.poll() is None
            time.sleep(0.01)
        feature_file(tmp_path / "b.safetensors", 6)
        encoding.write_metadata(tmp_path)
        (tmp_path / "go").touch()
        assert process.wait(60) == 0
    finally:
        process.kill()
    entries = json.loads((tmp_path / "features_metadata.json").read_text())
    assert entries == {"a": {"duration": 2.0, "path": "a.safetensors", "frames": 4},
                       "b": {"duration": 3.0, "path": "b.safetensors", "frames": 6}}


def test_damaged_videos_are_listed(videos, tmp_path, capsys):
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"no video")
    with pytest.raises(BadData, match="1 of 2 videos could not be encoded"):
        encode([str(broken), videos[0]], tmp_path / "out")
    assert "broken.mp4" in capsys.readouterr().err
    entries = json.loads((tmp_path / "out" / "features_metadata.json").read_text())
    assert list(entries) == [os.path.basename(videos[0])[:-4]]


def test_settings_and_names_must_agree(videos, tmp_path):
    """Features of two settings are not mixed in one folder, nor two videos of one name."""
    encode(videos[:1], tmp_path)
    with pytest.raises(BadData, match="other settings"):
        encode(videos[1:], tmp_path, "--fps", "1")
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    copy = shutil.copy(videos[0], tmp_path)
    with pytest.raises(BadData, match="2 of the videos are named"):
        encode([videos[0], str(copy)], tmp_path / "x")


@pytest.mark.parametrize("content", [b"", b"x" * 50, None])
def test_encode_beside_a_damaged_file(videos, tmp_path, content):
    """Named at once, before any video is encoded. None: a complete file of another program, which
    nobody is told to delete."""
    file = tmp_path / "x.safetensors"
    if content is None:
        save_file({"weights": torch.zeros(2)}, file)
    else:
        file.write_bytes(content)
    message = r"x\.safetensors: is damaged, or was not written.*; delete it"
    if content is None:
        message = r"x\.safetensors: was not written by data\.py encode; choose another --output"
    with pytest.raises(BadData, match=message) as error:
        encode(videos[:1], tmp_path)
    assert "\n" not in str(error.value)
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_another_video_of_the_same_name_is_refused(videos, tmp_path):
    """Features count as finished only if they were made of this video."""
    encode(videos[:1], tmp_path / "features")
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / Path(videos[0]).name
    write_video(other, [np.zeros((32, 32, 3), np.uint8)] * 3, 2.0)
    message = "was made of another video than .*other.*; delete it, or choose another"
    with pytest.raises(BadData, match=message):
        encode([str(other)], tmp_path / "features")


def test_toy_videos_of_another_length_or_world_are_refused(tmp_path):
    line = ["toy", "--seed", "4", "--count", "2", "--output", str(tmp_path / "toys")]
    data_command.run([*line, "--minutes", "0.1"])
    data_command.run([*line, "--minutes", "0.1"])
    message = r"toy-0000004\.mp4: is another video, or of another length or world; delete it"
    for other in (["--minutes", "0.3"], ["--minutes", "0.1", "--world", "hard"]):
        with pytest.raises(BadData, match=message):
            data_command.run([*line, *other])


def test_encode_reads_large_pictures_scaled(tmp_path, monkeypatch):
    """No picture is larger than twice what the vision model looks at. A picture that stands still
    is encoded once.
    """
    pictures = [np.full((300, 400, 3), k, np.uint8) for k in (20, 120, 220)]
    write_video(tmp_path / "v.mp4", pictures, 0.5)             # each picture lasts four frames
    shapes = []
    forward = VisionEncoder.forward

    def recorded(self, x):
        shapes.append(tuple(x.shape))
        return forward(self, x)

    monkeypatch.setattr(VisionEncoder, "forward", recorded)
    encode([str(tmp_path / "v.mp4")], tmp_path / "out", "--batch", "5")
    # frames 0 to 4 have two new pictures, 5 to 9 one, 10 and 11 none
    assert shapes == [(2, 144, 192, 3), (1, 144, 192, 3)]
    x = load_file(tmp_path / "out" / "v.safetensors")["features"]
    assert len(x) == 12
    assert torch.equal(x[0], x[3]) and torch.equal(x[4], x[7]) and not torch.equal(x[3], x[4])


def test_features_of_another_rate_are_refused(videos, tmp_path):
    """Narrations would get the pictures of another time."""
    encode(videos[:1], tmp_path / "features", "--fps", "4")
    name = Path(videos[0]).stem
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "refined_train_narrations.json").write_text(
        json.dumps({name: [{"time": 0.5, "text": "You look."}]}))
    with pytest.raises(BadData, match="was encoded with 4 frames a second, and 2 are needed"):
        list(data.load_dataset("ek100", tmp_path, "train"))


def test_encoded_videos_beside_published_features(videos, tmp_path):
    """Entries of the published index stay, and videos of both indices are found."""
    features = tmp_path / "features"
    features.mkdir()
    torch.save(torch.ones(5, 10, 128), features / "a.pt")
    published = {"a": {"duration": 2.0, "path": "a.pt"}}
    (features / "features_metadata.json").write_text(json.dumps(published))
    torch.save(torch.ones(7, 10, 128), features / "b.pt")
    published = {"b": {"duration": 3.0, "path": "b.pt"}}
    (tmp_path / "features_metadata.json").write_text(json.dumps(published))
    encode(videos[:1], features)
    store = Store(tmp_path)
    assert [store.rows(name) for name in ("a", "b")] == [5, 7]
    assert store.rows(Path(videos[0]).stem) > 7

    save_file({"features": torch.ones(5, 10, 128)}, features / "c.safetensors")
    with pytest.raises(BadData, match="c.safetensors: was not written by data.py encode; choose"):
        encode(videos[:1], features)


def test_encoded_videos_are_a_data_set(videos, tmp_path):
    """Our own features with annotations, up to the last half second: every sample can be read."""
    encode(videos, tmp_path / "features")
    store = Store(tmp_path)
    name = Path(videos[0]).stem
    end = store.entry(name)["duration"]
    (tmp_path / "annotations").mkdir()
    rows = [{"time": 0.1, "text": "You look."}, {"time": end - 0.1, "text": "You sit."},
            {"time": end, "text": "You stand."}]
    (tmp_path / "annotations" / "refined_train_narrations.json").write_text(
        json.dumps({name: rows}))
    sample, = data.load_dataset("ek100", tmp_path, "train", shape=(10, 128))
    last = store.rows(name) - 2                # counted from frame 1, with the first narration
    assert [frame for frame, _ in sample.narrations] == [0, last - 1, last]
    assert sample.num_frames == last + 1
    assert len(sample.read(0, sample.num_frames)) == sample.num_frames


def test_a_video_of_ones_own_is_not_replaced(tmp_path):
    mine = tmp_path / "mine.mp4"
    line = ["toy", "--seed", "4", "--minutes", "0.1", "--output", str(mine)]
    mine.write_bytes(b"a holiday")
    with pytest.raises(BadData, match="without .*mine.json: not a video of the toy"):
        data_command.run(line)
    (tmp_path / "mine.json").write_text('{"narrations": []}')
    with pytest.raises(BadData, match="is another video"):
        data_command.run(line)
    assert mine.read_bytes() == b"a holiday"
    mine.unlink()
    with pytest.raises(BadData, match="mine.json: is there already, without .*mine.mp4; delete it"):
        data_command.run(line)
    assert not mine.exists()


# ---------------------------------------------------------------------- command line


def command(*arguments, cwd) -> subprocess.CompletedProcess:
    line = [sys.executable, str(ROOT / "data.py"), *map(str, arguments)]
    return subprocess.run(line, cwd=cwd, text=True, capture_output=True)


def test_the_command_line_writes_and_counts(tmp_path):
    written = command("toy", "--seed", 7, "--minutes", 0.3, "--output", "kitchen.mp4", cwd=tmp_path)
    assert written.returncode == 0, written.stderr
    assert "kitchen.mp4" in written.stdout
    assert sorted(os.listdir(tmp_path)) == ["kitchen.json", "kitchen.mp4"]
    printed = command("stats", "--data", "toy", "--root", ".", "--json", cwd=tmp_path)
    assert printed.returncode == 0, printed.stderr
    stats = json.loads(printed.stdout.splitlines()[-1])
    content = json.loads((tmp_path / "kitchen.json").read_text())
    duration = content["duration"]
    rows = content["narrations"]
    words = [len(row["text"].split()) for row in rows]
    with_memory = [row for row in rows if "memory" in row]
    assert stats["videos"] == 1
    assert (stats["length_mean"], stats["length_std"]) == (duration, 0)
    assert stats["segments_per_video"] == len(rows)
    assert stats["segment_duration"] == duration / len(rows)
    assert stats["words_per_narration"] == pytest.approx(np.mean(words))
    assert stats["memory_share"] == pytest.approx(len(with_memory) / len(rows))


def test_bad_input_is_one_line_and_bad_usage_is_2(tmp_path):
    bad = command("stats", "--data", "ek100", "--json", cwd=tmp_path)
    assert (bad.returncode, bad.stdout) == (1, "")
    assert "--data toy" in bad.stderr and "Traceback" not in bad.stderr
    with pytest.raises(SystemExit) as exited:
        data_command.run(["toy", "--minutes", "1"])            # no --output
    assert exited.value.code == 2


def test_many_videos_resume(tmp_path):
    folder = tmp_path / "many"
    arguments = ["toy", "--seed", "4", "--minutes", "0.1", "--count", "3", "--output", str(folder)]
    data_command.run(arguments)
    names = sorted(os.listdir(folder))
    assert names == [f"toy-000000{seed}.{end}" for seed in (4, 5, 6) for end in ("json", "mp4")]
    before = {name: (folder / name).stat().st_mtime_ns for name in names}
    (folder / "toy-0000005.json").unlink()     # as if interrupted before it was written
    data_command.run(arguments)
    written = {name for name in names if (folder / name).stat().st_mtime_ns != before[name]}
    assert written == {"toy-0000005.json", "toy-0000005.mp4"}


@pytest.mark.parametrize("arguments", [
    ["--output", "a.mov"],
    ["--output", "a.mp4", "--count", "2"],
    ["--output", "a.mp4", "--minutes", "1e6"],
])
def test_toy_arguments_that_do_not_fit(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadData):
        data_command.run(["toy", *arguments])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("arguments", [
    "toy --output a --count 0",
    "toy --output a.mp4 --minutes nan",
    "toy --output a.mp4 --seed -1",
    "stats --data toy --limit 0",
    "stats --data nonsense",
    "encode a.mp4 --output b --fps 0",
    "encode a.mp4 --output b --grid -1",
    "encode a.mp4 --output b --batch -1",
    "encode a.mp4 --output b --shard 3/2",
    "encode a.mp4 --output b --shard 0/2",
    "encode a.mp4 --output b --shard x",
    "rewrite --data toy --llm x",
])
def test_usage(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exited:
        data_command.run(arguments.split())
    assert exited.value.code == 2
    assert "error: argument" in capsys.readouterr().err
