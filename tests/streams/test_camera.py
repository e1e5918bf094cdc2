"""streams/camera.py, streams/sources.py: sources that are no files, without hardware. Only 127.0.0.1
is contacted."""
import argparse
import gc
import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, redirect_stdout
from datetime import datetime
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path

import av
import numpy as np
import pytest

import narrator as nar
import stream
from commands import stream as stream_command
from commands.data import write_toy
from commands.stream import restarted
from helpers import ROOT, TOY, narrate, tiny, video
from streams import camera, sources
from streams.camera import Camera, Recording
from streams.bounds import open_stream
from streams.subtitles import outputs
from streams.together import DirectPasses, Failed, side_by_side
from support.common.errors import BadData
from support.files.features import pairs
from support.files.video import Video
from test_commands import call
from test_video import number, picture_of

LONG = 5                                # seconds to end after Ctrl-C; 0.3 to 0.8 on a quiet machine


# ------------------------------------------------------------------ a camera in this process

class Sender(ThreadingHTTPServer):
    """Sends MPEG-TS for ever, 20 pictures a second. Each picture says the time, in tenths of a
    second since the beginning.

    mode    ok
            still: always the same picture
            frozen: nothing more comes
            trickle: a byte now and then
            garbage: random bytes
            dead: hangs up
    """
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Stream)
        self.mode = "ok"
        self.began = time.monotonic()
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
        if self.server.mode == "still":
            return 0
        return int(10 * (time.monotonic() - self.server.began)) & 255

    def do_GET(self):
        if self.server.mode == "dead":
            self.send_error(503)
            return
        self.send_response(200)
        self.end_headers()
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


def lavfi(rate: int = 25, more: str = "") -> str:
    return f"lavfi:testsrc=size=64x48:rate={rate}{more},realtime"


@pytest.fixture
def messages(monkeypatch):
    """What cameras say on stderr: (time, camera, message)."""
    lines = []

    def say(self, message):
        lines.append((time.monotonic(), self, message))

    monkeypatch.setattr(camera.Camera, "say", say)
    return lines


def until(condition, seconds: float = 10):
    """Wait until the condition holds."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


# ------------------------------------------------------------------ names

def test_what_is_live():
    for source in ("camera", "camera:1", "camera:USB 2.0", "/dev/video0", "rtsp://a/b",
                   "RTSPS://a", "rtmp://a", "srt://a", "udp://@:5000", "rtp://a", "tcp://a:1",
                   "lavfi:testsrc"):
        assert sources.is_live(source), source
        assert not sources.is_pipe_or_url(source), source
    for source in ("a.mp4", "./camera", "cameras/a.mp4", r"C:\a.mp4", "a:b.mp4", "x.safetensors:a",
                   "file:///a.mp4"):
        assert not sources.is_live(source), source
        assert not sources.is_pipe_or_url(source), source
    for source in ("-", "http://a/b.mp4", "HTTPS://a"):
        assert not sources.is_live(source), source
        assert sources.is_live(source, True), source
        assert sources.is_pipe_or_url(source), source
    with pytest.raises(BadData, match="--live"):
        sources.is_live("a.mp4", True)
    with pytest.raises(BadData, match="two commands"):
        sources.all_live(["a.mp4", "camera"])


def test_secrets_are_in_no_name_and_no_message():
    source = "rtsp://u:SECRET@a/user=SECRET?token=SECRET"
    assert sources.source_name(source) == "a"
    code, errors = call(stream_command, ["a.mp4", "--serve", source])
    assert code == 2
    assert "SECRET" not in errors and "rtsp://a/..." in errors


@pytest.mark.parametrize("source", ["file://u:SECRET@a/b.mp4", "file:///a.mp4?token=SECRET"])
def test_a_wrong_address_is_no_file_name(source):
    """An address that is taken for a file is masked, too."""
    with pytest.raises(BadData, match=r"file://.*/\.\.\.: no such file") as error:
        Video(source)
    assert "SECRET" not in str(error.value)


def test_names_of_several(tmp_path):
    inputs = ["rtsp://u:p@10.0.0.7/door", "rtsp://10.0.0.8:554/door", "camera:1", "/dev/video2",
              "-", "a/b.mp4"]
    args = argparse.Namespace(input=inputs, jsonl=str(tmp_path), srt=None, vtt=None, trace=None,
                              state=None)
    names = [name for _, name, _ in outputs(args)]
    assert names == ["10.0.0.7", "10.0.0.8-554", "camera-1", "video2", "stdin", "b"]


def test_cameras_that_differ_in_what_is_masked():
    """Their outputs are numbered, in the order of the inputs, and so are their messages."""
    one = "rtsp://a/live?channel=1&password=SECRET"
    two = "rtsp://a/live?channel=2&password=SECRET"
    names = sources.source_names([one, "rtsp://b", two])
    assert names == ["a-1", "b", "a-2"]
    assert sources.source_names(["rtsp://u:SECRET@a", "rtsp://u:OTHER@a"]) == ["a-1", "a-2"]
    args = argparse.Namespace(source_option=[], live=False, retries=None, input=[one, two])
    cameras = [camera.open_pictures(source, 2, None, args, None) for source in (one, two)]
    shown = "rtsp://a/..."
    assert [each.name for each in cameras] == [f"{shown} (input 1)", f"{shown} (input 2)"]


@pytest.mark.parametrize("inputs", [
    ["rtsp://a/live?channel=1", "rtsp://a/live?channel=1"],
    ["b.mp4", "c/b.mkv"],
])
def test_inputs_of_one_name_are_refused(inputs):
    with pytest.raises(BadData, match="several inputs are called"):
        sources.source_names(inputs)


def test_options_of_ffmpeg():
    file, form, options = sources.address("rtsp://a", True, {"max_delay": "1", "x": "y"})
    assert (file, form) == ("rtsp://a", None)
    assert options["rtsp_transport"] == "tcp"
    assert "nobuffer" in options["fflags"]
    assert options["max_delay"] == "1" and options["x"] == "y"
    _, _, options = sources.address("rtp://a", True, {})
    assert "overrun_nonfatal" in options
    assert sources.address("-", False, {}) == ("pipe:0", None, {})
    file, form, _ = sources.address("lavfi:testsrc", True, {})
    assert (file, form) == ("testsrc", "lavfi")
    if sys.platform == "linux":
        file, form, _ = sources.address("camera", True, {})
        assert (file, form) == ("/dev/video0", "v4l2")
        with pytest.raises(BadData, match="no such camera"):
            sources.address("camera:nowhere", True, {})


# ------------------------------------------------------------------ the newest pictures

def watched(frame_s: float, sentence_s: float, seconds: float) -> tuple[Camera, float]:
    """A camera of 50 pictures a second, watched at 10 frames a second by a narrator that takes
    frame_s for a frame, and sentence_s more at every ninth; and the worst latency."""
    source = Camera(lavfi(50), fps=10)
    worst = 0.0
    end = time.monotonic() + seconds
    for t, _ in enumerate(source):
        time.sleep(frame_s)
        if t % 9 == 8:
            time.sleep(sentence_s)
        worst = max(worst, time.monotonic() - source.arrived)
        if time.monotonic() > end:
            return source, worst


def attempt(frame_s: float, sentence_s: float, seconds: float, good) -> Camera:
    """Of three attempts, the first whose source and latency are good: in real time, pauses of the
    machine count, too."""
    attempts = []
    for _ in range(3):
        source, worst = watched(frame_s, sentence_s, seconds)
        if good(source, worst):
            return source
        attempts.append((vars(source), worst))
    pytest.fail(str(attempts))


def test_a_narrator_that_is_fast_enough(messages):
    """Nothing is dropped. In the end, the numbers are said."""
    def good(source, worst):
        return (source.dropped == 0 and worst < 0.3 and 12 <= source.count <= 19
                and source.decoded > 4 * source.count)

    attempt(0, 0.02, 1.5, good).report()
    _, _, message = messages[-1]
    assert re.search(r"decoded, \d+ taken, 0 dropped; 0 reconnects; no sentences$", message)


def test_latency_is_bounded():
    """Five times as fast as in real use: at most 0.9 s late; a little more if the narrator is far
    too slow."""
    attempt(0.06, 0.3, 2, lambda source, worst: worst < 0.9 and source.dropped < 0.2 * source.count)
    attempt(0.09, 0.6, 2, lambda source, worst: worst < 1.3 and 0 < source.dropped < source.count)


@pytest.mark.parametrize("rate, most", [(4, 0), (6, 2)])
def test_a_slow_camera_loses_nothing(rate, most):
    """As many pictures as asked for, or nearly: all are taken; half as many more: as many as asked
    for."""
    source = Camera(lavfi(rate), fps=4)
    times = [source.time for _ in islice(source, 5)]
    assert source.decoded - source.count <= most
    assert times[0] == 0.25
    assert abs(times[-1] - 1.25) < 0.2


def test_a_picture_that_stays_is_said_once(sender, messages, monkeypatch):
    monkeypatch.setattr(camera, "STILL", 0.5)
    sender.mode = "still"
    pictures = list(islice(Camera(sender.url, fps=10), 15))
    assert pictures[-1] is pictures[-3]
    assert [text for _, _, text in messages] == ["the picture has not changed for 0.5 s"]


def test_pictures_may_change_their_size():
    small = np.zeros((4, 6, 3), np.uint8)
    large = np.ones((8, 6, 3), np.uint8)
    shapes = [pair.shape for pair in pairs([small, small, large])]
    assert shapes == [(4, 6, 6), (4, 6, 6), (8, 6, 6)]


# ------------------------------------------------------------------ outages

class Eyes:
    """A vision encoder: the mean brightness of a picture, in every number of its tokens."""
    image_size = 48

    def encode_batches(self, videos):
        return [self.encode(pictures) for pictures in videos]

    def encode(self, pictures):
        brightness = pictures.float().mean((1, 2, 3))                          # [T]
        return brightness[:, None, None].expand(-1, 10, 32) / 255              # [T, 10, 32]


def arguments(*words):
    parser = argparse.ArgumentParser()
    stream_command.input_options(parser)
    args = parser.parse_args(["x", *words])
    return argparse.Namespace(**vars(args), lookahead=4, static=False, model="x")


def now_and_then(**changes):
    """A narrator that narrates when 0.6 s have passed since the last time."""
    model = tiny(last_k=2, fps=10.0, theta=1.0, theta_low=0.0, refractory=0.5, **changes)
    model.config.max_new_tokens = 2
    return model


def rows_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_dies_and_comes_back(sender, monkeypatch, messages, tmp_path):
    """Narrated again soon after, at the right times; the state is kept, the segment begins anew."""
    monkeypatch.setattr(camera, "OUTAGE", 1.0)
    files = {"jsonl": tmp_path / "a.jsonl", "trace": tmp_path / "a.trace"}
    run = stream_command.Input(sender.url, "", files, True)
    steps = []                                 # (decision, row, time, gap before the frame)
    back = None                                # the time at which the camera is well again
    for decision, row in run.decisions(now_and_then(), Eyes(), arguments("--live"), DirectPasses()):
        now = time.monotonic()
        steps.append((decision, row, now, run.video.gap))
        tenths = 10 * (run.video.arrived - sender.began)
        assert abs(number(run.video.picture) - tenths) < 6
        if len(steps) == 9:
            sender.mode = "dead"
            back = now + 1.5
            threading.Timer(1.5, setattr, (sender, "mode", "ok")).start()
        if back and now > back and len(steps) > 25:
            break
    run.video.close()

    first_again = next(now for _, _, now, _ in steps if now > back)
    assert first_again - back < 3
    assert run.video.reconnects == 1
    after_gap, = [k for k, (_, _, _, gap) in enumerate(steps) if gap > 1]
    _, row_before_gap, _, _ = steps[after_gap - 1]
    restarts = [k for k, (decision, _, _, _) in enumerate(steps)
                if restarted(decision, run.context.layout)]
    # a segment that had just ended need not be restarted
    assert restarts == ([after_gap] if row_before_gap is None else [])

    rows = rows_of(files["jsonl"])
    assert [row["n"] for row in rows] == list(range(len(rows)))                # one stream, not two
    assert len(rows) > 3
    for row, later in zip(rows, rows[1:]):
        assert later["start"] == row["end"]
        assert later["end"] - row["end"] > 0.5
    wall = [datetime.fromisoformat(row["wall"]).timestamp() for row in rows]
    assert wall[-1] - wall[0] == pytest.approx(rows[-1]["end"] - rows[0]["end"], abs=0.6)
    assert abs(wall[-1] - time.time()) < 5
    texts = [text.split(" (")[0] for _, _, text in messages[:2]]
    assert texts == ["no pictures", "pictures come again"]
    assert len(run.video.latencies) == len(rows)
    assert "time" in rows_of(files["trace"])[0]


def test_a_source_that_goes_bad_is_noticed(messages, monkeypatch):
    """Within the time of patience and a second; when it is well again, pictures come again. Three
    sources at a time, each bad in another way."""
    monkeypatch.setattr(camera, "PATIENCE", 1.5)

    def texts_of(source):
        return [text for _, camera, text in messages if camera is source]

    with ExitStack() as stack:
        senders = [stack.enter_context(serve(Sender())) for _ in range(3)]
        cameras = [Camera(sender.url, fps=10) for sender in senders]
        watching = []
        for source in cameras:
            watching.append(threading.Thread(target=list, args=(source,), daemon=True))
            watching[-1].start()
        until(lambda: all(source.count > 2 for source in cameras))

        for sender, mode in zip(senders, ("frozen", "trickle", "garbage")):
            sender.mode = mode
        since = time.monotonic()
        until(lambda: all(texts_of(source) for source in cameras))
        for said_at, _, text in messages[:3]:
            assert said_at - since < 1.5 + 1
            assert text.startswith("no pictures (")

        for sender in senders:
            sender.mode = "ok"
        until(lambda: all(texts_of(source)[-1] == "pictures come again" for source in cameras))
        for source, thread in zip(cameras, watching):
            source.close()
            thread.join(1)
            assert not thread.is_alive()
            assert not source.thread.is_alive()


def test_dead_at_the_start(sender, messages):
    """One line with the reason after the retries. Without a limit of retries, it waits."""
    sender.mode = "dead"
    for url, reason in ((sender.url, "503|5XX"), ("rtsp://127.0.0.1:9/x", "refused"),
                        ("nothing://x", "not found")):
        with pytest.raises(BadData, match=rf"^\w+://[\w.:]+/\.\.\.: .*({reason})") as error:
            next(iter(Camera(url, retries=0)))
        assert "\n" not in str(error.value)
        assert not messages
    waiting = Camera(sender.url)
    threading.Thread(target=lambda: next(iter(waiting)), daemon=True).start()
    until(lambda: messages)
    assert "trying again" in messages[0][2]
    sender.mode = "ok"
    until(lambda: waiting.count)
    assert messages[-1][2] == "pictures come"


def test_many_outages(monkeypatch, messages):
    """No thread and no memory is left of them."""
    memory = Path("/proc/self/statm")
    if not memory.exists():
        pytest.skip("reads /proc")
    monkeypatch.setattr(camera.random, "uniform", lambda *_: 0.0)
    source = Camera("lavfi:testsrc=size=64x48:rate=25:duration=0.2", fps=1e6)
    pictures = iter(source)
    sizes = []                                 # (bytes, threads)
    for outages in (20, 80):
        while source.reconnects < outages:
            next(pictures)
        gc.collect()
        pages = int(memory.read_text().split()[1])
        sizes.append((pages * os.sysconf("SC_PAGE_SIZE"), threading.active_count()))
    (bytes_before, threads_before), (bytes_after, threads_after) = sizes
    assert bytes_after - bytes_before < 5e6
    assert threads_after <= threads_before
    pictures.close()
    until(lambda: not source.thread.is_alive())


def test_pauses_grow_with_the_outage(monkeypatch, messages):
    """At most a quarter of the time that it has lasted, a second at least, half a minute at
    most."""
    pauses = []
    source = Camera("rtsp://x")

    def lost():
        raise BadData("gone")

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 40:
            source.closed.set()

    # time passes in the pauses alone
    monkeypatch.setattr(camera.time, "monotonic", lambda: sum(pauses))
    monkeypatch.setattr(camera.random, "uniform", lambda *_: 1.0)
    monkeypatch.setattr(source, "_watch", lost)
    monkeypatch.setattr(source.closed, "wait", pause)
    source._read()
    assert pauses[:5] == [1, 1, 1, 1, 1]
    assert pauses[-1] == 30
    assert len(messages) == 1
    for i, seconds in enumerate(pauses):
        assert seconds <= max(1, sum(pauses[:i]) / 4)


# ------------------------------------------------------------------ the command line

@pytest.fixture
def kept_signals():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_no_password_in_any_output(sender, tmp_path, kept_signals):
    """A source that is dead at the start is one line beside that of the bounds, and exit code 1."""
    sender.mode = "dead"
    url = sender.url.replace("//", "//user:SECRET@") + "?token=SECRET"
    options = ["--device", "cpu", "--model", str(TOY), "--jsonl", str(tmp_path / "n.jsonl")]
    for words, count in (
            ([url, "--live", "--retries", "0"], 2),
            ([url], 1),
            ([url, "a.mp4"], 1),
            (["rtsp://u:SECRET@127.0.0.1:9/x", "--retries", "0"], 2)):
        code, errors = call(stream_command, [*words, *options])
        lines = [line for line in errors.splitlines()
                 if line.strip() and not line.startswith("streaming: ")]
        assert code == 1, errors
        assert len(lines) == count, errors
        assert lines[-1].startswith("error: "), errors
        assert "SECRET" not in errors
        assert "/..." in lines[-1] or "a.mp4" in words
    for file in tmp_path.iterdir():
        assert "SECRET" not in file.read_text() + file.name


@pytest.mark.parametrize("given", [
    ["--retries", "-1"],
    ["--source-option", "SECRET"],
    ["--max-segment", "0"],
], ids=" ".join)
def test_usage(given):
    code, errors = call(stream_command, ["camera", *given])
    assert code == 2
    assert given[0] in errors and "SECRET" not in errors


# the end and the text of sentences; those that repeat the last one reported within 30 s
SENTENCES = [(1.0, "A."), (20.0, "A."), (31.0, "A."), (31.5, "A."), (32.0, "B."), (33.0, "A."),
             (34.0, "B."), (65.0, "B.")]
REPEATS = [1, 2]


def sentence_decisions():
    decisions = []
    for n, (end, text) in enumerate(SENTENCES):
        narration = stream.Narration(n, n, 0.0, end, text, 0.1, [])
        decision = stream.Decision(n, 0.1, 0.8, 0, 0, 0, [], narration, False, nar.Tokens(), 0)
        decisions.append(decision)
    return decisions


@pytest.mark.parametrize("live, repeats", [(True, REPEATS), (False, [])])
def test_a_repeat_is_kept_and_not_shown(tmp_path, monkeypatch, live, repeats):
    """In the JSONL of a live source it stands, marked, and nowhere else."""
    files = {form: tmp_path / form for form in ("jsonl", "srt", "vtt")}
    run = stream_command.Input("camera", "", files, live)
    source = Camera("camera")
    source.arrived = 0.0
    monkeypatch.setattr(stream_command, "open_frames", lambda *_: (iter([None]), None, source))
    monkeypatch.setattr(stream_command, "narrate", lambda *_, **__: iter(sentence_decisions()))
    items = list(run.decisions(now_and_then(), Eyes(), arguments(), DirectPasses()))
    rows = rows_of(files["jsonl"])
    assert len(rows) == len(SENTENCES)
    assert [row["n"] for row in rows if "repeat" in row] == repeats
    assert [row for _, row in items] == rows
    shown = len(SENTENCES) - len(repeats)
    for form in ("srt", "vtt"):
        assert files[form].read_text().count(" --> ") == shown
    for with_repeats, lines in ((False, shown), (True, len(SENTENCES))):
        args = argparse.Namespace(explain=False, repeats=with_repeats, speak=False,
                                  voice_command=None)
        stdout = io.StringIO()
        with redirect_stdout(stdout):
            stream_command.show(((0, item) for item in items), [run], None, args)
        assert len(stdout.getvalue().splitlines()) == lines


def narrations(source, tmp_path):
    """What the command writes about a source."""
    jsonl = tmp_path / "n.jsonl"
    code, errors = call(stream_command, [source, "--device", "cpu", "--jsonl", str(jsonl)])
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
    """Sends the first fifth of a file, hangs up, and from then on sends nothing."""
    sent = False

    def do_GET(self):
        if BreaksOff.sent:
            self.send_error(503)
            return
        BreaksOff.sent = True
        data = Path(self.translate_path(self.path)).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:len(data) // 5])


def test_a_connection_that_breaks_off_is_no_end(tmp_path, monkeypatch, kept_signals):
    """Its state goes on when the server is well again, and the files are as if nothing had been.
    Files of an earlier run stay as long as there is no picture."""
    monkeypatch.setattr(nar.Narrator, "load", cache(nar.Narrator.load))
    write_toy(1, 0.5, tmp_path / "a.mp4")
    expected = narrations(str(tmp_path / "a.mp4"), tmp_path)
    jsonl = tmp_path / "n.jsonl"
    state = ["--state", str(tmp_path / "s")]
    for handler, code in ((BreaksOff, 1), (QuietHandler, 0)):
        with serve(ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=tmp_path))) \
                as server:
            url = f"http://127.0.0.1:{server.server_port}/a.mp4"
            assert call(stream_command, [url, "--jsonl", str(jsonl)])[0] == code
    assert jsonl.read_text() == expected

    assert call(stream_command, ["http://127.0.0.1:9/a.mp4", "--jsonl", str(jsonl)])[0] == 1
    assert jsonl.read_text() == expected


def test_rare_pictures_are_no_outage():
    """At a picture every 20 s, 20 s without one say nothing."""
    restarts = []
    for fps, gap, expected in ((2, 9, 0), (2, 11, 1), (0.05, 21, 0), (0.05, 61, 1)):
        source = Camera("camera", fps)
        source.gap = gap
        restarts.clear()
        list(source.restart_after_outage([None], lambda: restarts.append(gap)))
        assert len(restarts) == expected


def test_pipe_and_network_are_as_the_file(tmp_path, monkeypatch, kept_signals):
    """Nothing is left out, whether the recording comes from a file, through a pipe or over http."""
    monkeypatch.setattr(nar.Narrator, "load", cache(nar.Narrator.load))
    file = tmp_path / "a.mp4"
    write_toy(1, 0.2, file)
    expected = narrations(str(file), tmp_path)
    assert expected.count("\n") > 3
    with file_at_stdin(file):
        assert narrations("-", tmp_path) == expected
    handler = partial(QuietHandler, directory=str(tmp_path))
    with serve(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as server:
        url = f"http://127.0.0.1:{server.server_port}/a.mp4"
        assert narrations(url, tmp_path) == expected


def test_a_recording_waits_for_whoever_reads_it(sender):
    """It is not read ahead without end, and its thread ends with it."""
    recording = Recording(sender.url, fps=20)
    pictures = iter(recording)
    next(pictures)
    time.sleep(0.6)
    assert len(recording.items) <= camera.QUEUE
    pictures.close()
    assert not recording.thread.is_alive()


def interrupted(words, folder, moment, sent) -> tuple[float, str]:
    """Start the command, and send it a signal at the moment when moment(folder) holds. It has to
    end with exit code 130 and whole files -> the seconds that it takes, and its stderr."""
    outputs = ["--jsonl", str(folder / "n"), "--trace", str(folder / "t")]
    process = subprocess.Popen([sys.executable, "stream.py", *words, *outputs], cwd=ROOT, text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    until(lambda: moment(folder), 60)
    began = time.monotonic()
    process.send_signal(sent)
    _, errors = process.communicate(timeout=20)
    seconds = time.monotonic() - began
    assert process.returncode == 130, errors
    assert "Traceback" not in errors and "interrupted" in errors, errors
    for file in folder.rglob("*.jsonl"):
        rows_of(file)
    return seconds, errors


def is_narrating(folder):
    return any(file.stat().st_size > 300 for file in folder.rglob("*trace.jsonl"))


def test_interrupted_with_one_of_two_dead(sender, tmp_path):
    """SIGTERM ends it like Ctrl-C, soon, and the last lines say what came."""
    dead = "http://127.0.0.1:9/dead"
    words = [sender.url, dead, "--live"]
    seconds, errors = interrupted(words, tmp_path, is_narrating, signal.SIGTERM)
    assert seconds < LONG
    assert re.search(r"127.0.0.1.*: \d+ frames", errors)
    # any number: on a busy machine the narrator may be too slow for all pictures
    assert re.search(r"\d+ taken, \d+ dropped", errors)
    assert errors.count("127.0.0.1:9/...: no pictures (") == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ok", "frozen", "dead", "stdin"])
def test_interrupted_at_any_moment(sender, tmp_path, mode):
    sender.mode = mode
    words = ["-"] if mode == "stdin" else [sender.url, "--live"]

    def has_begun(folder):
        return (folder / "n").exists()

    seconds, _ = interrupted(words, tmp_path, has_begun, signal.SIGINT)
    assert seconds < LONG


# ------------------------------------------------------------------ several at once

def test_what_fails_is_said_apart_from_the_narrations(capsys):
    """On stderr, while the others go on; an output that cannot be written is one such failure,
    too."""
    runs = [stream_command.Input(f"{name}.mp4", name, {}, False) for name in "ab"]
    args = argparse.Namespace(explain=False, repeats=False, speak=False, voice_command=None)
    missing = Failed(BadData("a.mp4: no such file"))
    unwritable = Failed(OSError(21, "Is a directory", "out/b.jsonl"))
    failed = stream_command.show(iter([(0, missing), (1, unwritable)]), runs, None, args)
    assert failed == runs
    stdout, errors = capsys.readouterr()
    assert stdout == ""
    assert "a: a.mp4: no such file\n" in errors
    assert "Is a directory: 'out/b.jsonl'" in errors
    with pytest.raises(OSError):
        stream_command.show(iter([(0, unwritable)]), runs[:1], None, args)


def decisions(model, frames, ask):
    """A job: narrate frames whose passes are shared -> (frame, p([SKIP]), sentence)."""
    context = open_stream(model, run=lambda part: ask(model.decoder, part))
    for decision in narrate(model, frames, context=context):
        text = decision.narration.text if decision.narration else None
        yield decision.frame, decision.p_skip, text


def slowly(x, seed, ask):
    """Frames of a live source: one by one, at times of its own."""
    pauses = np.random.default_rng(seed).uniform(0, 0.02, len(x))
    for frame, pause in zip(x, pauses):
        arrives = time.monotonic() + pause

        def arrived(seconds):
            if time.monotonic() >= arrives:
                return frame
            time.sleep(min(seconds, pause))

        yield ask.wait(arrived)


def test_each_stream_is_as_alone():
    """Whatever runs beside it, joins, leaves or fails."""
    model = now_and_then()
    model.merge()
    videos = [video(model, frames, seed=frames)[0] for frames in (25, 6, 14, 30)]
    alone = [list(decisions(model, x, DirectPasses())) for x in videos]

    def job(which):
        def run(ask):
            x = slowly(videos[which], which, ask)
            for count, item in enumerate(decisions(model, x, ask)):
                yield item
                if which == 2 and count == 7:
                    raise BadData("unplugged")
        return run

    beside = [[] for _ in videos]
    # three at a time: the last one joins when one leaves
    for which, item in side_by_side(map(job, range(4)), 3):
        beside[which].append(item)
    assert isinstance(beside[2].pop(), Failed)
    assert len(beside[2]) == 8
    alone[2] = alone[2][:8]
    for items, items_alone in zip(beside, alone):
        assert [(t, text) for t, _, text in items] == [(t, text) for t, _, text in items_alone]
        # frame 0 has no probability
        for (_, p_skip, _), (_, p_skip_alone, _) in zip(items[1:], items_alone[1:]):
            assert abs(p_skip - p_skip_alone) < 1e-4


def test_a_dead_camera_delays_no_other(sender, messages):
    """Of a dead, a silent and a lively camera the last one is narrated as if alone, never a tick
    late."""
    model = now_and_then()
    model.merge()
    sender.mode = "frozen"
    runs = []
    for n, url in enumerate(["http://127.0.0.1:9/dead", sender.url, lavfi(50)]):
        runs.append(stream_command.Input(url, str(n), {}, True))
    lively = runs[2]
    latencies = []
    jobs = [partial(run.decisions, model, Eyes(), arguments("--live")) for run in runs]
    items = side_by_side(jobs, 3)
    for which, _ in islice(items, 30):
        assert which == 2
        latencies.append(time.monotonic() - lively.video.arrived)
    began = time.monotonic()
    items.close()
    # nor does a dead one keep the others from ending: alone it takes 10 s
    assert time.monotonic() - began < 5
    assert np.median(latencies) < 0.3
    assert max(latencies) < 3


def test_jobs_that_wait_are_not_waited_for():
    """A job whose ask.wait never ends: the others' requests are answered, together."""
    sizes = []                                 # of the requests that are answered together

    def double(requests):
        sizes.append(len(requests))
        return [2 * request for request in requests]

    def busy(ask):
        for k in range(3):
            yield ask(double, k)

    def waiting(ask):
        return iter([ask.wait(time.sleep)])

    items = side_by_side([waiting, busy, busy], 3)
    answers = [item for _, item in islice(items, 6)]
    items.close()
    assert sorted(answers) == [0, 0, 2, 2, 4, 4]
    assert sum(sizes) == 6
    assert [item for _, item in side_by_side([busy], 1)] == [0, 2, 4]


def test_pyav_19(tmp_path, monkeypatch):
    """It has no metadata_errors any more."""
    real = av.open

    def without(file, mode="r", **options):
        assert "metadata_errors" not in options
        return real(file, mode, **options)

    write_toy(1, 0.02, tmp_path / "a.mp4")
    monkeypatch.setattr(av, "open", without)
    with pytest.raises(AssertionError):
        Video(tmp_path / "a.mp4")
    monkeypatch.setattr(av, "__version__", "19.0.0")
    code = ROOT / "support" / "files" / "video.py"
    spec = importlib.util.spec_from_file_location("video_of_19", code)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert len(list(module.Video(tmp_path / "a.mp4"))) > 1
