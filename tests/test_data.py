"""data.py: which picture is on screen when, damage of every kind, features, samples, and the command line."""
import gc
import json
import os
import subprocess
import sys
import tracemalloc
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import data
from support import video as decoder
from support.common import BadData
from data import Video, read_sample
from support.features import is_features, load_features

ROOT = Path(__file__).resolve().parent.parent
TICKS = 90_000                                                     # a second in the test files that we time ourselves


def numbered(number: int, height: int = 64, width: int = 96) -> np.ndarray:
    """A picture that says its own number, 0..255: the bits are eight columns, black or white, with a noisy top row."""
    columns = np.repeat([255 * (number >> bit & 1) for bit in range(8)], width // 8)
    picture = np.broadcast_to(columns[None, :, None], (height, width, 3)).astype(np.uint8)
    picture[:16] = np.random.default_rng(number).integers(0, 256, (16, width, 3))     # makes packets worth damaging
    return picture


def number(picture: np.ndarray) -> int:
    bits = picture[20:].mean((0, 2)).reshape(8, -1).mean(1) > 128
    return int(sum(1 << bit for bit in range(8) if bits[bit]))


def encode(path: Path, times, movflags: str = "", turn: int | None = None, bframes: int = 3, gop: int = 12,
           picture=numbered, container: str | None = None) -> Path:
    """Writes picture(k) at times[k] (seconds)."""
    with av.open(str(path), "w", format=container, options={"movflags": movflags} if movflags else {}) as file:
        stream = file.add_stream("libx264", rate=30)
        stream.height, stream.width = picture(0).shape[:2]
        stream.pix_fmt, stream.codec_context.time_base = "yuv420p", Fraction(1, TICKS)
        stream.options = {"crf": "20", "bf": str(bframes), "b-adapt": "0", "g": str(gop)}
        if turn is not None:
            stream.set_display_rotation(turn)
        for k, time in enumerate(times):
            frame = av.VideoFrame.from_ndarray(picture(k), format="rgb24")
            frame.pts, frame.time_base = round(time * TICKS), Fraction(1, TICKS)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return path


def on_screen(times, fps: float, count: int) -> list[int]:
    """The oracle: the number of the last picture shown by i / fps after the first, for i < count."""
    times = np.asarray(times) - times[0]
    return [int(np.flatnonzero(times <= i / fps + decoder.TOLERANCE)[-1]) for i in range(count)]


# --------------------------------------------------------------------------- the right picture at the right time

@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.ts"])
@pytest.mark.parametrize("rate", [24, 25, 30000 / 1001, 10, 1])
def test_pictures_are_chosen_by_presentation_time(tmp_path, name, rate):
    times = [k / rate for k in range(max(5, round(4 * rate)))]
    video = Video(encode(tmp_path / name, times))
    seen = [number(picture) for picture in video]
    assert int(2 * times[-1]) + 1 <= len(seen) <= 2 * (times[-1] + 1 / rate) + 1
    assert seen == on_screen(times, 2, len(seen))
    assert video.damaged == 0 and video.size == (64, 96)


@pytest.mark.parametrize("fps", [0.7, 2, 10, 30])
def test_any_rate_can_be_asked_for(tmp_path, fps):
    times = [k / 10 for k in range(40)]
    seen = [number(picture) for picture in Video(encode(tmp_path / "a.mp4", times), fps)]
    assert seen == on_screen(times, fps, len(seen)) and len(seen) == int(np.ceil(4 * fps - 0.01))


def test_equal_rates_are_the_identity_in_matroskas_milliseconds(tmp_path):
    video = Video(encode(tmp_path / "a.mkv", [k / 30 for k in range(90)]), 30)
    assert [number(picture) for picture in video] == list(range(90))


@pytest.mark.parametrize("bframes", [0, 3])
@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.ts"])
@pytest.mark.parametrize("start", [0, 3.2])
def test_variable_rate_with_an_offset(tmp_path, name, bframes, start):
    gaps = np.random.default_rng(0).choice([0.02, 0.04, 0.11, 0.3, 1.7], 60)
    times = start + np.concatenate([[0], np.cumsum(gaps)])
    seen = [number(picture) for picture in Video(encode(tmp_path / name, times, bframes=bframes))]
    assert len(seen) >= 2 * (times[-1] - start) and seen == on_screen(times, 2, len(seen))


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.ts"])
@pytest.mark.parametrize("start", [0, 3.2])
def test_the_expected_number_of_frames(tmp_path, name, start):
    video = Video(encode(tmp_path / name, [start + k / 10 for k in range(60)], bframes=0))
    assert abs(video.duration - 6) < 0.11 and video.frames == 12 == len(list(video))


def test_without_times_the_stated_rate_counts(tmp_path):
    path = encode(tmp_path / "a.h264", [k / 25 for k in range(50)], container="h264", bframes=0)
    with av.open(str(path)) as file:
        assert next(file.decode(video=0)).pts is None
        step = 1 / float(file.streams.video[0].average_rate)
        duration = next(file.decode(video=0)).duration * float(file.streams.video[0].time_base)
    seen = [number(picture) for picture in Video(path)]
    assert seen in [on_screen([k * each for k in range(50)], 2, len(seen)) for each in (step, duration)]
    assert len(seen) >= 3


def test_a_clock_that_jumps_back_goes_on(tmp_path):
    first = encode(tmp_path / "a.ts", [k / 10 for k in range(40)]).read_bytes()
    (tmp_path / "b.ts").write_bytes(first + encode(tmp_path / "c.ts", [k / 10 for k in range(60)]).read_bytes())
    seen = [number(picture) for picture in Video(tmp_path / "b.ts")]
    assert 19 <= len(seen) <= 21 and seen[:8] == on_screen([k / 10 for k in range(40)], 2, 8) and seen[-1] >= 53


def test_a_single_picture_is_one_frame(tmp_path):
    assert [number(p) for p in Video(encode(tmp_path / "a.mp4", [0]))] == [0]


@pytest.mark.parametrize("turn", [0, 90, 180, -90])
def test_rotation_is_applied(tmp_path, turn):
    if not hasattr(av.VideoStream, "set_display_rotation"):
        pytest.skip("this PyAV cannot write a display matrix")
    corner = np.zeros((64, 96, 3), np.uint8)
    corner[:32, :48] = (250, 20, 20)                               # red, top left as stored
    video = Video(encode(tmp_path / "a.mp4", [0, 1], turn=turn, picture=lambda k: corner))
    picture = next(iter(video))
    assert picture.shape == (*video.size, 3) == ((96, 64, 3) if turn % 180 else (64, 96, 3))
    expected = np.rot90(corner, turn // 90)                        # both count counter-clockwise
    assert np.abs(picture.astype(int) - expected).mean() < 8 and picture.flags.c_contiguous


def test_names_with_colons_and_dashes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data.write_video("-http:x.mp4", [numbered(0)] * 3, 2)
    assert len(list(Video("-http:x.mp4"))) == 3


# ------------------------------------------------------------------------------------------------------- frugality

def test_only_kept_frames_are_converted_and_only_once(tmp_path, monkeypatch):
    convert, calls = decoder.to_rgb, []
    monkeypatch.setattr(decoder, "to_rgb", lambda frame, *rest: calls.append(frame.pts) or convert(frame, *rest))
    fast, slow = encode(tmp_path / "a.mp4", [k / 25 for k in range(100)]), encode(tmp_path / "b.mp4", [0, 1, 2, 3])
    assert len(list(Video(fast))) == len(calls) == len(set(calls)) == 8
    calls.clear()
    assert len(list(Video(slow))) >= 7 and len(calls) == 4


def test_frames_come_as_soon_as_the_next_picture_is_known(tmp_path, monkeypatch):
    path = encode(tmp_path / "a.mp4", [k / 10 for k in range(50)])
    decode, seen = Video._decode, []
    monkeypatch.setattr(Video, "_decode", lambda *a: (seen.append(f.pts) or f for f in decode(*a)))
    video = Video(path)
    seen.clear()
    frames = iter(video)
    next(frames)
    assert len(seen) == 2
    next(frames)
    assert len(seen) == 7                                          # picture 5 is at 0.5 s, picture 6 shows it has ended


def test_memory_does_not_grow_with_the_video(tmp_path):
    def peak(count: int) -> int:
        grey = lambda k: np.full((64, 96, 3), k % 250, np.uint8)
        path = encode(tmp_path / f"{count}.mp4", [k / 2 for k in range(count)], picture=grey)
        video = Video(path)
        tracemalloc.start()
        assert sum(1 for _ in video) == count                      # 18 kB a picture
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most
    assert peak(600) < peak(60) + 10 * 64 * 96 * 3


def open_files(path: Path) -> int:
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return sum(os.path.exists(link) and os.path.realpath(link) == str(path.resolve()) for link in links)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files in /proc")
def test_the_file_is_closed_at_the_end_and_when_abandoned(tmp_path):
    path = encode(tmp_path / "a.mp4", [k / 10 for k in range(50)])
    video = Video(path)
    assert open_files(path) == 0
    frames = iter(video)
    next(frames)
    assert open_files(path) == 1
    frames.close()
    assert open_files(path) == 0
    for _ in video:
        break
    gc.collect()
    assert open_files(path) == 0
    assert len(list(video)) == 10 and len(list(video)) == 10 and open_files(path) == 0      # can be repeated


# ---------------------------------------------------------------------------------------------------------- damage

TIMES = [k / 10 for k in range(100)]


@pytest.mark.parametrize("cut", [0.02, 0.3, 0.6, 0.97])
def test_mp4_without_its_index_says_truncated(tmp_path, cut):
    whole = encode(tmp_path / "a.mp4", TIMES).read_bytes()
    (tmp_path / "b.mp4").write_bytes(whole[:int(cut * len(whole))])
    with pytest.raises(BadData, match=r"b\.mp4: cannot be opened.*truncated\?"):
        Video(tmp_path / "b.mp4")


@pytest.mark.parametrize("cut", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.ts"])
def test_a_stream_cut_short_gives_what_is_there(tmp_path, name, cut):
    whole = encode(tmp_path / name, TIMES, movflags="+faststart" if name == "a.mp4" else "").read_bytes()
    assert len(list(Video(tmp_path / name))) == 20
    (tmp_path / name).write_bytes(whole[:int(cut * len(whole))])
    video = Video(tmp_path / name)
    seen = [number(picture) for picture in video]
    assert 20 * cut - 4 <= len(seen) <= 20 * cut + 2
    assert seen[:-1] == on_screen(TIMES, 2, len(seen))[:-1]        # the last packet may be half there
    assert video.damaged >= 1 or name == "a.ts"                    # a .ts promises no length


@pytest.mark.parametrize("cut", [0.31, 0.52, 0.83])
def test_no_whole_picture_before_the_cut_is_lost(tmp_path, cut):
    path = encode(tmp_path / "a.mp4", TIMES, movflags="+faststart")
    path.write_bytes(path.read_bytes()[:int(cut * path.stat().st_size)])
    with av.open(str(path)) as file:
        whole = sum(packet.size > 0 and not packet.is_corrupt for packet in file.demux(video=0))
    video = Video(path, 10)
    with video._open() as (container, stream):
        assert len(list(video._decode(container, stream))) == whole > 25


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.ts"])
def test_flipped_bytes_do_not_stop_the_video(tmp_path, name, seed):
    path = encode(tmp_path / name, TIMES, movflags="+faststart" if name == "a.mp4" else "")
    content = bytearray(path.read_bytes())
    for at in np.random.default_rng(seed).integers(4000, len(content) - 4000, 60):
        content[at] ^= 0xFF
    path.write_bytes(content)
    video = Video(path)
    frames = list(video)
    assert 16 <= len(frames) <= 22 and video.damaged > 0
    assert all(frame.shape == (64, 96, 3) for frame in frames)


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.ts"])
def test_a_lost_beginning_moves_nothing(tmp_path, monkeypatch, name):
    path = encode(tmp_path / name, [3.2 + time for time in TIMES], bframes=0)
    decode = Video._decode
    monkeypatch.setattr(Video, "_decode", lambda *a: (f for k, f in enumerate(decode(*a)) if k >= 33))
    seen = [number(picture) for picture in Video(path)]
    assert seen[:7] == [33] * 7 and seen[7:] == on_screen(TIMES, 2, 20)[7:]


def test_damage_is_reported_in_one_line(tmp_path, capsys):
    whole = encode(tmp_path / "a.mkv", TIMES).read_bytes()
    (tmp_path / "a.mkv").write_bytes(whole[:len(whole) // 2])
    video = Video(tmp_path / "a.mkv")
    video.report()
    assert capsys.readouterr().err == ""
    list(video)
    video.report()
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "a.mkv" in err and "damaged" in err


def sound(path: Path) -> Path:
    with av.open(str(path), "w") as file:
        stream = file.add_stream("aac", rate=44100)
        for k in range(20):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            frame.rate, frame.pts = 44100, 1024 * k
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return path


def test_what_is_no_video_is_named(tmp_path):
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "text.mp4").write_text("dear diary\n" * 100)
    (tmp_path / "text.txt").write_text("dear diary\n" * 100)
    os.mkfifo(tmp_path / "pipe.mp4")
    header = encode(tmp_path / "a.mp4", TIMES, movflags="+faststart").read_bytes()
    (tmp_path / "hollow.mp4").write_bytes(header[:header.index(b"mdat") + 4] + bytes(len(header)))
    cases = {"gone.mp4": "no such file", "": "a directory", "empty.mp4": "empty", "text.mp4": "cannot be opened",
             "text.txt": "text file", "pipe.mp4": "not a regular file", "hollow.mp4": "not one picture"}
    for name, message in cases.items():
        with pytest.raises(BadData, match=message) as raised:
            Video(tmp_path / name)
        assert str(tmp_path / name) in str(raised.value) and "\n" not in str(raised.value)
    with pytest.raises(BadData, match="no video stream"):
        Video(sound(tmp_path / "sound.mp4"))
    for fps in (0, -1, float("nan"), float("inf")):
        with pytest.raises(BadData, match="frames a second"):
            Video(tmp_path / "a.mp4", fps)


# --------------------------------------------------------------------------------------------------------- writing

def test_written_video_is_read_back(tmp_path):
    data.write_video(tmp_path / "a.mp4", (numbered(k) for k in range(30)), 2)
    video = Video(tmp_path / "a.mp4")
    assert [number(picture) for picture in video] == list(range(30))
    assert (video.frames, video.duration, video.size) == (30, 15, (64, 96))
    content = (tmp_path / "a.mp4").read_bytes()
    assert content.index(b"moov") < content.index(b"mdat")         # can be played while it loads
    assert os.listdir(tmp_path) == ["a.mp4"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_video_leaves_nothing_behind(tmp_path, error):
    def frames():
        yield from map(numbered, range(20))
        raise error("in the middle")
    (tmp_path / "old.mp4").write_bytes(b"old")
    for name in ("new.mp4", "old.mp4"):
        with pytest.raises(error, match="in the middle"):
            data.write_video(tmp_path / name, frames(), 2)
    assert os.listdir(tmp_path) == ["old.mp4"] and (tmp_path / "old.mp4").read_bytes() == b"old"


def test_what_cannot_be_written_is_named(tmp_path):
    with pytest.raises(BadData, match="cannot be written"):
        data.write_video(tmp_path / "gone" / "a.mp4", [numbered(0)], 2)
    with pytest.raises(BadData, match="is a directory"):
        data.write_video(tmp_path, [numbered(0)], 2)
    with pytest.raises(BadData, match="no frames"):
        data.write_video(tmp_path / "a.mp4", [], 2)
    assert os.listdir(tmp_path) == []


# -------------------------------------------------------------------------------------------------------- features

def test_features_and_videos_are_told_apart():
    for spec in ("a.safetensors", "a.safetensors:b", r"C:\x\a.safetensors", r"C:\x\a.safetensors:b:c", "a.PT", "/x.y/a.pt"):
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
    bad = {"rank": x[0].clone(), "zero": x[:0].clone(), "whole": x.int(), "nan": x.clone().index_fill_(0, torch.tensor(2), float("nan")),
           "inf": x.half() * 1e9}
    save_file({"x": x, **bad}, tmp_path / "many.safetensors")
    save_file({}, tmp_path / "none.safetensors")
    torch.save({"x": x}, tmp_path / "dict.pt")
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
             "dict.pt": "holds a dict", "code.pt": "no plain tensor", "cut.safetensors": "damaged", "cut.pt": "damaged",
             "text.pt": "damaged", "empty.pt": "damaged"}
    for spec, message in cases.items():
        with pytest.raises(BadData, match=message) as raised:
            load_features(str(tmp_path / spec))
        assert "\n" not in str(raised.value)
    for wanted, message in (({"tokens": 5}, "10 tokens per frame.* 5"), ({"width": 1024}, "8 wide.* 1024")):
        with pytest.raises(BadData, match=message):
            load_features(f"{tmp_path}/many.safetensors:x", **wanted)


# --------------------------------------------------------------------------------------------------------- samples

@pytest.mark.parametrize("fps", [2, 2.5, 8, 30000 / 1001])
def test_time_and_frame_are_inverse(fps):
    assert all(data.frame_at(data.time_of(frame, fps), fps) == frame for frame in range(20_000))
    assert data.frame_at(0, 2) == 0 and data.frame_at(0.5, 2) == 0 and data.frame_at(0.51, 2) == 1 and data.frame_at(1, 2) == 1


def test_toy_round_trip_through_files(tmp_path):
    written = data.write_toy(3, 0.4, tmp_path / "k.mp4")
    read = read_sample(tmp_path / "k.json")
    assert (read.name, read.fps, read.num_frames) == ("k", 2, written.num_frames)
    assert read.narrations == written.narrations and read.memory == written.memory and len(read.narrations) > 3
    assert abs(read.num_frames / 2 - 24) < 6
    pairs = list(zip(read.frames(), written.frames(), strict=True))
    assert len(pairs) == read.num_frames
    assert max(np.abs(a.astype(int) - b).mean() for a, b in pairs) < 12                # lossy, but in step:
    shifted = [np.abs(pairs[i][0].astype(int) - pairs[i - 1][1]).mean() for i in range(1, len(pairs))]
    assert np.mean([np.abs(a.astype(int) - b).mean() for a, b in pairs]) < np.mean(shifted)
    assert sorted(os.listdir(tmp_path)) == ["k.json", "k.mp4"]


def test_an_interrupted_toy_leaves_no_ground_truth(tmp_path, monkeypatch):
    def stop(self, frame):
        raise KeyboardInterrupt
    monkeypatch.setattr(data.world.Kitchen, "render", stop)
    with pytest.raises(KeyboardInterrupt):
        data.write_toy(3, 0.2, tmp_path / "k.mp4")
    assert os.listdir(tmp_path) == []


GOOD = {"video": "v.mp4", "fps": 2, "duration": 10, "narrations": [{"time": 0.5, "text": "You look."}]}


def described(folder: Path, **changes) -> Path:
    path = folder / "v.json"
    path.write_text(json.dumps({key: value for key, value in (GOOD | changes).items() if value is not ...}))
    return path


def test_two_narrations_on_one_frame_the_later_stays(tmp_path):
    told = [{"time": 3.4, "text": "c", "memory": ["x"]}, {"time": 1.0, "text": "b"}, {"time": 0.9, "text": "a"},
            {"time": 3.4, "text": "d"}]
    sample = read_sample(described(tmp_path, narrations=told))
    assert sample.narrations == [(1, "b"), (6, "d")] and sample.memory == [(), ()] and sample.num_frames == 20


@pytest.mark.parametrize("changes, message", [
    ({"video": ...}, '"video"'), ({"video": 3}, '"video"'),
    ({"fps": 0}, '"fps"'), ({"fps": "2"}, '"fps"'), ({"fps": True}, '"fps"'),
    ({"duration": ...}, '"duration"'), ({"duration": float("nan")}, '"duration"'), ({"narrations": {}}, '"narrations"'),
    ({"narrations": ["x"]}, r"narrations\[0\] must be an object"),
    ({"narrations": GOOD["narrations"] + [{"text": "x"}]}, r'narrations\[1\]: "time"'),
    ({"narrations": [{"time": -1, "text": "x"}]}, r'narrations\[0\]: "time"'),
    ({"narrations": [{"time": 10.2, "text": "x"}]}, r"narrations\[0\]: 10.2 s is after the end"),
    ({"narrations": [{"time": 1, "text": " "}]}, r'narrations\[0\]: "text"'),
    ({"narrations": [{"time": 1}]}, r'narrations\[0\]: "text"'),
    ({"narrations": [{"time": 1, "text": "x", "memory": "cup"}]}, r'narrations\[0\]: "memory"'),
    ({"narrations": [{"time": 1, "text": "x", "memory": [1]}]}, r'narrations\[0\]: "memory"')])
def test_malformed_ground_truth_is_named(tmp_path, changes, message):
    with pytest.raises(BadData, match=r"v\.json: .*" + message):
        read_sample(described(tmp_path, **changes))


def test_ground_truth_that_is_no_json_or_lacks_its_video(tmp_path):
    for content in (b"", b"{", b"\xff\xfe\x00", b"[]", b"3"):
        (tmp_path / "v.json").write_bytes(content)
        with pytest.raises(BadData, match=r"v\.json"):
            read_sample(tmp_path / "v.json")
    with pytest.raises(BadData, match="cannot be read"):
        read_sample(tmp_path / "gone.json")
    sample = read_sample(described(tmp_path))
    with pytest.raises(BadData, match=r"v\.mp4: no such file"):
        next(sample.frames())
    data.write_video(tmp_path / "v.mp4", map(numbered, range(15)), 2)
    with pytest.raises(BadData, match="has 15 frames, its .json promises 20"):
        list(sample.frames())


def test_toy_splits_are_disjoint_and_reproducible():
    ranges = list(data.TOY_SEEDS.values())
    assert all(not set((a[0], a[-1])) & set(b) and a.stop <= b.start for a, b in zip(ranges, ranges[1:]))
    assert list(data.TOY_SEEDS) == ["train", "val", "test"] and ranges[0].start > 100_000      # demonstrations stay below
    names = {split: [sample.name for sample in data.toy_samples(split, 4)] for split in data.TOY_SEEDS}
    assert len(set(sum(names.values(), []))) == 12
    one, two = (list(data.toy_samples("val", 6, (2, 5))) for _ in range(2))
    assert [s.narrations for s in one] == [s.narrations for s in two]
    assert np.array_equal(next(one[0].frames()), next(two[0].frames()))
    counts = [len(sample.narrations) - 1 for sample in data.toy_samples("train", 40, (2, 5))]     # less the opening
    assert set(counts) == {2, 3, 4, 5}
    for sample in one:
        frames = [frame for frame, _ in sample.narrations]
        assert frames == sorted(set(frames)) and frames[-1] < sample.num_frames and len(sample.memory) == len(frames)


def test_load_dataset(tmp_path):
    assert [s.name for s in data.load_dataset("toy", split="val", limit=2)] == [s.name for s in data.toy_samples("val", 2)]
    (tmp_path / "test").mkdir()
    for name in ("b", "a", "test/c"):
        data.write_toy(5, 0.1, tmp_path / f"{name}.mp4")
    assert [sample.name for sample in data.load_dataset("toy", tmp_path)] == ["a", "b"]
    assert [sample.name for sample in data.load_dataset("toy", tmp_path, limit=1)] == ["a"]
    assert [sample.name for sample in data.load_dataset("toy", tmp_path, "test")] == ["c"]
    (tmp_path / "bare").mkdir()
    cases = {("ek100",): "--data toy", ("ego5d",): "choose one of toy, ego4d",
             ("toy", None, "dev"): "unknown split", ("toy", None, "val", 0): "limit",
             ("toy", tmp_path / "bare"): "no .json", ("toy", tmp_path / "gone"): "no such folder"}
    for arguments, message in cases.items():
        with pytest.raises(BadData, match=message):
            data.load_dataset(*arguments)


# ---------------------------------------------------------------------------------------------------- command line

def command(*arguments, cwd) -> subprocess.CompletedProcess:
    line = [sys.executable, str(ROOT / "data.py"), *map(str, arguments)]
    return subprocess.run(line, cwd=cwd, text=True, capture_output=True)


def test_the_command_line_writes_and_counts(tmp_path):
    written = command("toy", "--seed", 7, "--minutes", 0.3, "--output", "kitchen.mp4", cwd=tmp_path)
    assert written.returncode == 0, written.stderr
    assert sorted(os.listdir(tmp_path)) == ["kitchen.json", "kitchen.mp4"] and "kitchen.mp4" in written.stdout
    stats = command("stats", "--data", "toy", "--root", ".", "--json", cwd=tmp_path)
    assert stats.returncode == 0, stats.stderr
    counted = json.loads(stats.stdout.splitlines()[-1])
    content = json.loads((tmp_path / "kitchen.json").read_text())
    told = content["narrations"]
    assert counted["videos"] == 1 and counted["length_mean"] == content["duration"] and counted["length_std"] == 0
    assert counted["segments_per_video"] == len(told) and counted["segment_duration"] == content["duration"] / len(told)
    assert counted["words_per_narration"] == pytest.approx(np.mean([len(n["text"].split()) for n in told]))
    assert counted["memory_share"] == pytest.approx(sum("memory" in n for n in told) / len(told))


def test_bad_input_is_one_line_and_bad_usage_is_2(tmp_path):
    bad = command("stats", "--data", "ek100", "--json", cwd=tmp_path)
    assert (bad.returncode, bad.stdout) == (1, "") and "--data toy" in bad.stderr and "Traceback" not in bad.stderr
    with pytest.raises(SystemExit) as exited:
        data.main(["toy", "--minutes", "1"])                       # no --output
    assert exited.value.code == 2


def test_many_videos_resume(tmp_path):
    arguments = ["toy", "--seed", "4", "--minutes", "0.1", "--count", "3", "--output", str(tmp_path / "many")]
    data.main(arguments)
    names = sorted(os.listdir(tmp_path / "many"))
    assert names == [f"toy-000000{seed}.{end}" for seed in (4, 5, 6) for end in ("json", "mp4")]
    before = {name: (tmp_path / "many" / name).stat().st_mtime_ns for name in names}
    (tmp_path / "many" / names[2]).unlink()                        # the second was interrupted before its .json
    data.main(arguments)
    again = {name for name in names if (tmp_path / "many" / name).stat().st_mtime_ns != before[name]}
    assert again == {"toy-0000005.json", "toy-0000005.mp4"}


@pytest.mark.parametrize("arguments", [
    ["--output", "a.mov"], ["--output", "a.mp4", "--count", "2"], ["--output", "a", "--count", "0"],
    ["--output", "a.mp4", "--minutes", "nan"], ["--output", "a.mp4", "--seed", "-1"]])
def test_toy_arguments_that_make_no_sense(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadData):
        data.main(["toy", *arguments])
    assert os.listdir(tmp_path) == []
