"""support/video.py: which picture is on screen when, damage of every kind, and writing."""
import gc
import os
import tracemalloc
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from support import video as decoder
from support.common import BadData
from support.video import Video, write_video

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


def recorded(path: Path, times, movflags: str = "", turn: int | None = None, bframes: int = 3, gop: int = 12,
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
    video = Video(recorded(tmp_path / name, times))
    seen = [number(picture) for picture in video]
    assert int(2 * times[-1]) + 1 <= len(seen) <= 2 * (times[-1] + 1 / rate) + 1
    assert seen == on_screen(times, 2, len(seen))
    assert video.damaged == 0 and video.size == (64, 96)


@pytest.mark.parametrize("fps", [0.7, 2, 10, 30])
def test_any_rate_can_be_asked_for(tmp_path, fps):
    times = [k / 10 for k in range(40)]
    seen = [number(picture) for picture in Video(recorded(tmp_path / "a.mp4", times), fps)]
    assert seen == on_screen(times, fps, len(seen)) and len(seen) == int(np.ceil(4 * fps - 0.01))


def test_equal_rates_are_the_identity_in_matroskas_milliseconds(tmp_path):
    video = Video(recorded(tmp_path / "a.mkv", [k / 30 for k in range(90)]), 30)
    assert [number(picture) for picture in video] == list(range(90))


@pytest.mark.parametrize("bframes", [0, 3])
@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.ts"])
@pytest.mark.parametrize("start", [0, 3.2])
def test_variable_rate_with_an_offset(tmp_path, name, bframes, start):
    gaps = np.random.default_rng(0).choice([0.02, 0.04, 0.11, 0.3, 1.7], 60)
    times = start + np.concatenate([[0], np.cumsum(gaps)])
    seen = [number(picture) for picture in Video(recorded(tmp_path / name, times, bframes=bframes))]
    assert len(seen) >= 2 * (times[-1] - start) and seen == on_screen(times, 2, len(seen))


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.ts"])
@pytest.mark.parametrize("start", [0, 3.2])
def test_the_expected_number_of_frames(tmp_path, name, start):
    video = Video(recorded(tmp_path / name, [start + k / 10 for k in range(60)], bframes=0))
    assert abs(video.duration - 6) < 0.11 and video.frames == 12 == len(list(video))


def test_without_times_the_stated_rate_counts(tmp_path):
    path = recorded(tmp_path / "a.h264", [k / 25 for k in range(50)], container="h264", bframes=0)
    with av.open(str(path)) as file:
        assert next(file.decode(video=0)).pts is None
        step = 1 / float(file.streams.video[0].average_rate)
        duration = next(file.decode(video=0)).duration * float(file.streams.video[0].time_base)
    seen = [number(picture) for picture in Video(path)]
    assert seen in [on_screen([k * each for k in range(50)], 2, len(seen)) for each in (step, duration)]
    assert len(seen) >= 3


def test_a_clock_that_jumps_back_goes_on(tmp_path):
    first = recorded(tmp_path / "a.ts", [k / 10 for k in range(40)]).read_bytes()
    (tmp_path / "b.ts").write_bytes(first + recorded(tmp_path / "c.ts", [k / 10 for k in range(60)]).read_bytes())
    seen = [number(picture) for picture in Video(tmp_path / "b.ts")]
    assert 19 <= len(seen) <= 21 and seen[:8] == on_screen([k / 10 for k in range(40)], 2, 8) and seen[-1] >= 53


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_a_slide_show_with_pictures_minutes_apart(tmp_path, name):
    times = [0, 200, 900, 1000, 1001]
    video = Video(recorded(tmp_path / name, times, bframes=0))
    seen = [number(picture) for picture in video]
    assert len(seen) >= 2003 and seen == on_screen(times, 2, len(seen)) and (video.damaged, video.gaps) == (0, [])


@pytest.mark.parametrize("name, gap", [("a.mkv", 30 * 86400), ("a.mkv", 5000), ("a.mp4", 5000), ("a.ts", 5000)])
def test_a_gap_too_long_to_be_true_is_left_out_and_reported(tmp_path, capsys, name, gap):
    """A file of 2 kB does not become millions of frames: the picture after the gap follows the one before it."""
    times = [k / 2 + (gap if k > 3 else 0) for k in range(12)]
    video = Video(recorded(tmp_path / name, times, bframes=0))
    seen = [number(picture) for picture in video]
    assert seen in (list(range(12)), list(range(11)))              # the last one may count as very short
    assert len(video.gaps) == 1 and video.gaps[0] == pytest.approx(gap, abs=1) and video.damaged == 0
    video.report()
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and name in err and "gaps in its clock left out: 1" in err and "damaged" not in err
    assert len(list(video)) == len(seen) and len(video.gaps) == 1                                  # counted anew


def test_a_gap_longer_than_the_file_says_is_left_out(tmp_path, monkeypatch):
    path, longest = recorded(tmp_path / "a.mkv", [0, 100, 200, 201], bframes=0), []
    monkeypatch.setattr(decoder, "promised", lambda *_: longest[-1])
    for promise, frames, gaps in ((None, 4, 2), (50.0, 4, 2), (300.0, 404, 0)):
        longest.append(promise)
        video = Video(path)
        assert abs(len(list(video)) - frames) <= 1 and len(video.gaps) == gaps, promise


def test_a_single_picture_is_one_frame(tmp_path):
    assert [number(p) for p in Video(recorded(tmp_path / "a.mp4", [0]))] == [0]


@pytest.mark.parametrize("turn", [0, 90, 180, -90])
def test_rotation_is_applied(tmp_path, turn):
    if not hasattr(av.VideoStream, "set_display_rotation"):
        pytest.skip("this PyAV cannot write a display matrix")
    corner = np.zeros((64, 96, 3), np.uint8)
    corner[:32, :48] = (250, 20, 20)                               # red, top left as stored
    video = Video(recorded(tmp_path / "a.mp4", [0, 1], turn=turn, picture=lambda k: corner))
    picture = next(iter(video))
    assert picture.shape == (*video.size, 3) == ((96, 64, 3) if turn % 180 else (64, 96, 3))
    expected = np.rot90(corner, turn // 90)                        # both count counter-clockwise
    assert np.abs(picture.astype(int) - expected).mean() < 8 and picture.flags.c_contiguous


@pytest.mark.parametrize("turn", [0, 90])
def test_large_pictures_are_scaled(tmp_path, turn):
    """To the same content, upright; and not at all, to the bit, if they are not larger."""
    corner = np.zeros((240, 360, 3), np.uint8)
    corner[:120, :180] = (250, 20, 20)
    path = recorded(tmp_path / "a.mp4", [0, 1], turn=turn, picture=lambda k: corner)
    full = Video(path)
    whole = next(iter(full))
    for largest in (360, 4000):
        same = Video(path, largest=largest)
        assert same.size == full.size and np.array_equal(next(iter(same)), whole)
    small = Video(path, largest=90)
    pictures = list(small)
    assert pictures[0].shape == (*small.size, 3) == ((90, 60, 3) if turn else (60, 90, 3))
    assert pictures[0].dtype == np.uint8 and pictures[0].flags.c_contiguous and pictures[1] is pictures[0]
    difference = np.abs(pictures[0].astype(int) - whole[2::4, 2::4])
    assert difference.mean() < 3
    assert Video(path, largest=1).size == (1, 1) == next(iter(Video(path, largest=1))).shape[:2]


def test_scaling_does_not_alias(tmp_path):
    """Stripes finer than a pixel of the small picture become grey, not other stripes."""
    stripes = np.repeat((np.arange(480) % 4 < 2)[None, :, None] * 255, 320, axis=0).repeat(3, 2).astype(np.uint8)
    picture = next(iter(Video(recorded(tmp_path / "a.mp4", [0, 1], picture=lambda k: stripes), largest=60)))
    assert abs(picture.mean() - 127) < 12 and picture[5:-5, 5:-5].std() < 12


def test_a_size_that_changes_on_the_way(tmp_path):
    times = [k / 10 for k in range(40)]
    large = recorded(tmp_path / "a.ts", times)
    small = recorded(tmp_path / "b.ts", times, picture=lambda k: np.full((32, 64, 3), 200, np.uint8))
    (tmp_path / "c.ts").write_bytes(large.read_bytes() + small.read_bytes())
    pictures = list(Video(tmp_path / "c.ts"))
    assert len(pictures) >= 15 and {picture.shape for picture in pictures} == {(64, 96, 3)}
    assert abs(pictures[-1].mean() - 200) < 5


def test_names_with_colons_and_dashes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_video("-http:x.mp4", [numbered(0)] * 3, 2)
    assert len(list(Video("-http:x.mp4"))) == 3


# ------------------------------------------------------------------------------------------------------- frugality

def test_only_kept_frames_are_converted_and_only_once(tmp_path, monkeypatch):
    convert, calls = decoder.to_rgb, []
    monkeypatch.setattr(decoder, "to_rgb", lambda frame, *rest: calls.append(frame.pts) or convert(frame, *rest))
    fast, slow = recorded(tmp_path / "a.mp4", [k / 25 for k in range(100)]), recorded(tmp_path / "b.mp4", [0, 1, 2, 3])
    assert len(list(Video(fast))) == len(calls) == len(set(calls)) == 8
    calls.clear()
    assert len(list(Video(slow))) >= 7 and len(calls) == 4


def test_frames_come_as_soon_as_the_next_picture_is_known(tmp_path, monkeypatch):
    path = recorded(tmp_path / "a.mp4", [k / 10 for k in range(50)])
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
        path = recorded(tmp_path / f"{count}.mp4", [k / 2 for k in range(count)], picture=grey)
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
    path = recorded(tmp_path / "a.mp4", [k / 10 for k in range(50)])
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
    whole = recorded(tmp_path / "a.mp4", TIMES).read_bytes()
    (tmp_path / "b.mp4").write_bytes(whole[:int(cut * len(whole))])
    with pytest.raises(BadData, match=r"b\.mp4: cannot be opened.*truncated\?"):
        Video(tmp_path / "b.mp4")


@pytest.mark.parametrize("cut", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.ts"])
def test_a_stream_cut_short_gives_what_is_there(tmp_path, name, cut):
    whole = recorded(tmp_path / name, TIMES, movflags="+faststart" if name == "a.mp4" else "").read_bytes()
    assert len(list(Video(tmp_path / name))) == 20
    (tmp_path / name).write_bytes(whole[:int(cut * len(whole))])
    video = Video(tmp_path / name)
    seen = [number(picture) for picture in video]
    assert 20 * cut - 4 <= len(seen) <= 20 * cut + 2
    assert seen[:-1] == on_screen(TIMES, 2, len(seen))[:-1]        # the last packet may be half there
    assert video.damaged >= 1 or name == "a.ts"                    # a .ts promises no length


@pytest.mark.parametrize("cut", [0.31, 0.52, 0.83])
def test_no_whole_picture_before_the_cut_is_lost(tmp_path, cut):
    path = recorded(tmp_path / "a.mp4", TIMES, movflags="+faststart")
    path.write_bytes(path.read_bytes()[:int(cut * path.stat().st_size)])
    with av.open(str(path)) as file:
        whole = sum(packet.size > 0 and not packet.is_corrupt for packet in file.demux(video=0))
    video = Video(path, 10)
    with video._open() as (container, stream):
        assert len(list(video._decode(container, stream))) == whole > 25


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.ts"])
def test_flipped_bytes_do_not_stop_the_video(tmp_path, name, seed):
    path = recorded(tmp_path / name, TIMES, movflags="+faststart" if name == "a.mp4" else "")
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
    path = recorded(tmp_path / name, [3.2 + time for time in TIMES], bframes=0)
    decode = Video._decode
    monkeypatch.setattr(Video, "_decode", lambda *a: (f for k, f in enumerate(decode(*a)) if k >= 33))
    seen = [number(picture) for picture in Video(path)]
    assert seen[:7] == [33] * 7 and seen[7:] == on_screen(TIMES, 2, 20)[7:]


def test_damage_is_reported_in_one_line(tmp_path, capsys):
    whole = recorded(tmp_path / "a.mkv", TIMES).read_bytes()
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
    header = recorded(tmp_path / "a.mp4", TIMES, movflags="+faststart").read_bytes()
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
    write_video(tmp_path / "a.mp4", (numbered(k) for k in range(30)), 2)
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
            write_video(tmp_path / name, frames(), 2)
    assert os.listdir(tmp_path) == ["old.mp4"] and (tmp_path / "old.mp4").read_bytes() == b"old"


def test_what_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BadData, match="cannot be written"):
        write_video(tmp_path / "file" / "a.mp4", [numbered(0)], 2)
    with pytest.raises(BadData, match="is a directory"):
        write_video(tmp_path, [numbered(0)], 2)
    with pytest.raises(BadData, match="no frames"):
        write_video(tmp_path / "a.mp4", [], 2)
    assert os.listdir(tmp_path) == ["file"]
