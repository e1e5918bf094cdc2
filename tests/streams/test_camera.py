"""Cameras on a real RTSP server: GStreamer's (Debian: gir1.2-gst-rtsp-server-1.0, python3-gi,
gstreamer1.0-plugins-good), started by the system's Python. Skipped where it is absent."""
import re
import socket
import subprocess
import threading
import time
from datetime import datetime
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from beyond.commands import stream_command
from beyond.commands.explain import restarted
from helpers import TOY
from narrator import load
from stream import narrate
from beyond.streams import live
from beyond.streams.bounds import live_bounds, open_stream
from beyond.streams.inputs import Input
from beyond.streams.live import Camera
from support.common.disk import read_jsonl
from support.common.errors import BadData
from support.files.sources import source_of
from support.files.video import Video
from test_data import write_toy
from test_live import arguments
from test_video import record, steady

FPS = 6                                 # three times as fast as it is, to be short
REFRACTORY = 2.5 / FPS                  # s; no frame comes near the end of it
PYTHON = "/usr/bin/python3"
SERVER = """
import sys
try:
    import gi
    gi.require_version("Gst", "1.0")
    gi.require_version("GstRtspServer", "1.0")
    from gi.repository import GLib, Gst, GstRtspServer as rtsp
except (ImportError, ValueError) as error:
    sys.exit(print("no RTSP server:", error))
Gst.init()
if None in map(Gst.ElementFactory.find, ("qtdemux", "rtph264pay")):
    sys.exit(print("no RTSP server: gstreamer1.0-plugins-good is missing"))
port, film = sys.argv[1:]
factory = rtsp.RTSPMediaFactory()
factory.set_launch(f"filesrc location={film} ! qtdemux ! rtph264pay name=pay0 config-interval=1")
permissions = rtsp.RTSPPermissions()
for name in ("access", "construct"):
    permissions.add_permission_for_role("viewer", f"media.factory.{name}", True)
factory.set_permissions(permissions)
token = rtsp.RTSPToken()
token.set_string("media.factory.role", "viewer")
auth = rtsp.RTSPAuth()
auth.add_basic(rtsp.RTSPAuth.make_basic("me", "secret"), token)
server = rtsp.RTSPServer(address="127.0.0.1", service=port)
server.set_auth(auth)
server.get_mount_points().add_factory("/door", factory)
server.attach()
print("ready", flush=True)
GLib.MainLoop().run()
"""


class Server:
    """Shows a film to everybody who comes, from its beginning, and hangs up at its end."""

    def __init__(self, film):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.film = film
        self.url = f"rtsp://me:secret@{self.address}/door"
        self.start()

    def start(self):
        port = self.address.partition(":")[2]
        self.process = subprocess.Popen([PYTHON, "-c", SERVER, port, str(self.film)],
                                        stdout=subprocess.PIPE, text=True)
        answer = self.process.stdout.readline().strip()
        if answer.startswith("no RTSP server"):
            pytest.skip(answer)
        assert answer == "ready"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Of a kitchen; a camera begins at the next key frame, of which there are enough."""
    if not Path(PYTHON).exists():
        pytest.skip(f"no RTSP server: no {PYTHON}")
    folder = tmp_path_factory.mktemp("camera")
    write_toy(folder / "toy.mp4", 1, 0.7)
    pictures = 2 * list(Video(folder / "toy.mp4"))
    server = Server(record(folder / "film.mp4", steady(len(pictures), FPS), bframes=0, gop=3,
                           picture=pictures.__getitem__))
    yield server
    server.process.kill()


def begin_in(film, pictures) -> int | None:
    """The number of the film's picture with which `pictures` begin, if none is left out of them."""
    for begin in range(len(film) - len(pictures) + 1):
        if np.array_equal(film[begin:begin + len(pictures)], pictures):
            return begin
    return None


class Eyes:
    """The toy's vision encoder; keeps what it has seen."""

    def __init__(self, narrator):
        self.encoder = narrator.vision_encoder()
        self.image_size = self.encoder.image_size
        self.seen = []

    def __call__(self, pictures):
        self.seen += list(pictures.numpy())
        return self.encoder(pictures)


def test_sentences_are_those_of_the_film_and_go_on_after_an_outage(
        server, tmp_path, monkeypatch, capsys):
    """No sentence reaches back over it. Every line about it has the time of day."""
    monkeypatch.setattr(live, "OUTAGE", 1.0)
    narrator = load(str(TOY), fps=FPS, refractory=REFRACTORY).merge()
    live_bounds(narrator)
    eyes = Eyes(narrator)
    files = {"jsonl": str(tmp_path / "a.jsonl"), "trace": str(tmp_path / "a.trace")}
    run = stream_command.NarratedInput(Input(source_of(server.url), "", files))
    decisions = run.decisions(narrator, eyes, arguments("--source-option=stimeuot=5"))
    before = list(islice(decisions, 18))
    server.process.kill()
    threading.Timer(0.5, server.start).start()          # it is asked again after 1 s
    after = list(islice(decisions, 6))
    decisions.close()

    film = list(Video(server.film, FPS))
    begin = begin_in(film, eyes.seen[:18])
    assert begin is not None                    # no picture was left out
    features = (eyes.encoder(torch.from_numpy(picture)[None])[0] for picture in film[begin:])
    of_the_film = islice(narrate(narrator, features, context=open_stream(narrator)), 18)
    texts = [decision.narration.text for decision in of_the_film if decision.narration]
    assert [row["text"] for _, row in before if row] == texts
    assert len(texts) > 2

    times = [row["time"] for row in read_jsonl(tmp_path / "a.trace")]
    gaps = [later - time for time, later in zip(times, times[1:])]
    last = gaps.index(max(gaps))                # before the outage: more may have waited
    assert 17 <= last <= 17 + live.QUEUE + 1 and gaps[last] > 1.0
    steps = before + after
    was_open = steps[last][1] is None           # a segment that had just ended is not restarted
    assert restarted(steps[last + 1][0], run.context.layout) == was_open
    rows = read_jsonl(tmp_path / "a.jsonl")
    assert [row["n"] for row in rows] == list(range(len(rows)))
    for row, later in zip(rows, rows[1:]):
        is_over_it = row["end"] <= times[last] < later["end"]
        begin = times[last + 1] - 1 / FPS if is_over_it else row["end"]
        assert later["start"] == pytest.approx(begin, abs=0.002)
    check_wall(rows)

    lines = capsys.readouterr().err.splitlines()
    said = [re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d rtsp://127.0.0.1:\d+/...: (.*)", line)
            for line in lines]
    said = [line[1] for line in said if line]
    assert "stimeuot" in said[0]                # FFmpeg ignores what it does not know
    assert said[1].startswith("no pictures (") and said[2] == "pictures come again"
    assert re.fullmatch(r"\d+ pictures decoded, 24 taken, \d+ dropped; 1 reconnects; "
                        r"sentences at most \d+.\d+ s late", said[3])


def check_wall(rows):
    first, last = rows[0], rows[-1]
    wall = [datetime.fromisoformat(row["wall"]).timestamp() for row in (first, last)]
    assert wall[1] - wall[0] == pytest.approx(last["end"] - first["end"], abs=0.6)
    assert abs(wall[1] - time.time()) < 60


def test_refused(server, monkeypatch):
    with pytest.raises(BadData) as error:
        next(iter(Camera(server.url.replace("secret", "wrong"))))
    address = f"rtsp://{server.address}/..."
    assert str(error.value) == (f"{address}: no pictures at attempt 1 (Server returned 401 Unauthorized "
                                f"(authorization failed)); check the source")
    monkeypatch.setattr(live, "PATIENCE", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(BadData, match=r"no pictures at attempt 1 \(nothing came for 0.3 s\); check"):
            next(iter(Camera(f"rtsp://127.0.0.1:{silent.getsockname()[1]}/door")))
