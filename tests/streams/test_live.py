"""beyond/streams/live.py: sources that are no files, without hardware. Only 127.0.0.1 is contacted."""
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from math import inf
from pathlib import Path
from types import SimpleNamespace

import av
import pytest

from beyond.commands import stream_command
from helpers import ROOT, TOY, copy_packets, resident_bytes, tiny
from beyond.streams import live, suspend
from beyond.streams.live import Camera, address
from beyond.streams.inputs import Input
from beyond.streams.subtitles import cut
from support.common.disk import read_jsonl as rows_of
from support.common.errors import BadData
from support.common.iterate import prefetch
from support.files.sources import source_of
from support.files.video import Video
from test_commands import call
from test_data import write_toy
from test_video import number, picture_of, record, steady

MODEL = ["--device", "cpu", "--model", str(TOY)]
LAVFI = "lavfi:testsrc=size=64x48:rate=25,realtime"


class Sender(ThreadingHTTPServer):
    """Sends MPEG-TS for ever, 20 pictures a second, which say the time, in tenths of a second.

    mode    ok; frozen: nothing more comes; trickle: a byte now and then; garbage; dead: hangs up;
            picture: a single one, as a snapshot; web camera: 50 of them, without times or an end
    """
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Stream)
        self.mode = "ok"
        self.began = live.uptime()
        self.url = f"http://127.0.0.1:{self.server_port}/door"

    def handle_error(self, *_):
        """A client that hangs up is no error."""


class Stream(BaseHTTPRequestHandler):
    """Answers a request to a Sender. It is also the file to which av writes."""

    def log_message(self, *_):
        pass

    def write(self, data):
        for begin in range(0, len(data), 188):
            while self.server.mode == "frozen":
                time.sleep(0.02)
            if self.server.mode == "dead":
                raise ConnectionError
            while self.server.mode == "trickle":
                self.wfile.write(data[begin:begin + 1])
                time.sleep(0.1)
            packet = data[begin:begin + 188]
            if self.server.mode == "garbage":
                packet = os.urandom(188)
            self.wfile.write(packet)
        return len(data)

    def tenths(self) -> int:
        return int(10 * (live.uptime() - self.server.began)) & 255

    def do_GET(self):
        if self.server.mode == "dead":
            self.send_error(503)
            return
        self.send_response(200)
        self.end_headers()
        if self.server.mode in ("picture", "web camera"):
            form, count = ("mjpeg", 1) if self.server.mode == "picture" else ("mpjpeg", 50)
            with av.open(self.wfile, "w", format=form) as out:
                video = out.add_stream("mjpeg", rate=1)
                video.width, video.height, video.pix_fmt = 96, 64, "yuvj420p"
                for _ in range(count):
                    out.mux(video.encode(av.VideoFrame.from_ndarray(picture_of(0), format="rgb24")))
            return
        with av.open(self, "w", format="mpegts", options={"flush_packets": "1"}) as out:
            video = out.add_stream("libx264", rate=20)
            video.width, video.height, video.pix_fmt = 96, 64, "yuv420p"
            video.options = {"preset": "ultrafast", "tune": "zerolatency", "g": "5"}
            while True:
                picture = picture_of(self.tenths(), noise=False)
                out.mux(video.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
                time.sleep(0.05)


@contextmanager
def serve(server):
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server
    finally:
        server.mode = "dead"
        server.shutdown()
        server.server_close()


@pytest.fixture
def sender():
    with serve(Sender()) as server:
        yield server


@pytest.fixture
def messages(monkeypatch):
    """What cameras say on stderr: (time, camera, message)."""
    lines = []

    def say(self, message):
        lines.append((time.monotonic(), self, message))

    monkeypatch.setattr(live.Camera, "say", say)
    return lines


def until(condition, seconds: float = 10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_what_is_live():
    live_ones = ["camera", "camera:1", "camera:USB 2.0", "/dev/video0", "rtsp://a/b", "RTSPS://a",
                 "rtmp://a", "srt://a", "udp://@:5000", "rtp://a", "tcp://a:1", "lavfi:testsrc"]
    files = ["a.mp4", "./camera", "cameras/a.mp4", r"C:\a.mp4", "a:b.mp4", "x.safetensors:a", "file:///a.mp4"]
    if_asked = ["-", "http://a/b.mp4", "HTTPS://a", "ftp://a/b.mp4"]
    every = live_ones + files + if_asked
    kinds = {kind: [given for given in every if source_of(given).kind == kind]
             for kind in ("live", "pipe")}
    assert kinds == {"live": live_ones, "pipe": if_asked}
    assert all(source_of(given, live=True).is_live for given in if_asked)
    with pytest.raises(BadData, match="--live"):
        source_of("a.mp4", live=True)


def test_options_of_ffmpeg():
    file, form, options = address("rtsp://a", {"max_delay": "1", "x": "y"})
    assert (file, form, options["rtsp_transport"]) == ("rtsp://a", None, "tcp")
    assert options["max_delay"] == "1" and options["x"] == "y"
    if sys.platform == "linux":
        assert address("camera:2", {})[:2] == ("/dev/video2", "v4l2")


@pytest.mark.parametrize("frame_s, sentence_s, latest", [
    (0, 0.02, 0.3),                             # fast enough: nothing is dropped
    (0.09, 0.6, 1.3),                           # far too slow
])
def test_latency_is_bounded(frame_s, sentence_s, latest):
    """A narrator takes frame_s for a frame, and sentence_s more at every sixth. In one of three
    attempts: in real time, pauses of the machine count, too.
    """
    for _ in range(3):
        source = Camera("lavfi:testsrc=size=64x48:rate=50,realtime", fps=10)
        worst = 0.0
        for t, _ in enumerate(islice(source, 12)):
            time.sleep(frame_s + (sentence_s if t % 6 == 5 else 0))
            worst = max(worst, live.uptime() - source.arrived)
        is_fast = frame_s == 0
        if worst < latest and is_fast == (source.dropped == 0):
            assert source.decoded > 4 * source.taken
            return
    pytest.fail(f"{worst} s late, {source.dropped} dropped")


def test_pictures_are_those_of_the_moment(sender):
    source = Camera(sender.url, fps=10)
    for picture in islice(source, 10):
        tenths = 10 * (source.arrived - sender.began)
        assert abs(number(picture) - tenths) < 6


def given(monkeypatch, source, arrivals, clock, key=50, decoding=0.0):
    """Packets that come at these times, with a clock of so many seconds from one to the next; every
    so many is a key frame -> (number, turn, when it is given) of those that are to be decoded, which
    takes `decoding` s, and their camera.
    """
    now = [0.0]
    monkeypatch.setattr(live, "uptime", lambda: now[0])
    monkeypatch.setattr(live, "time", SimpleNamespace(
        sleep=lambda s: now.append(now.pop() + s), monotonic=time.monotonic))
    decoder = SimpleNamespace(flush_buffers=lambda: None)
    stream = SimpleNamespace(time_base=clock, codec_context=decoder)

    def demux():
        for n, came in enumerate(arrivals):
            now[0] = max(now[0], came)
            yield SimpleNamespace(stream=stream, dts=n, is_keyframe=n % key == 0)

    camera = Camera(source)
    camera.newest_at = inf
    packets = []
    container = SimpleNamespace(demux=demux, format=SimpleNamespace(flags=0))
    for packet, turn in camera._in_turn(container, stream):
        packets.append((packet.dts, turn, now[0]))
        now[0] += decoding
    return packets, camera


@pytest.mark.parametrize("segment", [2, 6, 12])
def test_segments_are_given_at_the_pace_of_their_clock(monkeypatch, segment):
    """Three are there. After a while they come 50 s later: it goes on at the newest key frame."""
    arrivals = [segment * (n // (25 * segment) - 2) + 50 * (n >= 2100) for n in range(25 * 300)]
    packets, camera = given(monkeypatch, "http://a/b.m3u8", arrivals, 1 / 25)
    assert all(0 <= when - turn < live.LATE for _, turn, when in packets)
    turns = [turn for _, turn, _ in packets]
    steps = sorted(later - turn for turn, later in zip(turns, turns[1:]))
    stall = steps.pop()
    assert 0.039 < steps[0] <= steps[-1] < 0.041
    assert 50 - 2 * segment <= stall < 51
    assert camera.dropped == len(arrivals) - len(packets) <= 25 * 2 * segment
    assert camera.behind == pytest.approx(50 - 2 * segment, abs=0.2)


@pytest.mark.parametrize("clock, decoding, key, all_decoded", [
    (0.02, 1 / 60, 250, True),                  # fast enough
    (0.019998, 1 / 60, 250, True),              # the camera's clock is slow
    (0.02, 1 / 49, 250, False),                 # by a little too slow
    (0.02, 1 / 18, 50, False),
    (0.02, 1 / 18, 800, False),
])
def test_a_slow_decoder_stays_near_its_stream(monkeypatch, clock, decoding, key, all_decoded):
    arrivals = [n / 50 for n in range(50 * 600)]
    packets, camera = given(monkeypatch, "rtsp://a", arrivals, clock, key, decoding)
    late = max(when - arrivals[n] for n, _, when in packets)
    assert late < 2
    assert camera.behind >= late - 0.1 and camera.dropped == len(arrivals) - len(packets)
    assert (camera.dropped == 0) == all_decoded
    assert len(packets) > len(arrivals) / 30


def test_until_the_first_picture_it_is_told_what_comes(sender, messages, monkeypatch):
    monkeypatch.setattr(live, "PATIENCE", 0.3)
    monkeypatch.setattr(live, "LONGEST_PAUSE", 0.1)
    sender.mode = "frozen"
    threading.Timer(0.6, setattr, (sender, "mode", "ok")).start()
    next(iter(Camera(sender.url)))
    texts = [text for _, _, text in messages]
    assert texts[0] == "no picture yet"
    assert "no pictures (nothing came for 0.3 s); trying again" in texts


def test_what_has_no_end_is_no_recording(sender, tmp_path):
    sender.mode = "web camera"
    with pytest.raises(BadData, match="states no end; give --live"):
        Video(sender.url)
    assert len(list(islice(Camera(sender.url), 1))) == 1
    write_toy(tmp_path / "a.mp4", 1, 0.1)
    copy_packets(tmp_path / "a.mp4", tmp_path / "a.ts")
    playlist = tmp_path / "a.m3u8"
    playlist.write_text("#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\na.ts\n")
    handler = partial(QuietHandler, directory=tmp_path)
    with serve(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as server:
        url = f"http://127.0.0.1:{server.server_port}/a.m3u8"
        with pytest.raises(BadData, match="states no end; give --live"):
            Video(url)
        playlist.write_text(playlist.read_text() + "#EXT-X-ENDLIST\n")
        assert Video(url).duration == 1
        with pytest.raises(BadData, match="states its end; without --live"):
            list(Camera(url))


def test_a_live_playlist_that_gets_its_last_line_ends(tmp_path, messages):
    record(tmp_path / "a.ts", steady(20, 10), bframes=0)
    playlist = tmp_path / "a.m3u8"
    playlist.write_text("#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\na.ts\n")
    handler = partial(QuietHandler, directory=tmp_path)
    with serve(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as server:
        numbers = []
        for picture in Camera(f"http://127.0.0.1:{server.server_port}/a.m3u8"):
            numbers.append(number(picture))
            if len(numbers) == 2:
                playlist.write_text(playlist.read_text() + "#EXT-X-ENDLIST\n")
    assert numbers == sorted(set(numbers)) and numbers[-1] >= 14            # once, and all of it


class Eyes:
    """A vision encoder: a picture's mean brightness. After `left` pictures, Ctrl-C comes."""
    image_size = 48

    def __init__(self, left=inf):
        self.left = left

    def __call__(self, pictures):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        brightness = pictures.float().mean((1, 2, 3))                          # [T]
        return brightness[:, None, None].expand(-1, 10, 32) / 255              # [T, 10, 32]


def arguments(*words):
    return stream_command.make_parser().parse_args(["x", "--lookahead=1", *words])


def test_a_source_that_goes_bad_is_noticed(messages, monkeypatch):
    monkeypatch.setattr(live, "PATIENCE", 1.0)
    monkeypatch.setattr(live, "LONGEST_PAUSE", 0.1)

    def texts_of(source):
        return [text for _, camera, text in messages if camera is source]

    with ExitStack() as stack:
        senders = [stack.enter_context(serve(Sender())) for _ in range(3)]
        cameras = [Camera(sender.url, fps=10) for sender in senders]
        watching = []
        for source in cameras:
            watching.append(threading.Thread(target=list, args=(source,), daemon=True))
            watching[-1].start()
        until(lambda: all(source.taken > 2 for source in cameras))

        for sender, mode in zip(senders, ("frozen", "trickle", "garbage")):
            sender.mode = mode
        since = time.monotonic()
        until(lambda: all(texts_of(source) for source in cameras))
        for said_at, _, text in messages[:3]:
            assert said_at - since < 1.0 + 1 and text.startswith("no pictures (")

        for sender in senders:
            sender.mode = "ok"
        until(lambda: all(texts_of(source)[-1] == "pictures come again" for source in cameras))
        for source, thread in zip(cameras, watching):
            source.close()
            thread.join(1)
            assert not thread.is_alive() and not source.thread.is_alive()


def test_dead_at_the_start(sender, messages):
    sender.mode = "dead"
    for url, reason in ((sender.url, "503|5XX"), ("rtsp://127.0.0.1:9/x", "refused")):
        with pytest.raises(BadData, match=rf"^\w+://[\w.:]+/\.\.\.: .*({reason})") as error:
            next(iter(Camera(url)))
        assert "\n" not in str(error.value)
    sender.mode = "picture"
    with pytest.raises(BadData, match="no pictures .*; check the source"):
        list(Camera(sender.url))
    assert not messages


def test_pauses_between_attempts_grow_up_to_the_longest(monkeypatch, messages):
    def watch(source, patience):
        if source.decoded:
            raise BadData("gone")
        yield from 2 * [(0.0, None)]

    monkeypatch.setattr(Camera, "_watch", watch)
    source = Camera("lavfi:testsrc", retries=8)
    pauses = []
    monkeypatch.setattr(source.closed, "wait", pauses.append)
    with pytest.raises(BadData, match="no pictures at attempt 9"):
        list(source._pictures())
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux")
def test_many_outages(monkeypatch, messages):
    monkeypatch.setattr(live, "LONGEST_PAUSE", 0)
    source = Camera("lavfi:testsrc=size=64x48:rate=25:duration=0.2", fps=1e6)
    pictures = iter(source)
    sizes = []                                 # (bytes, threads)
    for outages in (10, 40):
        while source.reconnects < outages:
            next(pictures)
        gc.collect()
        sizes.append((resident_bytes(), threading.active_count()))
    (bytes_before, threads_before), (bytes_after, threads_after) = sizes
    assert bytes_after - bytes_before < 5e6 and threads_after <= threads_before
    pictures.close()
    until(lambda: not source.thread.is_alive())


def at_every_frame(**changes):
    return tiny(last_k=2, fps=10.0, theta=1.0, theta_low=1.0, max_new_tokens=2, **changes)


def narrate_live(folder, model, names, count, eyes=Eyes()):
    """Narrate `count` frames of a live source -> its input, and its Decisions and rows."""
    files = {name: str(folder / name) for name in names}
    run = stream_command.NarratedInput(Input(source_of(LAVFI), "", files))
    items = run.decisions(model, eyes, arguments())
    first_items = list(islice(items, count))
    items.close()
    return run, first_items


def test_a_camera_goes_on(tmp_path):
    """Numbers go on, and so does time, by the wall clock. Even with an old state, as after a kill, no
    sentence reaches back to before the start, no number comes twice, and no line is lost."""
    model = at_every_frame()
    names = ("jsonl", "trace", "state")
    first_run, before = narrate_live(tmp_path, model, names, 6)
    old_state = (tmp_path / "state").read_bytes()
    time.sleep(0.4)
    second_run, after = narrate_live(tmp_path, model, names, 3)
    numbers = [row["n"] for row in rows_of(tmp_path / "jsonl")]
    assert numbers == list(range(9)) == [step.frame for step, _ in before + after]
    last_end = before[-1][1]["end"]
    assert after[0][1]["start"] - last_end > 0.3        # the pause is in no sentence
    passed = second_run.video.arrived - first_run.video.arrived     # by the monotonic clock
    assert abs(after[-1][1]["end"] - last_end - passed) < 0.1
    assert [row["frame"] for row in rows_of(tmp_path / "trace")] == list(range(9))

    (tmp_path / "state").write_bytes(old_state)
    texts = {name: (tmp_path / name).read_text() for name in ("jsonl", "trace")}
    time.sleep(0.2)                                     # loading a model takes longer
    _, [(step, row)] = narrate_live(tmp_path, model, names, 1)
    assert step.frame == row["n"] == 9 and row["start"] > after[-1][1]["end"]
    for name, text in texts.items():
        assert (tmp_path / name).read_text().startswith(text)


def test_a_camera_appends(tmp_path, capsys):
    """Whole lines of an earlier run stay, and half ones, as of a killed process, go; it is told."""
    half_lines = {"jsonl": '{"n": 6, "fra', "srt": "7\n00:00:00,6", "trace": '{"frame": 6',
                  "vtt": "00:00:00.600 --> 00:00:00.700\nYou l"}
    model = at_every_frame()
    narrate_live(tmp_path, model, half_lines, 2)
    for _ in range(2):
        for name, half_line in half_lines.items():
            with open(tmp_path / name, "a") as file:
                file.write(half_line)
        narrate_live(tmp_path, model, half_lines, 2)
    for name in ("jsonl", "trace"):
        assert [row["frame"] for row in rows_of(tmp_path / name)] == [0, 1, 0, 1, 0, 1]
    assert (tmp_path / "srt").read_text().count(" --> ") == 6
    text = (tmp_path / "vtt").read_text()
    assert text.count("WEBVTT") == 1 and text.count(" --> ") == 6
    told = capsys.readouterr().err.count("its last line or cue is not whole, and is cut off")
    assert told == 2 * len(half_lines)


def test_a_file_with_other_line_breaks_is_not_cut(tmp_path):
    path = tmp_path / "a.srt"
    path.write_bytes(b"1\r\n00:00:01,000 --> 00:00:02,000\r\nA.\r\n\r\n")
    size = path.stat().st_size
    with pytest.raises(BadData, match="a.srt: has other line breaks"):
        cut("srt", str(path))
    assert path.stat().st_size == size


def test_a_camera_is_interrupted(tmp_path):
    model = at_every_frame(max_segment=30.0)
    model.config.theta = model.config.theta_low = -1.0       # only the first frame is narrated
    names = ("jsonl", "trace", "state")
    with pytest.raises(KeyboardInterrupt):
        narrate_live(tmp_path, model, names, None, Eyes(5))
    rows = rows_of(tmp_path / "trace")
    assert [row["frame"] for row in rows] == list(range(5))
    model.config.theta = model.config.theta_low = 1.0
    _, [(step, row)] = narrate_live(tmp_path, model, names, 1)
    assert (step.frame, row["n"]) == (5, 1)
    assert row["start"] >= rows[-1]["time"] - 0.1


@pytest.fixture
def kept_signals():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("line, count", [
    ("URL --live", 2),                          # and a line of the bounds of a live source
    ("URL", 1),
    ("rtsp://u:SECRET@127.0.0.1:9/x", 2),
    ("a.mp4 --serve rtsp://u:SECRET@a/user=SECRET?token=SECRET", 1),
    ("camera --source-option SECRET", 1),
    ("file://u:SECRET@a/b.mp4", 1),             # taken for a file
])
def test_no_password_in_any_output(sender, tmp_path, kept_signals, line, count):
    sender.mode = "dead"
    line = line.replace("URL", sender.url.replace("//", "//user:SECRET@") + "?token=SECRET")
    jsonl = tmp_path / "n.jsonl"
    code, errors = call(stream_command, [*line.split(), *MODEL, "--jsonl", str(jsonl)])
    lines = [line for line in errors.splitlines()
             if line.strip() and not line.startswith("streaming: ")]
    assert code != 0 and len(lines) == count and "error: " in lines[-1], errors
    assert "SECRET" not in errors and not jsonl.exists()
    assert "/..." in lines[-1] or "a.mp4" in line or "option" in line


def narrations(source, tmp_path):
    jsonl = tmp_path / "n.jsonl"
    code, errors = call(stream_command, [source, *MODEL, "--jsonl", str(jsonl)])
    assert code == 0, errors
    return jsonl.read_text()


@contextmanager
def file_at_stdin(path):
    """Within it, a pipe gives the file's bytes at stdin."""
    read_end, write_end = os.pipe()
    stdin = os.dup(0)
    os.dup2(read_end, 0)
    os.close(read_end)

    def feed():
        with open(write_end, "wb") as pipe:
            pipe.write(path.read_bytes())

    threading.Thread(target=feed, daemon=True).start()
    try:
        yield
    finally:
        os.dup2(stdin, 0)
        os.close(stdin)


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


class BreaksOff(QuietHandler):
    """Sends the first half of a file, hangs up, and from then on sends nothing of it."""
    sent = set()

    def do_GET(self):
        if self.path in self.sent:
            self.send_error(503)
            return
        self.sent.add(self.path)
        data = Path(self.translate_path(self.path)).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:len(data) // 2])


def test_pipe_and_network_are_as_the_file(tmp_path, monkeypatch, kept_signals):
    """Nothing is left out. A connection that breaks off is no end: the state goes on when the server
    is well again, and the files are as if nothing had been."""
    file = tmp_path / "a.mp4"
    write_toy(file, 1, 0.3)
    copy_packets(file, tmp_path / "a.ts")
    expected = narrations(str(file), tmp_path)
    assert expected.count("\n") > 3
    with file_at_stdin(file):
        assert narrations("-", tmp_path) == expected

    jsonl = tmp_path / "n.jsonl"
    outputs = ["--jsonl", str(jsonl), *MODEL, "--state", str(tmp_path / "s")]
    monkeypatch.setattr(suspend, "EVERY", 0.0)          # saved whenever this is possible
    handler = partial(BreaksOff, directory=tmp_path)
    with serve(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as server:
        url = f"http://127.0.0.1:{server.server_port}/a.mp4"
        of_no_length = [url.replace(".mp4", ".ts"), *MODEL]
        for line in (of_no_length, [url, *outputs]):
            code, errors = call(stream_command, line)
            assert code == 1 and "broke off before its end" in errors
        server.RequestHandlerClass = partial(QuietHandler, directory=tmp_path)
        code, errors = call(stream_command, [url, *outputs])
        assert code == 0 and "goes on after" in errors
    assert jsonl.read_text() == expected
    assert call(stream_command, ["http://127.0.0.1:9/a.mp4", *outputs[:-2]])[0] == 1
    assert jsonl.read_text() == expected


def test_rare_pictures_are_no_outage():
    """At a picture every 20 s, 20 s without one say nothing."""
    for fps, gap, expected in ((2, 9, 0), (2, 11, 1), (0.05, 21, 0), (0.05, 61, 1), (2, inf, 1)):
        source = Camera("camera", fps)
        source.gap = gap
        assert source.after_outage == expected


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="Linux's clock")
def test_a_machine_that_sleeps_has_an_outage(monkeypatch):
    """Its monotonic clock stands still meanwhile, the time of the stream does not."""
    asleep = [0.0]
    clock = time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda which: clock(which) + asleep[0])
    source = Camera(LAVFI, fps=10)
    pictures = iter(source)
    next(pictures)
    asleep[0] = 3600
    gaps = [source.gap for _ in islice(pictures, 9)]
    pictures.close()
    assert 3600 <= max(gaps) < 3610
    assert source.time > 3600 and source.begin >= 3600


def test_a_recording_waits_for_whoever_reads_it(sender):
    threads = threading.active_count()
    pictures = prefetch(Video(sender.url, fps=20), 4)
    first = number(next(pictures))
    time.sleep(0.6)
    assert number(next(pictures)) - first < 3          # tenths of a second
    pictures.close()
    sender.mode = "dead"
    until(lambda: threading.active_count() <= threads)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["frozen", "stdin"])
def test_interrupted_while_it_waits_for_the_first_picture(sender, tmp_path, mode):
    sender.mode = mode
    source = ["-"] if mode == "stdin" else [sender.url, "--live"]
    words = [sys.executable, "stream.py", *source, *MODEL, "--jsonl", str(tmp_path / "n.jsonl")]
    process = subprocess.Popen(words, cwd=ROOT, text=True, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until((tmp_path / ".n.jsonl.lock").exists, 60)
    time.sleep(2)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert time.monotonic() - began < 5         # 0.3 to 0.8 on a quiet machine
    assert process.returncode == 130, errors
    assert "Traceback" not in errors and "interrupted" in errors, errors
    assert not (tmp_path / "n.jsonl").exists()
