"""support/files/video.py: the picture on screen at each time, damage of every kind, and writing."""
import os
import tracemalloc
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from av.video.frame import PictureType
from av.video.reformatter import Colorspace
from PIL import Image

from beyond.streams.page import seconds_behind
from helpers import copy_packets
from support.common.errors import BadData
from support.files import video as decoder
from support.files.video import Video, write_video

TICKS = 60_000                                 # per second: the clock of the test files


def picture_of(number: int, noise: bool = True) -> np.ndarray:
    """A picture that shows its own number, 0..255: the bits are eight columns, black or white.

    The noise in its top rows makes packets that are worth damaging.
    """
    bits = [number >> bit & 1 for bit in range(8)]
    picture = np.zeros((64, 96, 3), np.uint8)
    picture[:] = 255 * np.repeat(bits, 12)[:, None]
    if noise:
        picture[:16] = np.random.default_rng(number).integers(0, 256, (16, 96, 3))
    return picture


def number(picture: np.ndarray) -> int:
    columns = picture[20:].mean((0, 2))                        # [width]
    brightness = columns.reshape(8, -1).mean(1)                # of the eight columns
    return sum(1 << bit for bit in range(8) if brightness[bit] > 128)


def numbers_in(video: Video) -> list[int]:
    return [number(picture) for picture in video]


def said_of(video: Video, capsys) -> str:
    """What a video that was read reports: one line, or nothing."""
    video.report()
    said = capsys.readouterr().err
    assert said.count("\n") <= 1
    return said


def steady(count: int, rate: float) -> list[float]:
    return [k / rate for k in range(count)]


def record(path: Path, times, turn: int = 0, bframes: int = 3, gop: int = 12, picture=picture_of,
           container: str | None = None, options: dict[str, str] | None = None,
           seconds_of_sound: float = 0, pixel: Fraction | int = 1, codec: str = "libx264",
           colours: dict[str, int] | None = None, first_b: int = 0) -> Path:
    """Write picture(k) at times[k] [s], and silence from time 0 on.

    picture     uint8, or uint16 for 10 bits
    colours     what the stream says of its colours
    first_b     no B frame is before this picture
    """
    with av.open(str(path), "w", format=container, options=options or {}) as file:
        stream = file.add_stream(codec, rate=30)
        stream.height, stream.width = picture(0).shape[:2]
        is_deep = picture(0).dtype == np.uint16
        stream.pix_fmt = "yuv444p10le" if is_deep else "yuv420p"
        stream.codec_context.time_base = Fraction(1, TICKS)
        stream.options = {"crf": "20", "preset": "ultrafast", "bf": str(bframes), "b-adapt": "0",
                          "g": str(gop), "x265-params": "vui-timing-info=0:log-level=none"}
        if turn:
            stream.set_display_rotation(turn)
        for name, value in (colours or {}).items():
            setattr(stream.codec_context, name, value)
        if pixel != 1:
            stream.codec_context.sample_aspect_ratio = pixel
        if seconds_of_sound:
            sound = file.add_stream("aac", rate=48000)
            for k in range(round(seconds_of_sound * 48000 / 1024)):
                samples = av.AudioFrame(format="fltp", layout="mono", samples=1024)
                samples.planes[0].update(bytes(4 * 1024))
                samples.rate = 48000
                samples.pts = 1024 * k
                file.mux(sound.encode(samples))
        for k, time in enumerate(times):
            frame = av.VideoFrame.from_ndarray(picture(k), format="rgb48le" if is_deep else "rgb24")
            if is_deep:
                frame = frame.reformat(format=stream.pix_fmt, dst_colorspace=Colorspace.BT2020)
            if k < first_b:
                frame.pict_type = PictureType.P
            frame.pts = round(time * TICKS)
            frame.time_base = Fraction(1, TICKS)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return path


def rewrite(source: Path, target: Path, change) -> None:
    """Copy the packets of a video; change(number, packet) gives what stands in its place."""
    with av.open(str(source)) as video, av.open(str(target), "w") as copy:
        stream = copy.add_stream_from_template(video.streams.video[0])
        for n, packet in enumerate(video.demux(video=0)):
            if packet.dts is not None:
                packet = change(n, packet)
                packet.stream = stream
                copy.mux(packet)


def on_screen(times, fps: float, count: int, start: float | None = None) -> list[int]:
    """The oracle: for i < count, the number of the last picture that is shown by i / fps.

    start   the time 0 of a player; None: that of the first picture
    """
    times = np.asarray(times) - (times[0] if start is None else start)
    return [max(0, np.searchsorted(times, i / fps + decoder.TOLERANCE, "right") - 1)
            for i in range(count)]


@pytest.mark.parametrize("name, rate, fps", [
    ("a.mp4", 30000 / 1001, 2), ("a.mkv", 10, 30), ("a.mkv", 10, 0.7), ("a.ts", 1, 2)])
def test_pictures_are_chosen_by_presentation_time(tmp_path, name, rate, fps):
    times = steady(max(5, round(2 * rate)), rate)          # at least two seconds
    video = Video(record(tmp_path / name, times), fps)
    numbers = numbers_in(video)
    assert int(fps * times[-1]) + 1 <= len(numbers) <= fps * (times[-1] + 1 / rate) + 1
    assert numbers == on_screen(times, fps, len(numbers))
    assert abs(video.frames - len(numbers)) <= 1
    assert (video.damaged, video.size) == (0, (64, 96))


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.ts"])
def test_variable_rate_with_an_offset(tmp_path, name):
    times = 3.2 + np.cumsum(np.random.default_rng(0).choice([0.02, 0.04, 0.11, 0.3, 1.7], 60))
    start = 0 if name == "a.mp4" else times[0]             # as browsers have it
    numbers = numbers_in(Video(record(tmp_path / name, times)))
    assert len(numbers) >= 2 * (times[-1] - start)
    assert numbers == on_screen(times, 2, len(numbers), start)
    if name != "a.ts":                                     # Firefox and Chromium in our page
        begin = pytest.approx(times[0], abs=0.01)
        assert np.abs(seconds_behind(tmp_path / name)).tolist() == ([begin, 0] if start == 0 else [0, begin])


@pytest.mark.parametrize("name, rate, first_b", [
    ("a.avi", 25, 0), ("a.avi", 0.2, 0), ("a.asf", 25, 0), ("a.avi", 10, 40), ("a.asf", 10, 40)])
def test_containers_without_presentation_times(tmp_path, name, rate, first_b):
    """Pictures with B frames; the container has their times of decoding alone."""
    times = steady(max(20, 2 * rate, 2 * first_b), rate)
    video = Video(record(tmp_path / name, times, gop=100, first_b=first_b))
    numbers = numbers_in(video)
    assert len(numbers) == pytest.approx(2 * len(times) / rate, abs=1)
    assert numbers == on_screen(times, 2, len(numbers)) and video.damaged == 0


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.ts"])
def test_time_0_is_that_of_the_file(tmp_path, name):
    """The sound begins 3 s before the pictures. The first picture is given until it is shown."""
    times = steady(40, 10)
    path = record(tmp_path / name, [3 + time for time in times], bframes=0, seconds_of_sound=9)
    video = Video(path)
    numbers = numbers_in(video)
    # the sound is longer, too, and nothing is missing
    assert video.frames == len(numbers) and video.damaged == 0
    # the file begins with the sound, which an encoder begins a little before its first sample
    assert numbers[:6] == [0] * 6
    assert numbers[6:14] == pytest.approx(on_screen(times, 2, 8), abs=1)


def test_without_times_a_rate_is_assumed(tmp_path, capsys):
    path = tmp_path / "a.h264"
    write_video(tmp_path / "a.mp4", map(picture_of, range(60)), 2)
    copy_packets(tmp_path / "a.mp4", path)
    for options, rate in (({}, 2), ({"framerate": "1"}, 1), ({"framerate": "10"}, 10)):
        video = Video(path, options=options)
        expected = on_screen(steady(60, rate), 2, 120 // rate)
        assert (video.rate, numbers_in(video)) == (rate, expected)
        assert f"{rate} a second are assumed" in said_of(video, capsys)


def test_a_raw_stream_that_states_no_rate(tmp_path, capsys):
    """FFmpeg gives its packets odd lengths; 25 a second are assumed."""
    for form, codec in (("hevc", "libx265"), ("m4v", "mpeg4")):
        video = Video(record(tmp_path / form, steady(100, 25), container=form, codec=codec, bframes=0))
        assert numbers_in(video) == on_screen(steady(100, 25), 2, 8)
        assert "25 a second are assumed" in said_of(video, capsys)


CORNERS = {                                    # x, y of red, green and blue, by FFmpeg's number
    1: [(0.640, 0.330), (0.300, 0.600), (0.150, 0.060)],
    9: [(0.708, 0.292), (0.170, 0.797), (0.131, 0.046)],
    12: [(0.680, 0.320), (0.265, 0.690), (0.150, 0.060)],
}


def to_xyz(primaries: int) -> np.ndarray:
    """The matrix of linear RGB, with white at D65."""
    corners = np.array([(x / y, 1, (1 - x - y) / y) for x, y in CORNERS[primaries]]).T
    return corners * np.linalg.solve(corners, [0.3127 / 0.3290, 1, 0.3583 / 0.3290])


def graded(plain: np.ndarray, transfer: int, primaries: int) -> np.ndarray:
    """uint8 [H, W, 3] as a phone would store it in HDR, uint16: its white at 203 cd/m2."""
    from_bt709 = np.linalg.solve(to_xyz(primaries), to_xyz(1))
    light = 203 * np.maximum((plain / 255) ** 2.4 @ from_bt709.T, 0)   # cd/m2
    if transfer == decoder.PQ:
        y = (light / 10_000) ** 0.1593017578125
        code = ((0.8359375 + 18.8515625 * y) / (1 + 18.6875 * y)) ** 78.84375
    else:                                                              # HLG
        light = light / 1000
        luminance = (light @ to_xyz(primaries)[1])[..., None]
        scene = light * np.maximum(luminance, 1e-6) ** (1 / 1.2 - 1)
        bright = 0.17883277 * np.log(np.maximum(12 * scene - 0.28466892, 1e-9)) + 0.55991073
        code = np.where(scene <= 1 / 12, np.sqrt(3 * scene), bright)
    return np.round(65535 * code).astype(np.uint16)


@pytest.mark.parametrize("transfer, primaries", [
    (decoder.PQ, 9), (decoder.HLG, 9), (decoder.PQ, 12), (decoder.HLG, 12), (decoder.HLG, 1)])
def test_hdr_gets_the_colours_of_ordinary_video(tmp_path, transfer, primaries):
    plain = np.random.default_rng(0).integers(0, 256, (32, 32, 3)).astype(np.uint8)
    stored = graded(plain, transfer, primaries)
    sdr = decoder.hdr_to_sdr(stored, transfer, primaries)
    error = np.abs(sdr.astype(int) - plain)             # near black, the curve is steep
    assert sdr.dtype == np.uint8 and error.mean() < 0.1 and error.max() < 10
    brightest = np.full((1, 1, 3), 65535, np.uint16)
    assert decoder.hdr_to_sdr(brightest, transfer, primaries).tolist() == [[[255, 255, 255]]]

    shown = painted(64, 96)
    colours = {"color_trc": transfer, "color_primaries": primaries, "colorspace": 9}
    picture, *_ = Video(record(tmp_path / "a.mp4", [0, 1], colours=colours,
                               picture=lambda k: graded(shown, transfer, primaries)))
    assert np.abs(picture.astype(int) - shown).mean() < 4


def painted(height: int, width: int) -> np.ndarray:
    colours = np.uint8([(200, 60, 50), (60, 180, 70), (60, 70, 190), (190, 180, 60)])
    return np.tile(np.repeat(colours, width // 4, 0), (height, 1, 1))


def test_colours_are_the_stream_s_or_else_the_container_s(tmp_path):
    """The container states BT.709, and the stream that it is unspecified."""
    def film(**colours: int) -> Path:
        return record(tmp_path / "a.mp4", [0, 1], colours=colours, picture=lambda k: painted(64, 96))

    right = next(iter(Video(film(color_trc=1, colorspace=1))))
    silent = film(color_trc=1).read_bytes()
    for content in silent, silent.replace(b"nclx\0\2\0\1\0\2", b"nclx\0\2\0\1\0\1"):
        (tmp_path / "a.mp4").write_bytes(content)
        is_right = np.array_equal(next(iter(Video(tmp_path / "a.mp4"))), right)
        assert is_right == (content != silent)
    with pytest.raises(BadData, match="a.mp4: its colours .matrix 10"):
        list(Video(film(colorspace=10)))


def test_of_several_tracks_that_of_players_is_read(tmp_path, capsys):
    plain = record(tmp_path / "0.mp4", steady(20, 10), picture=lambda k: picture_of(k, False))
    noisy = record(tmp_path / "1.mp4", steady(20, 10), picture=lambda k: picture_of(100 + k))
    with av.open(str(plain)) as a, av.open(str(noisy)) as b, av.open(str(tmp_path / "a.mp4"), "w") as two:
        streams = [two.add_stream_from_template(file.streams.video[0]) for file in (a, b)]
        for file, stream in zip((a, b), streams):
            for packet in filter(lambda packet: packet.size, file.demux()):
                packet.stream = stream
                two.mux(packet)
    video = Video(tmp_path / "a.mp4")
    assert numbers_in(video) == on_screen(steady(20, 10), 2, 4)
    assert "of several video tracks" in said_of(video, capsys)


def test_an_empty_packet_shows_the_picture_before_again(tmp_path):
    """As Theora has them. The decoder must not take it for the end."""
    path = record(tmp_path / "right.nut", steady(40, 10), bframes=0)

    def emptied(n: int, packet: av.Packet) -> av.Packet:
        if n % 12 != 11:                       # the last one before a key picture
            return packet
        empty = av.Packet(0)
        empty.pts, empty.dts, empty.time_base = packet.pts, packet.dts, packet.time_base
        return empty

    rewrite(path, tmp_path / "a.nut", emptied)
    video = Video(tmp_path / "a.nut", 10)
    expected = [number - (number % 12 == 11) for number in range(40)]
    assert (numbers_in(video), video.damaged) == (expected, 0)


@pytest.mark.parametrize("seconds", [0.4, 2.5])
def test_joined_clips(tmp_path, capsys, seconds):
    count = round(10 * seconds)
    clips = []
    for k in range(0, 60, count):
        path = record(tmp_path / "a.ts", steady(count, 10), bframes=0, picture=lambda n, k=k: picture_of(k + n))
        clips.append(path.read_bytes())
    (tmp_path / "c.ts").write_bytes(b"".join(clips))
    video = Video(tmp_path / "c.ts", 10)
    assert numbers_in(video) == list(range(len(clips) * count))
    assert (video.damaged, len(video.leaps)) == (0, len(clips) - 1)
    assert f"goes back {len(clips) - 1} times" in said_of(video, capsys)


@pytest.mark.parametrize("name, seconds", [("a.mp4", 7200), ("a.ts", 2)])
def test_one_wrong_time_moves_its_picture_alone(tmp_path, name, seconds):
    times = steady(100, 10)
    record(tmp_path / f"right-{name}", times, bframes=0)

    def late(n: int, packet: av.Packet) -> av.Packet:
        packet.pts += round(seconds / packet.time_base) * (n == 50)
        return packet

    rewrite(tmp_path / f"right-{name}", tmp_path / name, late)
    video = Video(tmp_path / name)
    assert numbers_in(video) == on_screen(times, 2, 20)
    assert (video.damaged, video.leaps) == (0, [])


@pytest.mark.parametrize("grows", [True, False])
def test_all_of_a_playlist(tmp_path, grows):
    path = record(tmp_path / "a.m3u8", steady(60, 10), bframes=0, gop=10, container="hls",
                  options={"hls_time": "1", "hls_list_size": "0"})
    whole = path.read_text()
    beginning = "#EXTINF".join(whole.split("#EXTINF")[:4])
    path.write_text(beginning if grows else whole.removesuffix("#EXT-X-ENDLIST\n"))
    numbers = []
    for picture in Video(path, 10):
        numbers.append(number(picture))
        if grows and len(numbers) == 15:
            path.write_text(whole)
    assert numbers == list(range(60))


@pytest.mark.parametrize("missing", [(), (1,), (1, 2)])
def test_missing_segments_of_a_playlist_are_told(tmp_path, missing, capsys):
    path = record(tmp_path / "a.m3u8", steady(100, 10), bframes=0, gop=20, container="hls",
                  options={"hls_time": "2", "hls_list_size": "0"})
    for part in missing:
        (tmp_path / f"a{part}.ts").unlink()
    video = Video(path)
    assert len(numbers_in(video)) == 20 and video.damaged == min(1, len(missing))
    video.report()
    assert ("missing parts" in capsys.readouterr().err) == bool(missing)


def test_seams_of_a_playlist_are_no_damage(tmp_path):
    lines = ["#EXTM3U", "#EXT-X-TARGETDURATION:4"]
    for part in range(3):
        record(tmp_path / f"{part}.ts", steady(40, 10), bframes=0, picture=lambda k: picture_of(40 * part + k))
        lines += ["#EXT-X-DISCONTINUITY", "#EXTINF:4,", f"{part}.ts"]
    (tmp_path / "a.m3u8").write_text("\n".join([*lines, "#EXT-X-ENDLIST"]))
    video = Video(tmp_path / "a.m3u8")
    assert numbers_in(video) == on_screen(steady(120, 10), 2, 24) and video.damaged == 0


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_a_film_behind_another_one_is_reported(tmp_path, capsys, name):
    """`cat a.mp4 b.mp4` is read by FFmpeg as the first one, of .mkv files the first two are read."""
    path = record(tmp_path / name, steady(20, 10))
    film = path.read_bytes()
    by_another = film.replace(b"isom", b"mp42")             # an .mkv stays as it is
    for films, lines in ((film, 0), (3 * film, 1), (film + by_another, name == "a.mp4")):
        path.write_bytes(films)
        video = Video(path)
        assert len(numbers_in(video)) <= 8
        assert said_of(video, capsys).count("another film stands behind") == lines


@pytest.mark.parametrize("name, gap", [("a.mkv", 30 * 86400), ("a.mp4", 5000), ("a.ts", 5000)])
def test_a_gap_too_long_to_be_true_is_left_out_and_reported(tmp_path, capsys, name, gap):
    times = steady(12, 2)
    times[4:] = [time + gap for time in times[4:]]
    video = Video(record(tmp_path / name, times, bframes=0))
    assert numbers_in(video)[:11] == list(range(11))         # the last may count as very short
    assert (video.leaps, video.damaged) == ([pytest.approx(gap, abs=1)], 0)
    assert f"{name}: its clock leaps or goes back 1 times" in said_of(video, capsys)


def test_times_that_stand_still_are_reported(tmp_path, capsys):
    """As some recorders write them: only one picture of five has a new time."""
    times = steady(60, 10)
    path = record(tmp_path / "right.mkv", times, bframes=0)

    def stopped(n: int, packet: av.Packet) -> av.Packet:
        packet.pts = packet.dts = packet.pts - round(n % 5 * 0.1 / packet.time_base)
        return packet

    rewrite(path, tmp_path / "a.mkv", stopped)
    for name, line in (("right.mkv", ""), ("a.mkv", "pictures have no time of their own")):
        video = Video(tmp_path / name)
        assert np.abs(np.subtract(numbers_in(video), on_screen(times, 2, 12))).max() <= 1
        said = said_of(video, capsys)
        assert line in said and bool(line) == bool(said)


def red_corner(height: int, width: int) -> np.ndarray:
    picture = np.zeros((height, width, 3), np.uint8)
    picture[:height // 2, :width // 2] = (250, 20, 20)
    return picture


@pytest.mark.parametrize("turn", [0, 90, 180, -90])
def test_pictures_are_upright_and_no_larger_than_asked_for(tmp_path, turn):
    stored = red_corner(240, 360)
    path = record(tmp_path / "a.mp4", [0, 1], turn=turn, picture=lambda k: stored)
    whole = next(iter(Video(path)))
    expected = np.rot90(stored, turn // 90)                # both count counter-clockwise
    assert np.abs(whole.astype(int) - expected).mean() < 8
    small = Video(path, largest=90)
    first, second, *_ = small
    assert small.size == ((90, 60) if turn in (90, -90) else (60, 90))
    assert first.shape == (*small.size, 3)
    assert first.dtype == np.uint8 and first.flags.c_contiguous
    assert second is first
    assert np.abs(first.astype(int) - whole[2::4, 2::4]).mean() < 3
    assert next(iter(Video(path, largest=1))).shape == (1, 1, 3)


@pytest.mark.parametrize("turns, matrix", [
    (0, (-1, 0, 0, 0, 1, 0)), (1, (0, 1, 0, 1, 0, 0)), (2, (1, 0, 0, 0, -1, 0)),
    (3, (0, -1, 0, -1, 0, 0))])
def test_mirrored_pictures(tmp_path, turns, matrix):
    """As front cameras leave them: the matrix sends (x, y) to (-x, y), and then turns it."""
    stored = red_corner(240, 360)
    path = record(tmp_path / "a.mp4", [0, 1], picture=lambda k: stored)
    content = bytearray(path.read_bytes())
    place = content.index(b"tkhd") + 44
    content[place:place + 24] = np.multiply(matrix, 1 << 16).astype(">i4").tobytes()
    path.write_bytes(content)
    picture = next(iter(Video(path)))
    expected = np.rot90(stored[:, ::-1], turns)
    assert picture.shape == expected.shape
    assert np.abs(picture.astype(int) - expected).mean() < 8


def test_a_photograph_is_turned_by_what_its_camera_says(tmp_path):
    """FFmpeg has EXIF beside the picture, which is a kind that PyAV does not know."""
    picture = red_corner(240, 360)
    exif = Image.Exif()
    exif[0x112] = 6
    Image.fromarray(np.rot90(picture)).save(tmp_path / "a.jpg", exif=exif)
    assert np.abs(next(iter(Video(tmp_path / "a.jpg"))).astype(int) - picture).mean() < 8


@pytest.mark.parametrize("pixel, size", [(Fraction(1, 2), (64, 48)), (Fraction(64, 45), (64, 137))])
def test_pixels_become_square(tmp_path, pixel, size):
    path = record(tmp_path / "a.mkv", [0, 1], pixel=pixel)
    assert Video(path).size == next(iter(Video(path))).shape[:2] == size
    assert max(Video(path, largest=50).size) == 50


def test_scaling_does_not_alias(tmp_path):
    """Stripes finer than a pixel of the small picture become grey, not other stripes."""
    stripes = np.zeros((320, 480, 3), np.uint8)
    stripes[:, ::4] = stripes[:, 1::4] = 255
    path = record(tmp_path / "a.mp4", [0, 1], picture=lambda k: stripes)
    picture = next(iter(Video(path, largest=60)))[5:-5, 5:-5]
    assert abs(picture.mean() - 127) < 12 and picture.std() < 12


def test_a_size_that_changes_on_the_way(tmp_path):
    grey = np.full((32, 64, 3), 200, np.uint8)
    large = record(tmp_path / "a.ts", steady(40, 10))
    small = record(tmp_path / "b.ts", steady(40, 10), picture=lambda k: grey)
    (tmp_path / "c.ts").write_bytes(large.read_bytes() + small.read_bytes())
    pictures = list(Video(tmp_path / "c.ts"))
    assert len(pictures) >= 15 and {picture.shape for picture in pictures} == {(64, 96, 3)}
    assert abs(pictures[-1].mean() - 200) < 5


def test_memory_does_not_grow_with_the_video(tmp_path):
    def peak(count: int) -> int:
        video = Video(record(tmp_path / f"{count}.mp4", steady(count, 2)))
        tracemalloc.start()
        assert sum(1 for _ in video) == count
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak_bytes

    assert peak(120) < peak(30) + 10 * 64 * 96 * 3           # bytes of ten pictures


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="looks for open files in /proc")
def test_the_file_is_closed_at_the_end_and_when_abandoned(tmp_path):
    path = record(tmp_path / "a.mp4", steady(50, 10))

    def is_open() -> bool:
        return path in [link.resolve() for link in Path("/proc/self/fd").iterdir()]

    frames = iter(Video(path))
    next(frames)
    assert is_open()
    frames.close()
    assert not is_open()
    assert len(list(Video(path))) == 10
    assert not is_open()


TIMES = steady(100, 10)                        # 10 s


@pytest.fixture(scope="module")
def films(tmp_path_factory) -> dict[str, bytes]:
    """Whole films of 10 s. With the index at the front, an .mp4 can be read as far as it goes."""
    folder = tmp_path_factory.mktemp("films")
    content = {}
    for name, options in (("a.mp4", {"movflags": "+faststart"}), ("a.mkv", {}), ("a.ts", {})):
        path = record(folder / name, TIMES, options=options)
        assert len(list(Video(path))) == 20
        content[name] = path.read_bytes()
    return content


@pytest.mark.parametrize("name, share", [("a.mp4", 0.3), ("a.mkv", 0.5), ("a.ts", 0.8)])
def test_a_stream_cut_short_gives_what_is_there(tmp_path, capsys, films, name, share):
    path = tmp_path / name
    path.write_bytes(films[name][:int(share * len(films[name]))])
    video = Video(path)
    numbers = numbers_in(video)
    assert 20 * share - 4 <= len(numbers) <= 20 * share + 2
    # half of the last packet may be there
    assert numbers[:-1] == on_screen(TIMES, 2, len(numbers))[:-1]
    if name != "a.ts":                         # it states no length, so nothing is missing
        assert f"{name}: {video.damaged} damaged" in said_of(video, capsys) and video.damaged


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.ts"])
def test_flipped_bytes_do_not_stop_the_video(tmp_path, films, name):
    content = bytearray(films[name])
    for position in np.random.default_rng(0).integers(4000, len(content) - 4000, 60):
        content[position] ^= 0xFF
    (tmp_path / name).write_bytes(content)
    video = Video(tmp_path / name)
    frames = list(video)
    assert 16 <= len(frames) <= 22 and {frame.shape for frame in frames} == {(64, 96, 3)}
    assert video.damaged > 0


def test_a_lost_beginning_moves_nothing(tmp_path):
    """Of 10 s, 3 s and more cannot be decoded. The first picture after them replaces them."""
    path = record(tmp_path / "a.mp4", TIMES, bframes=0)
    content = bytearray(path.read_bytes())
    with av.open(str(path)) as file:
        for lost, packet in enumerate(file.demux(video=0)):
            if packet.is_keyframe and packet.pts * packet.time_base > 3:
                break
            content[packet.pos:packet.pos + packet.size] = bytes(packet.size)
    path.write_bytes(content)
    video = Video(path)
    numbers = numbers_in(video)
    assert numbers[:7] == [lost] * 7
    assert numbers[-10:] == on_screen(TIMES, 2, 20)[-10:]
    assert len(numbers) == 20 and video.damaged == lost


CUE = "1\n00:00:01,000 --> 00:00:02,000\nYou sit.\n"


def write_hollow(path: Path, films) -> None:
    content = films["a.mp4"]
    head = content[:content.index(b"mdat") + 4]
    path.write_bytes(head + bytes(len(content)))


def write_list(path: Path, films) -> None:
    (path.parent / "b.mp4").write_bytes(films["a.mp4"])
    path.write_text("ffconcat version 1.0\nfile b.mp4\nfile b.mp4\n")


@pytest.mark.parametrize("name, make, message", [
    ("file:gone.mp4", lambda path, films: None, "no such file; a video file"),
    ("pipe.mp4", lambda path, films: os.mkfifo(path), "no such file; a video file"),
    ("text.txt", lambda path, films: path.write_text("dear diary\n" * 100), "text file"),
    ("hollow.mp4", write_hollow, "not one picture"),
    ("a.srt", lambda path, films: path.write_text(CUE), "no video stream"),
    ("a.ffconcat", write_list, "list of films"),
])
def test_what_is_no_video_is_named(tmp_path, films, name, make, message):
    path = tmp_path / name
    make(path, films)
    with pytest.raises(BadData, match=message) as raised:
        Video(path)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


def test_written_video_is_read_back(tmp_path):
    path = tmp_path / "a.mp4"
    write_video(path, (picture_of(k) for k in range(30)), 2)
    video = Video(path)
    assert numbers_in(video) == list(range(30))
    assert (video.frames, video.duration, video.size) == (30, 15, (64, 96))
    # the index comes first, so that the video can be played while it loads
    content = path.read_bytes()
    assert content.index(b"moov") < content.index(b"mdat")
    assert os.listdir(tmp_path) == ["a.mp4"]


def test_an_interrupted_video_leaves_nothing_behind(tmp_path):
    def frames():
        yield from map(picture_of, range(20))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_video(tmp_path / "a.mp4", frames(), 2)
    assert os.listdir(tmp_path) == []
