"""streams/camera.py, streams/sources.py: sources that are no files, without hardware; only 127.0.0.1 is contacted."""
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
from contextlib import contextmanager, redirect_stdout
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
from streams.fast import open_stream
from streams.subtitles import outputs
from streams.together import DirectPasses, Failed, side_by_side
from support.common.addresses import without_secrets
from support.common.errors import BadData
from support.files.features import pairs
from support.files.video import Video
from test_commands import call
from test_video import number


LONG = 5                                # seconds to end after Ctrl-C: 2 wanted, 0.3 to 0.8 where nothing else runs


# ------------------------------------------------------------------ a camera in this process

def striped(number: int) -> np.ndarray:
    """A picture that says its own number, 0..255, in eight columns (test_video.py reads it)."""
    columns = np.repeat([255 * (number >> bit & 1) for bit in range(8)], 12)
    return np.ascontiguousarray(np.broadcast_to(columns[None, :, None], (64, 96, 3)).astype(np.uint8))


class Sender(ThreadingHTTPServer):
    """Sends MPEG-TS for ever, 20 pictures a second; each says the time, in tenths of a second since the beginning.

    mode    ok; still: the same picture; frozen: nothing more; trickle: a byte now and then; garbage; dead: hangs up
    """
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Stream)
        self.mode, self.began, self.url = "ok", time.monotonic(), f"http://127.0.0.1:{self.server_port}/door"

    def handle_error(self, *_):                                    # who hangs up is no error
        pass


class Stream(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def write(self, data):
        for at in range(0, len(data), 188):
            while self.server.mode == "frozen":
                time.sleep(0.02)
            if self.server.mode == "dead":
                raise ConnectionError
            while self.server.mode == "trickle":
                self.wfile.write(data[at:at + 1])
                time.sleep(0.1)
            junk = self.server.mode == "garbage"
            self.wfile.write(os.urandom(188) if junk else data[at:at + 188])
        return len(data)

    def do_GET(self):
        if self.server.mode == "dead":
            return self.send_error(503)
        self.send_response(200)
        self.end_headers()
        with av.open(self, "w", format="mpegts", options={"flush_packets": "1"}) as out:
            video = out.add_stream("libx264", rate=20)
            video.width, video.height, video.pix_fmt = 96, 64, "yuv420p"
            video.options = {"preset": "ultrafast", "tune": "zerolatency", "g": "5"}
            while True:
                told = 0 if self.server.mode == "still" else int(10 * (time.monotonic() - self.server.began)) & 255
                out.mux(video.encode(av.VideoFrame.from_ndarray(striped(told), format="rgb24")))
                time.sleep(0.05)


@contextmanager
def serve(server):
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
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
def said(monkeypatch):
    """What cameras say on stderr, with the time."""
    lines = []
    monkeypatch.setattr(camera.Camera, "say", lambda self, what: lines.append((time.monotonic(), what)))
    return lines


def until(true, seconds: float = 10):
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    assert true()


# ------------------------------------------------------------------ names

def test_what_is_live():
    for source in ("camera", "camera:1", "camera:USB 2.0", "/dev/video0", "rtsp://a/b", "RTSPS://a", "rtmp://a",
                   "srt://a", "udp://@:5000", "rtp://a", "tcp://a:1", "lavfi:testsrc"):
        assert sources.is_live(source) and not sources.is_pipe_or_url(source), source
    for source in ("a.mp4", "./camera", "cameras/a.mp4", r"C:\a.mp4", "a:b.mp4", "x.safetensors:a", "file:///a.mp4"):
        assert not sources.is_live(source) and not sources.is_pipe_or_url(source), source
    for source in ("-", "http://a/b.mp4", "HTTPS://a"):
        assert not sources.is_live(source) and sources.is_live(source, True) and sources.is_pipe_or_url(source), source
    with pytest.raises(BadData, match="--live"):
        sources.is_live("a.mp4", True)
    with pytest.raises(BadData, match="two commands"):
        sources.all_live(["a.mp4", "camera"])


@pytest.mark.parametrize("source, shown", [
    ("rtsp://u:SECRET@a/b", "rtsp://***@a/b"), ("rtsp://u:SEC:RET@a:554/b", "rtsp://***@a:554/b"),
    ("rtsp://u:SECRET/SECRET@a/b", "rtsp://***@a/b"), ("rtsp://u:SEC@RET@a/b", "rtsp://***@a/b"),
    ("rtsp://:SECRET@a", "rtsp://***@a"), ("rtsp://u:12SECRET@a", "rtsp://***@a"),
    ("rtsp://u:20#SECRET@a:1/x", "rtsp://***@a:1/x"), ("rtsp://u:20?SECRET@a/x", "rtsp://***@a/x"),
    ("rtsp://u:20/SECRET@a/x", "rtsp://***@a/x"), ("rtsp://u:S?EC=1&RET@a/x", "rtsp://***@a/x"),
    ("http://SECRET@a/", "http://***@a/"), ("http://SECRET:@a/", "http://***@a/"),
    ("async:http://u:SECRET@a/", "async:http://***@a/"),
    ("concat:http://u:SECRET@a/1|http://u:SECRET@b/2", "concat:http://***@b/2"),
    ("lavfi:movie=http://u:SECRET@a/b", "lavfi:movie=http://***@a/b"),
    ("http://u%3ASECRET%40a/", "http://***@a/"),
    ("http://a/b?user=u&password=SECRET&x=1", "http://a/b?user=***&password=***&x=***"),
    ("https://u:SECRET@a/b?token=SECRET#c", "https://***@a/b?token=***#***"),
    ("http://a/v.cgi?loginuse=admin&loginpas=SECRET", "http://a/v.cgi?loginuse=***&loginpas=***"),
    ("http://a/?a=1,password=SECRET&b=2", "http://a/?a=***&b=***"),
    ("http://a/?%70assword=SECRET", "http://a/?password=***"), ("http://a/?SECRET", "http://a/?***"),
    ("http://a/?SECRET==", "http://a/?***"), ("http://a/?x=SECRET==;y=2", "http://a/?x=***;y=***"),
    ('http://a/?{"password":"SECRET"}', "http://a/?***"), ('http://a/{"password":"SECRET"}', "http://a/{***"),
    ("http://a/%7B%22password%22:%22SECRET%22%7D", "http://a/{***"),
    ("http://a/password:SECRET/x", "http://a/password:***"),
    ("rtsp://a/user=SECRET&password=SECRET&channel=1", "rtsp://a/user=***"),
    ("http://a/stream;token=SECRET", "http://a/stream;token=***"),
    ("rtsp://a/user=SECRET_password=SECRET_channel=1_stream=0", "rtsp://a/user=***"),
    ("rtsp://a/1/password=SECRET/2", "rtsp://a/1/password=***"),
    ("http://a/?token=SEC_RET-SEC/RET", "http://a/?token=***")]
    + [(f"http://a/?{name}=SECRET", f"http://a/?{name}=***") for name in (
        "pw", "pin", "p", "jwt", "sid", "session", "credential", "X-Amz-Credential", "apikey", "x")])
def test_secrets_are_masked(source, shown):
    """In messages, in names of outputs, and where the address is a wrong value of an option."""
    assert without_secrets(source) == shown
    assert without_secrets(shown) == shown and "SEC" not in sources.source_name(source)
    code, err = call(stream_command, ["a.mp4", "--serve", source])
    assert code == 2 and "SEC" not in err and "***" in err


def test_what_has_no_secret_stays():
    for source in ("rtsp://a:554/b", "http://a:80/b%20c.mp4", "rtsp://signal.example:554/keys", "rtsp://[::1]:554/1",
                   "a.mp4", "a@b.mp4", "camera:1", "lavfi:a=b:c=d@e"):
        assert without_secrets(source) == source


def test_a_wrong_address_is_no_file_name():
    """An address that is taken for a file is masked, too."""
    for source in ("file://u:SECRET@a/b.mp4", "file:///a.mp4?token=SECRET"):
        with pytest.raises(BadData, match=r"\*\*\*.*no such file") as error:
            Video(source)
        assert "SECRET" not in str(error.value)


def test_names_of_several(tmp_path):
    forms = {"jsonl": str(tmp_path), "srt": None, "vtt": None, "trace": None, "state": None}
    names = [name for _, name, _ in outputs(argparse.Namespace(**forms, input=[
        "rtsp://u:p@10.0.0.7/door", "rtsp://10.0.0.8:554/door", "camera:1", "/dev/video2", "-", "a/b.mp4"]))]
    assert names == ["10.0.0.7-door", "10.0.0.8-554-door", "camera-1", "video2", "stdin", "b"]


def test_cameras_that_differ_in_what_is_masked(said):
    """Their outputs are numbered, in the order of the inputs, and so are their messages; one that is given twice is
    refused, and so is a number that another one has as its name."""
    one, two = "rtsp://a/live?channel=1&password=SECRET", "rtsp://a/live?channel=2&password=SECRET"
    assert sources.source_names([one, "rtsp://b", two]) == ["a-live-channel-password-1", "b",
                                                             "a-live-channel-password-2"]
    assert sources.source_names(["rtsp://u:SECRET@a", "rtsp://u:OTHER@a"]) == ["a-1", "a-2"]
    for twice in ([one, one], [one, two, "rtsp://a/live-channel-password-1"], ["b.mp4", "c/b.mkv"]):
        with pytest.raises(BadData, match="several inputs are called"):
            sources.source_names(twice)
    args = argparse.Namespace(source_option=[], live=False, retries=None, input=[one, two])
    names = [camera.open_pictures(source, 2, None, args, None).name for source in (one, two)]
    assert names == [f"rtsp://a/live?channel=***&password=*** (input {n})" for n in (1, 2)]


def test_options_of_ffmpeg():
    file, form, options = sources.address("rtsp://a", True, {"max_delay": "1", "x": "y"})
    assert (file, form) == ("rtsp://a", None) and options["rtsp_transport"] == "tcp"
    assert "nobuffer" in options["fflags"] and options["max_delay"] == "1" and options["x"] == "y"
    assert "overrun_nonfatal" in sources.address("rtp://a", True, {})[2]
    assert sources.address("-", False, {}) == ("pipe:0", None, {})
    assert sources.address("lavfi:testsrc", True, {})[:2] == ("testsrc", "lavfi")
    if sys.platform == "linux":
        assert sources.address("camera", True, {})[:2] == ("/dev/video0", "v4l2")
        with pytest.raises(BadData, match="no such camera"):
            sources.address("camera:nowhere", True, {})


# ------------------------------------------------------------------ the newest pictures

def watched(each: float, sentence: float, seconds: float) -> tuple[Camera, float]:
    """A narrator that takes so long for each frame, and for a sentence at every ninth: the worst latency."""
    source, worst, end = Camera(lavfi(50), fps=10), 0.0, time.monotonic() + seconds
    for t, _ in enumerate(source):
        time.sleep(each + sentence * (t % 9 == 8))
        worst = max(worst, time.monotonic() - source.arrived)
        if time.monotonic() > end:
            return source, worst


def once(each: float, sentence: float, seconds: float, good) -> Camera:
    """Of three attempts, the first whose source and latency are good: in real time, the machine's pauses count, too."""
    attempts = [watched(each, sentence, seconds)]
    while not good(*attempts[-1]) and len(attempts) < 3:
        attempts.append(watched(each, sentence, seconds))
    assert good(*attempts[-1]), [(vars(source), worst) for source, worst in attempts]
    return attempts[-1][0]


def test_latency_is_bounded(said):
    """c1, five times as fast: at most 0.9 s late; a little more if far too slow; nothing is dropped if fast enough."""
    once(0.06, 0.3, 3, lambda source, worst: worst < 0.9 and source.dropped < 0.2 * source.count)
    once(0.09, 0.6, 3, lambda source, worst: worst < 1.3 and 0 < source.dropped < source.count)
    once(0, 0.02, 2, lambda source, worst: source.dropped == 0 and worst < 0.3 and 17 <= source.count <= 24
         and source.decoded > 4 * source.count).report()
    assert re.search(r"decoded, \d+ taken, 0 dropped; 0 reconnects; no sentences$", said[-1][1])


@pytest.mark.parametrize("rate, most", [(4, 0), (6, 2)])
def test_a_slow_camera_loses_nothing(rate, most):
    """As many pictures as asked for, or nearly: all are taken; half as many more: as many as asked for."""
    source = Camera(lavfi(rate), fps=4)
    times = [source.time for _ in islice(source, 5)]
    assert source.decoded - source.count <= most and times[0] == 0.25 and abs(times[-1] - 1.25) < 0.2


def test_a_picture_that_stays_is_said_once(sender, said, monkeypatch):
    monkeypatch.setattr(camera, "STILL", 0.5)
    sender.mode = "still"
    pictures = list(islice(Camera(sender.url, fps=10), 15))
    assert pictures[-1] is pictures[-3] and [what for _, what in said] == ["the picture has not changed for 0.5 s"]


def test_pictures_may_change_their_size():
    small, large = np.zeros((4, 6, 3), np.uint8), np.ones((8, 6, 3), np.uint8)
    assert [pair.shape for pair in pairs([small, small, large])] == [(4, 6, 6), (4, 6, 6), (8, 6, 6)]


# ------------------------------------------------------------------ outages

class Eyes:
    """A vision encoder: the mean colour of a picture, in every number of its tokens."""
    image_size = 48

    def encode_batches(self, videos):
        return [pictures.float().mean((1, 2, 3))[:, None, None].expand(-1, 10, 32) / 255 for pictures in videos]


def arguments(*words):
    parser = argparse.ArgumentParser()
    stream_command.input_options(parser)
    return argparse.Namespace(**vars(parser.parse_args(["x", *words])), lookahead=4, static=False, model="x")


def now_and_then(**changes):
    """A narrator that narrates when 0.6 s have passed since the last time."""
    model = tiny(last_k=2, fps=10.0, theta=1.0, theta_low=0.0, refractory=0.5, **changes)
    model.config.max_new_tokens = 2
    return model


def test_dies_and_comes_back(sender, monkeypatch, said, tmp_path):
    """c2: narrated again soon after, at the right times; the state is kept, the segment begins anew."""
    monkeypatch.setattr(camera, "OUTAGE", 1.0)
    files = {"jsonl": tmp_path / "a.jsonl", "trace": tmp_path / "a.trace"}
    run, steps, back = stream_command.Input(sender.url, "", files, True), [], None
    for decision, row in run.decisions(now_and_then(), Eyes(), arguments("--live"), DirectPasses()):
        now = time.monotonic()
        steps.append((decision, row, now, run.video.gap))
        assert abs(number(run.video.picture) - 10 * (run.video.arrived - sender.began)) < 6        # tenths of a second
        if len(steps) == 9:
            sender.mode, back = "dead", now + 1.5
            threading.Timer(1.5, setattr, (sender, "mode", "ok")).start()
        if back and now > back and len(steps) > 25:
            break
    run.video.close()
    assert next(now for _, _, now, _ in steps if now > back) - back < 3 and run.video.reconnects == 1
    [again] = [k for k, (*_, gap) in enumerate(steps) if gap > 1]
    layout = run.context.layout
    restarts = [k for k, (decision, *_) in enumerate(steps) if restarted(decision, layout)]
    assert restarts == [again] * (steps[again - 1][1] is None)
    rows = [json.loads(line) for line in open(files["jsonl"])]
    assert [row["n"] for row in rows] == list(range(len(rows))) and len(rows) > 3       # one stream, not two
    assert all(b["start"] == a["end"] and b["end"] - a["end"] > 0.5 for a, b in zip(rows, rows[1:]))
    wall = [datetime.fromisoformat(row["wall"]).timestamp() for row in rows]
    assert wall[-1] - wall[0] == pytest.approx(rows[-1]["end"] - rows[0]["end"], abs=0.6) and abs(
        wall[-1] - time.time()) < 5
    assert [what.split(" (")[0] for _, what in said[:2]] == ["no pictures", "pictures come again"]
    assert len(run.video.latencies) == len(rows) and "time" in json.loads(open(files["trace"]).readline())


@pytest.mark.parametrize("mode", ["frozen", "trickle", "garbage"])
def test_a_source_that_goes_bad_is_noticed(sender, said, monkeypatch, mode):
    """c3: within the time of patience and a second; when it is well again, pictures come again."""
    monkeypatch.setattr(camera, "PATIENCE", 1.5)
    source = Camera(sender.url, fps=10)
    watching = threading.Thread(target=lambda: list(source), daemon=True)
    watching.start()
    until(lambda: source.count > 2)
    sender.mode, since = mode, time.monotonic()
    until(lambda: said)
    assert said[0][0] - since < 1.5 + 1 and said[0][1].startswith("no pictures (")
    sender.mode = "ok"
    until(lambda: said[-1][1] == "pictures come again")
    source.close()
    watching.join(1)
    assert not watching.is_alive() and not source.thread.is_alive()


def test_dead_at_the_start(sender, said):
    sender.mode = "dead"
    for url, reason in ((sender.url, "503|5XX"), ("rtsp://127.0.0.1:9/x", "refused"), ("nothing://x", "not found")):
        with pytest.raises(BadData, match=f"^{url}: .*({reason})") as raised:
            next(iter(Camera(url, retries=1)))
        assert "\n" not in str(raised.value) and not said
    waiting = Camera(sender.url)
    threading.Thread(target=lambda: next(iter(waiting)), daemon=True).start()
    until(lambda: said)
    assert "trying again" in said[0][1]
    sender.mode = "ok"
    until(lambda: waiting.count)
    assert said[-1][1] == "pictures come"


def test_many_outages(monkeypatch, said):
    """c5, 80 of 500: no thread and no memory is left of them."""
    memory = Path("/proc/self/statm")
    if not memory.exists():
        pytest.skip("reads /proc")
    monkeypatch.setattr(camera.random, "uniform", lambda *_: 0.0)
    source, sizes = Camera("lavfi:testsrc=size=64x48:rate=25:duration=0.2", fps=1e6), []
    pictures = iter(source)
    for outages in (20, 80):
        while source.reconnects < outages:
            next(pictures)
        gc.collect()
        sizes.append((int(memory.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"), threading.active_count()))
    assert sizes[1][0] - sizes[0][0] < 5e6 and sizes[1][1] <= sizes[0][1]
    pictures.close()
    until(lambda: not source.thread.is_alive())


def test_pauses_grow_with_the_outage(monkeypatch, said):
    """At most a quarter of the time that it has lasted, a second at least, half a minute at most."""
    now, pauses = [0.0], []
    source = Camera("rtsp://x")
    monkeypatch.setattr(camera.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(camera.random, "uniform", lambda *_: 1.0)
    monkeypatch.setattr(source, "_watch", lambda: (_ for _ in ()).throw(BadData("gone")))

    def pause(seconds):
        pauses.append(seconds)
        now[0] += seconds
        if len(pauses) == 40:
            source.closed.set()
    monkeypatch.setattr(source.closed, "wait", pause)
    source._read()
    assert pauses[:5] == [1, 1, 1, 1, 1] and pauses[-1] == 30 and len(said) == 1
    assert all(one <= max(1, sum(pauses[:i]) / 4) for i, one in enumerate(pauses))


# ------------------------------------------------------------------ the command line

@pytest.fixture
def kept_signals():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_no_password_in_any_output(sender, tmp_path, kept_signals):
    """c4 and c8: dead at the start is one line beside that of the bounds, and exit code 1."""
    sender.mode = "dead"
    url = sender.url.replace("//", "//user:SECRET@") + "?token=SECRET"
    for words, lines in (([url, "--live", "--retries", "1"], 2), ([url], 1), ([url, "a.mp4"], 1),
                         (["rtsp://u:SECRET@127.0.0.1:9/x", "--retries", "0"], 2)):
        options = ["--device", "cpu", "--model", str(TOY), "--jsonl", str(tmp_path / "n.jsonl")]
        code, err = call(stream_command, [*words, *options])
        told = [line for line in err.splitlines() if line.strip() and not line.startswith("streaming: ")]
        assert code == 1 and len(told) == lines and told[-1].startswith("error: "), err
        assert "SECRET" not in err and ("***" in told[-1] or "a.mp4" in words)
    assert not any("SECRET" in file.read_text() + file.name for file in tmp_path.iterdir())


@pytest.mark.parametrize("given", [["--retries", "-1"], ["--source-option", "SECRET"], ["--max-segment", "0"]])
def test_usage(given):
    code, err = call(stream_command, ["camera", *given])
    assert code == 2 and given[0] in err and "SECRET" not in err


def test_a_repeat_is_kept_and_not_shown(tmp_path, monkeypatch):
    """(a): the same sentence within 30 s of the last one reported is in the JSONL, marked, and nowhere else."""
    texts = [(1.0, "A."), (20.0, "A."), (31.0, "A."), (31.5, "A."), (32.0, "B."), (33.0, "A."), (34.0, "B."),
             (65.0, "B.")]
    steps = []
    for n, (end, text) in enumerate(texts):
        narration = stream.Narration(n, n, 0.0, end, text, 0.1, [])
        steps.append(stream.Decision(n, 0.1, 0.8, 0, 0, 0, [], narration, False, nar.Tokens(), 0))
    for live, repeats in ((True, [1, 2]), (False, [])):
        files = {form: tmp_path / f"{live}.{form}" for form in ("jsonl", "srt", "vtt")}
        run, source = stream_command.Input("camera", "", files, live), Camera("camera")
        source.arrived = 0.0
        monkeypatch.setattr(stream_command, "open_frames", lambda *_: (iter(()), None, source))
        monkeypatch.setattr(stream_command, "narrate", lambda *_, **__: iter(steps))
        items = list(run.decisions(now_and_then(), Eyes(), arguments(), DirectPasses()))
        rows = [json.loads(line) for line in open(files["jsonl"])]
        assert [row["n"] for row in rows if "repeat" in row] == repeats and len(rows) == len(texts)
        assert [row for _, row in items] == rows
        for form in ("srt", "vtt"):
            assert files[form].read_text().count(" --> ") == len(texts) - len(repeats)
        for shown, lines in ((False, len(texts) - len(repeats)), (True, len(texts))):
            out = io.StringIO()
            with redirect_stdout(out):
                stream_command.show(((0, item) for item in items), [run], None,
                            argparse.Namespace(explain=False, repeats=shown, speak=False, voice_command=None))
            assert len(out.getvalue().splitlines()) == lines


def narrations(words, tmp_path):
    code, err = call(stream_command, [*words, "--device", "cpu", "--jsonl", str(tmp_path / "n.jsonl")])
    assert code == 0, err
    return (tmp_path / "n.jsonl").read_text()


def test_pipe_and_network_are_as_the_file(tmp_path, monkeypatch, kept_signals):
    """c7: nothing is left out, whether the recording comes from a file, through a pipe or over http."""
    monkeypatch.setattr(nar.Narrator, "load", cache(nar.Narrator.load))
    write_toy(1, 0.2, tmp_path / "a.mp4")
    expected = narrations([str(tmp_path / "a.mp4")], tmp_path)
    read, write = os.pipe()
    saved = os.dup(0)
    os.dup2(read, 0)
    os.close(read)
    try:
        def feed():
            with open(write, "wb") as pipe:
                pipe.write((tmp_path / "a.mp4").read_bytes())
        threading.Thread(target=feed, daemon=True).start()
        assert narrations(["-"], tmp_path) == expected
    finally:
        os.dup2(saved, 0)
        os.close(saved)
    quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    with serve(ThreadingHTTPServer(("127.0.0.1", 0), partial(quiet, directory=str(tmp_path)))) as server:
        assert narrations([f"http://127.0.0.1:{server.server_port}/a.mp4"], tmp_path) == expected
    assert expected.count("\n") > 3


def test_a_recording_waits_for_whoever_reads_it(sender):
    """It is not read ahead without end, and its thread ends with it."""
    recording = Recording(sender.url, fps=20)
    pictures = iter(recording)
    next(pictures)
    time.sleep(0.6)
    assert len(recording.items) <= camera.QUEUE
    pictures.close()
    assert not recording.thread.is_alive()


def interrupted(url, tmp_path, moment, how) -> tuple[float, str]:
    """Seconds that the command takes to end, with exit code 130 and whole files; its stderr."""
    files = "--jsonl", tmp_path / "n", "--trace", tmp_path / "t"
    process = subprocess.Popen([sys.executable, "stream.py", *url, *map(str, files)], cwd=ROOT, text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until(lambda: moment(tmp_path), 60)
    began = time.monotonic()
    process.send_signal(how)
    _, errors = process.communicate(timeout=20)
    took = time.monotonic() - began
    assert process.returncode == 130 and "Traceback" not in errors and "interrupted" in errors, errors
    for file in tmp_path.rglob("*.jsonl"):
        assert all(json.loads(line) for line in file.read_text().splitlines())
    return took, errors


def narrating(tmp_path):
    return any(file.stat().st_size > 300 for file in tmp_path.rglob("*trace.jsonl"))


def test_interrupted_with_one_of_two_dead(sender, tmp_path):
    """c6: SIGTERM ends it like Ctrl-C, within 2 s, and the last lines say what came."""
    dead = "http://127.0.0.1:9/dead"
    took, errors = interrupted([sender.url, dead, "--live"], tmp_path, narrating, signal.SIGTERM)
    assert took < LONG
    assert re.search(r"127.0.0.1.*-door: \d+ frames", errors)
    # any number: on a busy machine the narrator may be too slow for all pictures
    assert re.search(r"\d+ taken, \d+ dropped", errors)
    assert errors.count("dead: no pictures (") == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ok", "frozen", "dead", "stdin"])
def test_interrupted_at_any_moment(sender, tmp_path, mode):
    sender.mode = mode
    moment = lambda folder: (folder / "n").exists()
    url = ["-"] if mode == "stdin" else [sender.url, "--live"]
    assert interrupted(url, tmp_path, moment, signal.SIGINT)[0] < LONG


# ------------------------------------------------------------------ several at once

def test_what_fails_is_said_apart_from_the_narrations(tmp_path, capsys):
    """On stderr, while the others go on; an output that cannot be written is one such failure, too."""
    runs = [stream_command.Input(f"{name}.mp4", name, {}, False) for name in "ab"]
    plain = argparse.Namespace(explain=False, repeats=False, speak=False, voice_command=None)
    errors = BadData("a.mp4: no such file"), OSError(21, "Is a directory", "out/b.jsonl")
    assert stream_command.show(iter([(i, Failed(error)) for i, error in enumerate(errors)]), runs, None, plain) == runs
    out, err = capsys.readouterr()
    assert out == "" and "a: a.mp4: no such file\n" in err and "Is a directory: 'out/b.jsonl'" in err
    with pytest.raises(OSError):
        stream_command.show(iter([(0, Failed(errors[1]))]), runs[:1], None, plain)


def told(model, frames, ask):
    """A job: narrate frames whose passes are shared."""
    context = open_stream(model, run=lambda part: ask(model.decoder, part))
    yield from ((d.frame, d.p_skip, d.narration and d.narration.text)
                for d in narrate(model, frames, context=context))


def slowly(x, seed, ask):
    """Frames of a live source: one by one, at times of its own."""
    pauses = np.random.default_rng(seed).uniform(0, 0.02, len(x))
    for frame, pause in zip(x, pauses):
        there = time.monotonic() + pause
        yield ask.wait(lambda seconds: frame if time.monotonic() >= there else time.sleep(min(seconds, pause)))


def test_each_stream_is_as_alone(monkeypatch):
    """g1: whatever runs beside it, joins, leaves or fails."""
    model = now_and_then()
    model.merge()
    xs = [video(model, frames, seed=frames)[0] for frames in (25, 6, 14, 30)]
    alone = [list(told(model, x, DirectPasses())) for x in xs]

    def job(which):
        def run(ask):
            for k, item in enumerate(told(model, slowly(xs[which], which, ask), ask)):
                yield item
                if which == 2 and k == 7:
                    raise BadData("unplugged")
        return run
    found = [[] for _ in xs]
    for which, item in side_by_side(map(job, range(4)), 3):                    # the last one joins when one leaves
        found[which].append(item)
    assert isinstance(found[2].pop(), Failed) and len(found[2]) == 8
    alone[2] = alone[2][:8]
    for one, beside in zip(alone, found):
        assert [(t, text) for t, _, text in one] == [(t, text) for t, _, text in beside]
        assert max(abs(a[1] - b[1]) for a, b in zip(one[1:], beside[1:])) < 1e-4


def test_a_dead_camera_delays_no_other(sender, said, monkeypatch):
    """g3: of a dead, a silent and a lively camera the last one is narrated as if alone, never a tick late."""
    model, silent = now_and_then(), Sender()
    model.merge()
    silent.mode = "frozen"
    runs = [stream_command.Input(url, str(n), {}, True) for n, url in enumerate(
        ["http://127.0.0.1:9/dead", silent.url, lavfi(50)])]
    late = []
    with serve(silent):
        items = side_by_side([partial(run.decisions, model, Eyes(), arguments("--live")) for run in runs], 3)
        for which, _ in islice(items, 30):
            assert which == 2
            late.append(time.monotonic() - runs[2].video.arrived)
        began = time.monotonic()
        items.close()                                                          # nor does it keep all from ending
    assert time.monotonic() - began < 5 and np.median(late) < 0.3 and max(late) < 3       # a dead one takes 10 s


def test_jobs_that_wait_are_not_waited_for():
    """A job whose ask.wait never ends: the others' requests are answered, together."""
    asked = []

    def double(requests):
        asked.append(len(requests))
        return [2 * request for request in requests]

    def busy(ask):
        for k in range(3):
            yield ask(double, k)
    items = side_by_side([lambda ask: iter([ask.wait(lambda seconds: time.sleep(seconds))]), busy, busy], 3)
    assert sorted(item for _, item in islice(items, 6)) == [0, 0, 2, 2, 4, 4] and sum(asked) == 6
    items.close()
    assert all(isinstance(item, int) for _, item in side_by_side([busy], 1))


def test_pyav_19(tmp_path, monkeypatch):
    """It has no metadata_errors any more."""
    real = av.open

    def without(file, mode="r", **how):
        assert "metadata_errors" not in how
        return real(file, mode, **how)
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
