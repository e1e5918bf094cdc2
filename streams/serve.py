"""The page of stream.py (not in the paper): `--html FILE` at the end, `--serve [PORT]` meanwhile.

    /               the page of page.py with everything until now
    /events         what comes after it, as server-sent events; a client that is late gets at most
                    the last RING events
    /frame.jpg      the newest picture, as the vision encoder got it
    /video          of a recording, the file, in ranges

The stream only puts a line into a queue and wakes the clients' threads. Each client has a thread of
its own, so no client delays a narration.

Read only, and for this machine only: the server listens at 127.0.0.1. The Host header must say so,
too, because a foreign page could give its own name this address.
"""
from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Condition, Thread

import av
import numpy as np

from streams.page import Record, make_page, video_address
from support.common.disk import write_text
from support.common.errors import BadData
from support.common.text import without_secrets
from support.files.features import is_features

HOST = "127.0.0.1"
PORT = 8765
RING = 1000                             # events that are kept for clients that come back
QUIET = 15.0                            # seconds between signs of life
PAUSE = 0.05                            # seconds between two writes to one client
JPEG = {"qmin": "3", "qmax": "3"}       # quality of pictures, from 1 (best) to 31
CHUNK = 1 << 18                         # bytes of a file that are sent at once


class Page(AbstractContextManager):
    """The page of one input. Leaving the `with` writes its file and tells its clients.

    source      the input
    path        the file to write, if any
    live        the source cannot be read again
    """

    def __init__(self, source: str, path: str | None = None, live: bool = False):
        self.path = path
        self.record = Record()
        recorded = not live and Path(source).is_file()
        shows_pictures = not is_features(source)
        self.video = Path(source) if recorded and shows_pictures else None
        self.camera = not recorded and shows_pictures
        self.title = Path(source).name if recorded else without_secrets(source)

        self.news = Condition()                     # of all that `tell` changes
        self.process = os.urandom(4).hex()          # part of an event's id: its number begins anew
        self.step = 0                               # number of the last event
        self.events = deque(maxlen=RING)            # (number, text)
        self.ended = False
        self.newest_at = time.monotonic()           # when the newest row came
        self.picture = None                         # the newest, uint8 [H, W, 3 or 6]

    def tell(self, row: dict, narration: dict | None) -> None:
        """Add a row of the trace and the narration of its frame, and wake the clients."""
        with self.news:
            self.step += 1
            self.newest_at = time.monotonic()
            data = json.dumps(self.record.add(row, narration))
            event = f"event: row\nid: {self.process}-{self.step}\ndata: {data}\n\n"
            self.events.append((self.step, event.encode()))
            self.news.notify_all()

    def __exit__(self, *_) -> None:
        with self.news:
            self.ended = True
            self.news.notify_all()
        if self.path and len(self.record):
            video = video_address(self.video, Path(self.path)) if self.video else None
            write_text(self.path, make_page(self.title, self.record.content(), video))

    def html(self) -> str:
        """The page as it is served."""
        with self.news:
            live = {
                "process": self.process,
                "after": f"{self.process}-{self.step}",
                "camera": self.camera,
                "quiet": round(time.monotonic() - self.newest_at, 1),
            }
            content = self.record.content(live)
        return make_page(self.title, content, "video" if self.video else None)

    def since(self, last: str) -> Iterator[bytes]:
        """All server-sent events after the id `last`, for ever.

        After QUIET seconds without events comes a comment.
        """
        step = 0                                    # number of the last event that the client has
        match = re.fullmatch(rf"{self.process}-([0-9]{{1,15}})", last)
        if match:
            step = min(int(match[1]), self.step)
        with self.news:
            first = self.record.first if len(self.record) else None
        hello = json.dumps({"process": self.process, "first": first})
        yield f"retry: 500\nevent: hello\ndata: {hello}\n\n".encode()
        end_sent = False
        while True:
            with self.news:
                self.news.wait_for(lambda: self.step > step or self.ended and not end_sent, QUIET)
                events = [event for number, event in self.events if number > step]
                step = self.step
                if self.ended and not end_sent:
                    events.append(b"event: end\ndata: {}\n\n")
                    end_sent = True
            yield b"".join(events) or b": still here\n\n"


def jpeg(picture: np.ndarray) -> bytes:
    """A picture, uint8 [H, W, 3], as a file."""
    encoder = av.CodecContext.create("mjpeg", "w")
    encoder.height, encoder.width = picture.shape[:2]
    encoder.pix_fmt = "yuvj420p"
    encoder.time_base = Fraction(1)
    encoder.options = JPEG
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), "rgb24")
    packets = encoder.encode(frame.reformat(format="yuvj420p"))
    packets += encoder.encode(None)
    return b"".join(bytes(packet) for packet in packets)


# ---------------------------------------------------------------------- the server

def serve(page: Page, port: int) -> str:
    """Serve a page from a thread, for ever; returns its address."""
    try:
        server = Server((HOST, port), Handler)
    except OSError as error:
        raise BadData(f"--serve: cannot listen at {HOST}:{port} ({error.strerror}); "
                      f"give another port, or 0 for any") from None
    server.page = page
    Thread(target=server.serve_forever, daemon=True).start()
    return f"http://{HOST}:{server.server_port}/"


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address) -> None:
        """A client that has left is no error."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    timeout = 30                                    # seconds for the request and for each write

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        page = self.server.page
        name = self.path.partition("?")[0]
        if self.headers.get("Host", "").partition(":")[0] not in (HOST, "localhost"):
            self.send_error(403)
        elif name == "/":
            self.answer("text/html; charset=utf-8", page.html().encode())
        elif name == "/events":
            self.send_events(page)
        elif name == "/frame.jpg" and page.picture is not None:
            self.answer("image/jpeg", jpeg(np.asarray(page.picture)[..., :3]))
        elif name == "/video" and page.video:
            self.send_video(page.video)
        else:
            self.send_error(404)

    def answer(self, kind: str, body: bytes) -> None:
        self.send_head(200, kind, {"Content-Length": len(body)})
        self.wfile.write(body)

    def send_head(self, code: int, kind: str, headers: dict) -> None:
        self.send_response(code)
        safe = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff",
                "X-Frame-Options": "DENY", "Cross-Origin-Resource-Policy": "same-origin"}
        for name, value in ({"Content-Type": kind} | headers | safe).items():
            self.send_header(name, str(value))
        self.end_headers()

    def send_events(self, page: Page) -> None:
        """Send server-sent events until the client leaves."""
        self.send_head(200, "text/event-stream", {})
        # a browser that connects again sends the header; a new page, the parameter
        asked = re.search(r"[?&]after=([\w-]+)", self.path)
        last = self.headers.get("Last-Event-ID") or (asked[1] if asked else "")
        for block in page.since(last):
            self.wfile.write(block)
            time.sleep(PAUSE)

    def send_video(self, path: Path) -> None:
        """Send a file, or the range of it that the client asks for."""
        size = path.stat().st_size
        code = 200
        first, last = 0, size - 1                   # bytes
        headers = {"Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=([0-9]{1,15})-([0-9]{0,15})", self.headers.get("Range", ""))
        if asked and int(asked[1]) < size:
            code = 206
            first = int(asked[1])
            if asked[2]:
                last = min(last, int(asked[2]))
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        left = max(0, last - first + 1)
        kinds = {".webm": "video/webm", ".ogv": "video/ogg"}
        kind = kinds.get(path.suffix.lower(), "video/mp4")
        self.send_head(code, kind, {"Content-Length": left, **headers})
        with open(path, "rb") as file:
            file.seek(first)
            while left:
                piece = file.read(min(left, CHUNK))
                if not piece:                       # the file has become shorter
                    return
                self.wfile.write(piece)
                left -= len(piece)
