"""The pages of stream.py: `--html FILE` at the end, `--serve [PORT]` while it runs (not in the paper).

    /                   the page of page.py with all until now; of several inputs, a list of /NAME/
    /events             what comes after it, as server-sent events; a client that is late gets the last RING at most
    /frame.jpg          the newest picture, as the vision encoder got it; of a recording, /video is the file, in ranges
    /narrations.jsonl, /narrations.vtt

The stream only puts a line into a queue and wakes whoever waits; each client has a thread of its own, so none can delay
a narration. There are at most CONNECTIONS of them, and each has HEAD seconds to say what it wants. The page of a long
stream takes a second to make; it is made once for all who ask within CACHED seconds.

Read only. Nobody else's page can read it: the Host header must name this server or its machine, or be an address (a
name that somebody else lets lead here by DNS is none of these), and no other origin is allowed. Standard library; PyAV
for pictures.
"""
from __future__ import annotations

import html
import io
import ipaddress
import json
import os
import re
import socket
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Condition, Lock, Semaphore, Thread
from urllib.parse import quote, unquote

import av
import numpy as np

from streams.page import Record, make_page, video_address
from streams.subtitles import vtt_cue
from support.common.addresses import without_secrets
from support.common.disk import check_distinct, check_writable, write_text
from support.common.errors import BadData
from support.common.options import LARGEST, in_range
from support.files.features import is_features

HOST, PORT, RING, SENTENCES = "127.0.0.1", 8765, 1000, 20_000     # of what is kept: events for those who come back
QUIET, PAUSE = 15.0, 0.05               # seconds: between signs of life; between two writes to one client
CONNECTIONS = 64                        # at a time; more are answered 503
HEAD = 10.0                             # seconds until the head of a request must be there
LONGEST = 65_536                        # bytes of it
CACHED = 1.0                            # seconds for which a page that has been made is given again
NOWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}    # for documents: nobody's
JPEG = {"qmin": "3", "qmax": "3"}       # quality of pictures, of 1 (best) to 31


def page_options(parser: ArgumentParser):
    parser.add_argument("--html", metavar="FILE", help="also write a page that plays the video with its narrations")
    parser.add_argument("--serve", nargs="?", const=PORT, metavar="PORT",
                        type=in_range(int, 0, 65535, "a port, 0 to 65535 (0: any free one)"),
                        help=f"show the same page while narrating, at http://{HOST}:{PORT}/ or another port")
    parser.add_argument("--host", default=HOST, metavar="ADDRESS",
                        help="of --serve: the address to listen at (default %(default)s, this machine only)")


def jpeg(picture: np.ndarray) -> bytes:
    """A picture, uint8 [H, W, 3], as a file."""
    coder = av.CodecContext.create("mjpeg", "w")
    coder.height, coder.width, coder.pix_fmt, coder.time_base = *picture.shape[:2], "yuvj420p", Fraction(1)
    coder.options = JPEG
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), "rgb24").reformat(format="yuvj420p")
    return b"".join(bytes(packet) for packet in [*coder.encode(frame), *coder.encode(None)])


class Page(AbstractContextManager):
    """The page of one input. At the end of the `with`, its file is written, and its clients are told."""

    def __init__(self, source: str, path: str | None = None, others: Sequence[str] = (), live: bool = False,
                 wanted: bool = True):
        self.path, self.record, self.sentences, self.wanted = path, Record(), deque(maxlen=SENTENCES), wanted
        recorded = not live and Path(source).is_file()
        self.video = Path(source) if recorded and not is_features(source) else None
        self.camera = not recorded and not is_features(source)
        self.title = Path(source).name if recorded else without_secrets(source)
        self.news, self.events, self.step, self.ended = Condition(), deque(maxlen=RING), 0, False
        self.process, self.picture, self.coded = os.urandom(4).hex(), None, (None, b"")
        self.newest_at = time.monotonic()                               # when the newest row came
        self.making = Lock()                                            # one page is made at a time
        self.made, self.made_at = b"", -CACHED                          # the last one, and when
        if path:
            check_distinct(source, *others, path)
            check_writable(path)

    def see(self, pictures):
        """Pictures on their way to the vision encoder, uint8 [B, H, W, 3 or 6]; returns them."""
        if self.wanted:
            self.picture = pictures[-1]
        return pictures

    def tell(self, row: dict, narration: dict | None):
        """A row of the trace, and the narration of its frame."""
        if not self.wanted:
            return
        with self.news:
            self.step += 1
            self.newest_at = time.monotonic()
            text = json.dumps(self.record.add(row, narration))
            self.events.append((self.step, f"event: row\nid: {self.process}-{self.step}\ndata: {text}\n\n".encode()))
            if narration is not None:
                self.sentences.append(narration)
            self.news.notify_all()

    def __exit__(self, *_):
        with self.news:
            self.ended = True
            self.news.notify_all()
        if self.path and len(self.record):
            write_text(self.path, self.html(Path(self.path)))

    def html(self, path: Path | None = None) -> str:
        """The page as a file at `path`, or as it is served."""
        with self.news:
            live = None if path else {"process": self.process, "after": f"{self.process}-{self.step}",
                                      "camera": self.camera,
                                      "quiet": round(time.monotonic() - self.newest_at, 1)}
            record = self.record.so_far()
        source = self.video and (video_address(self.video, path) if path else "video")
        return make_page(self.title, record.content(live=live), source)

    def served(self) -> bytes:
        """The page as it is served, at most CACHED seconds old. What came since, its events bring."""
        with self.making:
            if time.monotonic() - self.made_at >= CACHED:
                self.made = self.html().encode()
                self.made_at = time.monotonic()
            return self.made

    def since(self, last: str) -> Iterator[bytes]:
        """Server-sent events of all that comes after the id `last`, for ever; a comment after QUIET seconds of none."""
        known, told = re.fullmatch(rf"{self.process}-([0-9]{{1,15}})", last), False
        step = min(int(known[1]), self.step) if known else 0
        with self.news:
            first = self.record.first if len(self.record) else None
        yield f"retry: 500\nevent: hello\ndata: {json.dumps({'process': self.process, 'first': first})}\n\n".encode()
        while True:
            with self.news:
                self.news.wait_for(lambda: self.step > step or self.ended and not told, QUIET)
                waiting, step = [text for number, text in self.events if number > step], self.step
                over, told = self.ended and not told, self.ended
            yield b"".join(waiting + [b"event: end\ndata: {}\n\n"] * over) or b": still here\n\n"

    def jpeg(self) -> bytes | None:
        """The newest picture, coded once however many ask."""
        picture, (known, data) = self.picture, self.coded
        if picture is None or picture is known:
            return data or None
        data = jpeg(np.asarray(picture)[..., :3])
        self.coded = picture, data
        return data


class Pages:
    """The pages of all inputs of a command line. `runs` have source and name, and get a `page`.

    Raises BadData if a file cannot be written or if the port is taken.
    """

    def __init__(self, args: Namespace, runs: list):
        several, self.url = len(runs) > 1, None
        if args.host != HOST and args.serve is None:
            raise BadData("--host is the address of --serve; give that, too")
        if args.html and args.state:
            raise BadData("--html with --state would be a page of what came after the last start; make it at the end, "
                          "by python -m streams.page VIDEO JSONL --trace TRACE")
        for run in runs:
            path = f"{args.html}/{run.name}.html" if args.html and several else args.html
            others = [file for file in run.files.values() if file]
            wanted = bool(path) or args.serve is not None
            run.page = Page(run.source, path, others, run.live, wanted)
        if args.serve is not None:
            self.url = serve({run.name: run.page for run in runs}, args.host, args.serve)
            print(f"page: {self.url}", file=sys.stderr, flush=True)

    def wait(self):
        """While pages are served: until Ctrl-C."""
        if self.url:
            print(f"done; the page stays at {self.url} until Ctrl-C", file=sys.stderr, flush=True)
            while True:
                time.sleep(LARGEST)


def serve(pages: dict[str, Page], host: str, port: int) -> str:
    """Serve pages from a thread, for ever; returns their address."""
    try:
        kind = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        server = type("Server", (Server,), {"address_family": kind})((host, port), Handler)
    except (OSError, UnicodeError) as error:
        raise BadData(f"--serve: cannot listen at {host}:{port} ({error}); give another port, or 0 for any") from None
    server.pages, server.names = pages, own_names(host)
    Thread(target=server.serve_forever, daemon=True).start()
    shown = host
    if host in ("", "0.0.0.0", "::"):                          # all of them: show one for others
        shown = network_address(kind) or socket.gethostname()
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{server.server_address[1]}/"


def network_address(kind: int) -> str | None:
    """The address by which others reach this machine; None: it is on no network. Nothing is
    sent."""
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((NOWHERE[kind], 9))
            return probe.getsockname()[0]
        except OSError:
            return None


def own_names(host: str) -> set[str]:
    """Names by which this machine may be called, in small letters, where --host is `host`."""
    name = socket.gethostname()
    short = name.partition(".")[0]
    return {one.lower() for one in ("localhost", host, name, short, f"{short}.local")}


class Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 64

    def __init__(self, *address):
        self.places = Semaphore(CONNECTIONS)
        super().__init__(*address)

    def process_request(self, request, client_address):
        """A thread for the connection, if there is a place for it."""
        if not self.places.acquire(blocking=False):
            request.settimeout(0)                              # who does not take the answer at once gets none
            with suppress(OSError):
                request.send(b"HTTP/1.1 503 Service Unavailable\r\n"
                             b"Content-Length: 0\r\nConnection: close\r\n\r\n")
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:                                  # there was no thread
            self.places.release()
            raise

    def process_request_thread(self, request, client_address):
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.places.release()

    def handle_error(self, request, client_address):
        """A client that is gone is no error."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version, timeout, server_version, sys_version = "HTTP/1.1", 30, "stream", ""   # timeout: of each write

    def setup(self):
        super().setup()
        self.received = b""                                    # and not used yet

    def handle_one_request(self):
        """A request, once its head is there; it has no body. The connection of a client that takes
        too long is closed."""
        self.close_connection = True
        latest = time.monotonic() + HEAD
        while not (end := re.search(rb"\r?\n\r?\n", self.received)):
            left = latest - time.monotonic()
            if left <= 0 or len(self.received) > LONGEST:
                return
            self.connection.settimeout(left)
            piece = self.connection.recv(LONGEST)
            if not piece:
                return
            self.received += piece
        self.connection.settimeout(self.timeout)
        self.rfile = io.BytesIO(self.received[:end.end()])
        self.received = self.received[end.end():]
        super().handle_one_request()

    def log_message(self, *_):
        pass

    def invited(self) -> bool:
        """Does the Host header name this server? An address, or a name of this machine."""
        host = re.sub(r":\d+$", "", self.headers.get("Host", "")).strip("[]").lower()
        try:
            return host in self.server.names or bool(ipaddress.ip_address(host))
        except ValueError:
            return False

    def do_GET(self):
        name, _, what = unquote(self.path.partition("?")[0]).lstrip("/").rpartition("/")
        page = self.server.pages.get(name)
        if not self.invited():
            self.answer(403, "text/plain", b"this server has another name\n")
        elif page is None and (name or what):
            self.answer(404, "text/plain", b"there is no such page\n")
        elif page is None:
            links = "".join(f'<li><a href="{quote(name)}/">{html.escape(name)}</a>' for name in self.server.pages)
            start = "<!doctype html><meta name=color-scheme content='light dark'><title>Streams</title><ul>"
            self.answer(200, "text/html", (start + links).encode())
        elif what == "events":
            self.events(page)
        elif what == "video" and page.video:
            self.file(page.video)
        else:
            self.small(page, what)

    do_HEAD = do_GET

    def small(self, page: Page, what: str):
        kinds = {"": "text/html", "frame.jpg": "image/jpeg", "narrations.jsonl": "application/jsonl",
                 "narrations.vtt": "text/vtt"}
        body = None
        if what in kinds:
            with page.news:
                said = list(page.sentences)
            body = (page.served() if not what else page.jpeg() if what == "frame.jpg" else
                    "".join(json.dumps(y) + "\n" for y in said).encode() if what == "narrations.jsonl" else
                    ("WEBVTT\n\n" + "".join(vtt_cue(y["start"], y["end"], y["text"]) for y in said)).encode())
        if body is None:
            self.answer(404, "text/plain", b"there is nothing of that name\n")
        else:
            self.answer(200, kinds[what], body)

    def answer(self, code: int, kind: str, body: bytes):
        self.head(code, kind, {"Content-Length": len(body)})
        if self.command != "HEAD":
            self.wfile.write(body)

    def head(self, code: int, kind: str, more: dict):
        self.send_response(code)
        safe = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
                "X-Frame-Options": "DENY", "Cross-Origin-Resource-Policy": "same-origin"}
        text = kind + ("; charset=utf-8" if kind.startswith("text/") else "")
        for name, value in ({"Content-Type": text} | more | safe).items():
            self.send_header(name, str(value))
        self.end_headers()

    def events(self, page: Page):
        """Server-sent events until the client leaves; each thread waits in its own socket."""
        self.close_connection = True
        self.head(200, "text/event-stream", {"Connection": "close"})
        if self.command == "HEAD":
            return
        after = re.search(r"[?&]after=([\w-]+)", self.path)
        for block in page.since(self.headers.get("Last-Event-ID") or (after[1] if after else "")):
            self.wfile.write(block)
            time.sleep(PAUSE)

    def file(self, path: Path):
        """A file, or the range of it that is asked for."""
        size = path.stat().st_size
        wanted = re.fullmatch(r"bytes=([0-9]{0,15})-([0-9]{0,15})", self.headers.get("Range", ""))
        low, high, code, more = 0, size - 1, 200, {"Accept-Ranges": "bytes"}
        if wanted and any(wanted.groups()):
            low, high = (max(0, size - int(wanted[2])), high) if not wanted[1] else (
                int(wanted[1]), min(high, int(wanted[2] or high)))
            code = 206 if low <= high else 416
            more["Content-Range"] = f"bytes {low}-{high}/{size}" if code == 206 else f"bytes */{size}"
        left = high - low + 1 if code != 416 else 0
        self.head(code, "video/" + {".webm": "webm", ".ogv": "ogg"}.get(path.suffix.lower(), "mp4"),
                  {"Content-Length": left, **more})
        if self.command != "HEAD":
            with open(path, "rb") as file:
                file.seek(low)
                while left and (piece := file.read(min(left, 1 << 18))):
                    self.wfile.write(piece)
                    left -= len(piece)
