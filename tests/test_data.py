"""data.py: samples of the toy, encoding, statistics, and the command line."""
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import data
from beyond.commands import data_command
from helpers import TOY
from narrator import VisionEncoder
from support.common.disk import write_tensors
from support.common.errors import BadData
from support.files import encoding
from support.files.features import Store
from support.files.sentences import frame_at, time_of
from support.files.video import Video, write_video
from toy import world
from toy.files import toy_samples


def memory_words(sample):
    return [sentence.memory_words for sentences in sample.annotators for sentence in sentences]


@pytest.mark.parametrize("fps", [2, 30000 / 1001])
def test_a_frame_covers_the_time_up_to_its_end(fps):
    for frame in range(2_000):
        assert frame_at(time_of(frame, fps), fps) == frame
        assert frame_at(round(time_of(frame, fps), 3), fps) == frame       # of subtitles
    assert [frame_at(time / fps, fps) for time in (0, 1, 1.02, 2)] == [0, 0, 1, 1]


def write_toy(path, seed=5, minutes=0.1):
    data_command.run(["toy", "--seed", str(seed), "--minutes", str(minutes), "--output", str(path)])


def test_toy_videos_on_disk(tmp_path):
    """The pictures are lossy, but each is closest to that of the same frame."""
    for name in ("b", "a"):
        write_toy(tmp_path / f"{name}.mp4")
    (tmp_path / "._a.json").write_bytes(b"\x00\x05Mac OS X")
    assert [sample.name for sample in toy_samples(tmp_path)] == ["a", "b"]
    sample, = toy_samples(tmp_path, limit=1)
    assert sample.name == "a"

    kitchen = world.lasting(5, 6)
    assert sample.narrations == [(n.frame, n.text) for n in kitchen.narrations]
    assert memory_words(sample) == [n.memory_words for n in kitchen.narrations]
    assert (sample.fps, sample.num_frames, sample.duration) == (2, len(kitchen), len(kitchen) / 2)
    rendered = np.stack([kitchen.render(frame).astype(int) for frame in range(len(kitchen))])
    read = np.stack(list(sample.frames()))
    differences = np.abs(read - rendered).mean((1, 2, 3))
    assert differences.max() < 12
    assert differences.mean() < np.abs(read[1:] - rendered[:-1]).mean()


GOOD = {"video": "v.mp4", "fps": 2, "duration": 10, "narrations": [{"time": 0.5, "text": "You look."}]}


def described(folder: Path, **changes) -> data.Sample:
    (folder / "v.json").write_text(json.dumps(GOOD | changes))
    sample, = toy_samples(folder)
    return sample


@pytest.mark.parametrize("changes, message", [
    ({"video": 3}, '"video"'), ({"fps": 0}, '"fps"'), ({"narrations": {}}, '"narrations"'),
    ({"narrations": [{"time": -1, "text": "x"}]}, "'time': -1"),
    ({"narrations": [{"time": 1.7, "text": "x"}, {"time": 1.9, "text": "y"}]}, "of one frame"),
    ({"narrations": [{"time": 10.2, "text": "x"}]}, "after the end"),
    ({"narrations": [{"time": 1, "text": "x", "memory": "cup"}]}, "'memory': 'cup'"),
])
def test_malformed_ground_truth_is_named(tmp_path, changes, message):
    with pytest.raises(BadData, match=r"v\.json.*" + message):
        described(tmp_path, **changes)


def test_ground_truth_that_lacks_its_video(tmp_path):
    sample = described(tmp_path)
    with pytest.raises(BadData, match=r"v\.mp4: no such file"):
        next(sample.frames())
    write_video(tmp_path / "v.mp4", [np.zeros((32, 48, 3), np.uint8)] * 15, 2)
    with pytest.raises(BadData, match="has 15 frames, its .json promises 20"):
        list(sample.frames())


def test_shorten(tmp_path, capsys):
    """At most so many frames, up to the last narration that fits: those of frames 0, 5, 12, 17."""
    rows = [{"time": time, "text": "x", "memory": ["x"]} for time in (0.5, 3, 6.5, 9)]
    sample = described(tmp_path, narrations=rows)
    pictures = (np.full((32, 48, 3), 10 * k, np.uint8) for k in range(20))
    write_video(tmp_path / "v.mp4", pictures, 2)
    for max_frames, narrations, frames in ((20, 4, 20), (19, 4, 18), (17, 3, 13), (1, 1, 1)):
        short, = data.shorten([sample], max_frames)
        assert len(short.narrations) == len(memory_words(short)) == narrations
        assert (short.num_frames, short.duration) == (frames, 10)
        assert ("1 of 1 samples have more" in capsys.readouterr().err) == (max_frames < 20)
        assert [round(picture.mean() / 10) for picture in short.frames()] == list(range(frames))


@pytest.mark.parametrize("name, settings, message", [
    ("ego4d", {}, r"(?s)narration_stream_val\.json.*FlowNar-Data.*data\.py encode.*--data toy"),
    ("egoexo4d", {"split": "tran"}, "no split 'tran'; choose one of train, val"),
    ("toy", {"split": "dev"}, "unknown split"),
    ("toy", {"world": "noon"}, "choose one of plain, idle"),
    ("toy", {"root": "."}, "has no toy videos; make some"),
    ("ek100", {"root": "gone"}, "ek100 has no annotations in gone"),
    ("ek100", {"root": "found"}, "features     found/features_metadata.json is there"),
    ("egoexo4d", {"root": "."}, r"parts of a \.tar are joined by cat; its egoexo is our"),
])
def test_data_sets_that_cannot_be_loaded(tmp_path, monkeypatch, name, settings, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "found").mkdir()
    (tmp_path / "found" / "features_metadata.json").write_text("{}")
    with pytest.raises(BadData, match=message):
        if name == "toy":
            toy_samples(**settings)
        else:
            data.load_dataset(name, **settings)


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("videos")
    data_command.run(["toy", "--seed", "4", "--minutes", "0.1", "--count", "3", "--output", str(folder)])
    return sorted(map(str, folder.glob("*.mp4")))


def encode(videos, output, *options):
    data_command.run(["encode", *videos, "--output", str(output), "--vision", str(TOY / "vision"),
                      "--device", "cpu", *options])


def test_encode_is_what_streaming_sees(videos, tmp_path, monkeypatch):
    """Also where it was interrupted: the second run makes what the first one would have made."""
    folder = tmp_path / "features"
    first, second, _ = files = [folder / f"{Path(video).stem}.safetensors" for video in videos]

    def interrupted(path, *rest):
        if path == second:
            raise KeyboardInterrupt
        write_tensors(path, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(encoding, "write_tensors", interrupted)
        encode(videos, folder)
    assert list(folder.iterdir()) == [first]
    time = first.stat().st_mtime_ns
    encode(videos, folder, "--batch", "7")
    assert first.stat().st_mtime_ns == time
    vision = VisionEncoder(str(TOY / "vision"))
    for video, file in zip(videos, files):
        tokens = [vision(torch.from_numpy(picture)[None]) for picture in Video(video, 2.0)]
        x = torch.cat(tokens)                  # [T, J, D]
        found = Store(tmp_path, {}).find(file.stem)
        assert found.duration == len(x) / 2
        assert torch.allclose(found.read(0, len(x)), x, atol=0.02, rtol=0.02)
        assert load_file(file)["features"].dtype == torch.bfloat16


def test_what_is_already_in_the_folder(videos, tmp_path):
    encode(videos[:1], tmp_path)
    with pytest.raises(BadData, match="was made with .*, here .*; delete it, or choose another"):
        encode(videos[:1], tmp_path, "--fps", "1")
    with pytest.raises(BadData, match="another of the videos is named"):
        encode([videos[0], f"other/{Path(videos[0]).name}"], tmp_path / "x")

    file = tmp_path / f"{Path(videos[1]).stem}.safetensors"
    for content, message in ((b"x" * 50, "cannot be read as features"), (None, "choose another")):
        if content is None:                    # a complete file of another program
            save_file({"weights": torch.zeros(2, 1, 1)}, file)
        else:
            file.write_bytes(content)
        with pytest.raises(BadData, match=f"{file.name}: .*{message}") as error:
            encode(videos[1:], tmp_path)
        assert "\n" not in str(error.value)
        assert not (tmp_path / f"{Path(videos[2]).stem}.safetensors").exists()


def test_large_pictures_are_scaled_first(tmp_path):
    """To twice what the vision model looks at: that is another picture than the large one."""
    pictures = np.random.default_rng(0).integers(0, 256, (2, 300, 400, 3), np.uint8)
    write_video(tmp_path / "v.mp4", pictures, 2)
    encode([str(tmp_path / "v.mp4")], tmp_path / "out")
    x = load_file(tmp_path / "out" / "v.safetensors")["features"].float()
    vision = VisionEncoder(str(TOY / "vision"))
    for largest in (2 * vision.image_size, None):
        seen = np.stack(list(Video(tmp_path / "v.mp4", 2.0, largest)))
        expected = vision(torch.from_numpy(seen))
        assert torch.allclose(x, expected, atol=0.02, rtol=0.02) == (largest is not None)


def test_encoded_videos_are_a_data_set(videos, tmp_path):
    encode(videos, tmp_path / "features")
    name = Path(videos[0]).stem
    features = Store(tmp_path, {}).find(name)
    end = features.duration
    rows = [{"time": time, "text": f"You look at {time}."} for time in (0.1, end - 0.1, end)]
    (tmp_path / "annotations").mkdir()
    file = tmp_path / "annotations" / "refined_train_narrations.json"
    file.write_text(json.dumps({name: rows}))
    sample, = data.load_dataset("ek100", tmp_path, "train")
    last = features.frames - 2                # counted from frame 1, with the first narration
    assert [frame for frame, _ in sample.narrations] == [0, last - 1, last]
    assert len(sample.read(0, sample.num_frames)) == sample.num_frames == last + 1

    shutil.rmtree(tmp_path / "features")
    encode(videos[:1], tmp_path / "features", "--fps", "4")
    with pytest.raises(BadData, match="was encoded with 4 frames a second, and 2 are needed"):
        list(data.load_dataset("ek100", tmp_path, "train"))


def test_the_command_line_writes_and_counts(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data_command.run(["toy", "--seed", "7", "--minutes", "0.3", "--output", "kitchen.mp4"])
    assert "kitchen.mp4" in capsys.readouterr().out
    assert sorted(os.listdir(tmp_path)) == ["kitchen.json", "kitchen.mp4"]
    data_command.run(["stats", "--data", "toy", "--root", str(tmp_path), "--json"])
    stats = json.loads(capsys.readouterr().out.splitlines()[-1])
    content = json.loads((tmp_path / "kitchen.json").read_text())
    duration, rows = content["duration"], content["narrations"]
    words = [len(row["text"].split()) for row in rows]
    assert (stats["videos"], stats["length_mean"], stats["length_std"]) == (1, duration, 0)
    assert (stats["segments_per_video"], stats["segment_duration"]) == (len(rows), duration / len(rows))
    assert stats["words_per_narration"] == pytest.approx(np.mean(words))


def test_many_videos_resume_and_nothing_else_is_replaced(tmp_path):
    folder = tmp_path / "many"
    line = ["toy", "--seed", "4", "--minutes", "0.1", "--count", "3", "--output", str(folder)]
    data_command.run(line)
    names = sorted(os.listdir(folder))
    assert names == [f"toy-000000{seed}.{end}" for seed in (4, 5, 6) for end in ("json", "mp4")]
    before = {name: (folder / name).stat().st_mtime_ns for name in names}
    for end in ("json", "mp4"):                # as if interrupted before it was written
        (folder / f"toy-0000005.{end}").unlink()
    data_command.run(line)
    written = {name for name in names if (folder / name).stat().st_mtime_ns != before[name]}
    assert written == {"toy-0000005.json", "toy-0000005.mp4"}

    with pytest.raises(BadData, match=r"toy-0000004\.mp4: is there already, and not this"):
        data_command.run([*line, "--world", "night"])
    with pytest.raises(BadData, match="a.mov"):
        data_command.run(["toy", "--output", "a.mov"])
    assert os.listdir(tmp_path) == ["many"]
    for end in ("mp4", "json"):
        (tmp_path / f"{end}.{end}").write_bytes(b"a holiday")
        with pytest.raises(BadData, match=rf"{end}\.{end}: is there already"):
            write_toy(tmp_path / f"{end}.mp4")
        assert (tmp_path / f"{end}.{end}").read_bytes() == b"a holiday"


def test_usage():
    for arguments in ("encode", "encode a.mp4", "encode --data . --output x"):
        with pytest.raises(SystemExit, match="2"):
            data_command.run(arguments.split())


def test_features_of_several_vision_models_are_refused(capsys):
    for names, headers in (("siglip /models/siglip dinov2", [{}] * 3),
                           ("a /b/c a", [{"vision_mark": mark} for mark in ("1f", "1f", "2e")])):
        said = [{}, *({"vision": name} | header for name, header in zip(names.split(), headers))]
        samples = [data.Sample([], name=name, features=SimpleNamespace(header=header))
                   for name, header in zip("abcd", said)]
        assert data.header_of_all(samples[:1]) == {} and data.header_of_all(samples[:3]) == said[1]
        silent = sum("vision_mark" not in header for header in said[:3])
        assert f"{silent} of 3 samples have features that do not say" in capsys.readouterr().err
        with pytest.raises(BadData, match="of b by (siglip, siglip, of d by dinov2, dinov2|"
                                          "a, 1f, of d by a, 2e)"):
            data.header_of_all(samples)
