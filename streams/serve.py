"""The pages of stream.py (not in the paper): `--html FILE` at the end, `--serve [PORT]` meanwhile.

    /                   the page of page.py with everything until now; of several inputs, a list of
                        /NAME/
    /events             what comes after it, as server-sent events; a client that is late gets at
                        most the last RING events
    /frame.jpg          the newest picture, as the vision encoder got it
    /video              of a recording, the file, in ranges
    /narrations.jsonl, /narrations.vtt

The stream only puts a line into a queue and wakes the clients' threads. Each client has a thread
of its own, so no client can delay a narration. There are at most CONNECTIONS of them, and each has
HEAD seconds to send its request. The page of a long stream takes a second to make; it is made once
for all clients that ask within CACHED seconds.

Read only. Pages of other origins cannot read it: the Host header must name this server or its
machine, or be an address (a foreign name that DNS leads here is none of these), and no other origin
is allowed. Standard library; PyAV for pictures.
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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Condition, Lock, Semaphore, Thread
from urllib.parse import quote, unquote

import av
import numpy as np

from streams.page import Record, make_page, video_address
from streams.subtitles import check_replaced, vtt_cue
from support.common.disk import check_distinct, check_writable, write_text
from support.common.errors import BadData
from support.common.options import LARGEST, in_range
from support.common.text import without_secrets
from support.files.features import is_features

HOST = "127.0.0.1"
PORT = 8765
RING = 1000                             # events that are kept for clients that come back
SENTENCES = 20_000                      # of the newest, in /narrations.jsonl and .vtt
QUIET = 15.0                            # seconds between signs of life
PAUSE = 0.05                            # seconds between two writes to one client
CONNECTIONS = 64                        # at a time; more are answered 503
HEAD = 10.0                             # seconds in which the head of a request must come
LONGEST = 65_536                        # bytes of the head
CACHED = 1.0                            # seconds for which a page that has been made is given again
JPEG = {"qmin": "3", "qmax": "3"}       # quality of pictures, from 1 (best) to 31
CHUNK = 1 << 18                         # bytes of a file that are sent at once
# addresses for documentation, which belong to nobody
NOWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


def page_options(parser: ArgumentParser):
    parser.add_argument("--html", metavar="FILE",
                        help="also write a page that plays the video with its narrations")
    parser.add_argument("--serve", nargs="?", const=PORT, metavar="PORT",
                        type=in_range(int, 0, 65535, "a port, 0 to 65535 (0: any free one)"),
                        help=f"show the same page while narrating, at http://{HOST}:{PORT}/ "
                             f"or another port")
    parser.add_argument("--host", default=HOST, metavar="ADDRESS",
                        help="of --serve: the address to listen at "
                             "(default %(default)s, this machine only)")


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


# ---------------------------------------------------------------------- pages

class Page(AbstractContextManager):
    """The page of one input. Leaving the `with` writes its file and tells its clients.

    source      the input
    path        the file to write, if any
    others      paths that `path` must differ from
    live        the source cannot be read again
    wanted      False: nothing is recorded
    """

    def __init__(self, source: str, path: str | None = None, others: Sequence[str] = (),
                 live: bool = False, wanted: bool = True):
        self.path = path
        self.wanted = wanted
        self.record = Record()
        self.sentences = deque(maxlen=SENTENCES)
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
        self.picture = None                         # the newest
        self.coded = (None, b"")                    # (picture, file), the last one that was encoded
        self.making = Lock()                        # one page is made at a time
        self.made = b""                             # the last page
        self.made_at = -CACHED                      # when it was made
        if path:
            check_distinct(source, *others, path)
            check_writable(path)

    def see(self, pictures):
        """Keep the last of the pictures, uint8 [B, H, W, 3 or 6]; returns all of them."""
        if self.wanted:
            self.picture = pictures[-1]
        return pictures

    def tell(self, row: dict, narration: dict | None):
        """Add a row of the trace and the narration of its frame, and wake the clients."""
        if not self.wanted:
            return
        with self.news:
            self.step += 1
            self.newest_at = time.monotonic()
            data = json.dumps(self.record.add(row, narration))
            event = f"event: row\nid: {self.process}-{self.step}\ndata: {data}\n\n"
            self.events.append((self.step, event.encode()))
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
            record = self.record.so_far()
            live = None
            if path is None:
                live = {"process": self.process, "after": f"{self.process}-{self.step}",
                        "camera": self.camera,
                        "quiet": round(time.monotonic() - self.newest_at, 1)}
        video = None
        if self.video is not None:
            video = "video" if path is None else video_address(self.video, path)
        return make_page(self.title, record.content(live=live), video)

    def served(self) -> bytes:
        """The page as it is served, at most CACHED seconds old. Events bring the newer rows."""
        with self.making:
            if time.monotonic() - self.made_at >= CACHED:
                self.made = self.html().encode()
                self.made_at = time.monotonic()
            return self.made

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

    def jpeg(self) -> bytes | None:
        """The newest picture as a file, encoded once for all clients; None: there is none."""
        picture = self.picture
        coded_picture, data = self.coded
        if picture is None or picture is coded_picture:
            return data or None
        data = jpeg(np.asarray(picture)[..., :3])
        self.coded = (picture, data)
        return data


class Pages:
    """The pages of all inputs of a command line. `runs` have source and name, and get a `page`.

    Raises BadData if a file cannot be written, if it is there and is no page, or if the port is
    taken.
    """

    def __init__(self, args: Namespace, runs: list):
        self.url = None
        if args.host != HOST and args.serve is None:
            raise BadData("--host is the address of --serve; give that, too")
        if args.html and args.state:
            raise BadData("--html with --state would be a page of what came after the last start; "
                          "make it at the end, "
                          "by python -m streams.page VIDEO JSONL --trace TRACE")
        for run in runs:
            path = args.html
            if args.html and len(runs) > 1:
                path = f"{args.html}/{run.name}.html"
            if path and not getattr(args, "overwrite", False):
                check_replaced(run.source, {"html": path})
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


# ---------------------------------------------------------------------- the server

def serve(pages: dict[str, Page], host: str, port: int) -> str:
    """Serve pages, by name, from a thread, for ever; returns their address."""
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM,
                                       flags=socket.AI_PASSIVE)
        family = addresses[0][0]
        server = Server((host, port), family)
    except (OSError, UnicodeError) as error:
        raise BadData(f"--serve: cannot listen at {host}:{port} ({error}); "
                      f"give another port, or 0 for any") from None
    server.pages = pages
    server.names = own_names(host)
    Thread(target=server.serve_forever, daemon=True).start()
    shown = host
    if host in ("", "0.0.0.0", "::"):               # all addresses: print one that others can open
        shown = network_address(family) or socket.gethostname()
    if ":" in shown:
        shown = f"[{shown}]"
    return f"http://{shown}:{server.server_address[1]}/"


def network_address(family: int) -> str | None:
    """The address by which others reach this machine; None: it is on no network.

    Nothing is sent.
    """
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((NOWHERE[family], 9))
            return probe.getsockname()[0]
        except OSError:
            return None


def own_names(host: str) -> set[str]:
    """Names by which this machine may be called, in small letters, where --host is `host`."""
    name = socket.gethostname()
    short = name.partition(".")[0]
    return {spelling.lower() for spelling in ("localhost", host, name, short, f"{short}.local")}


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], family: int):
        self.address_family = family
        self.places = Semaphore(CONNECTIONS)
        super().__init__(address, Handler)

    def process_request(self, request, client_address):
        """Start a thread for the connection, if there is a place for it."""
        if not self.places.acquire(blocking=False):
            request.settimeout(0)                   # a client that does not read at once gets none
            with suppress(OSError):
                request.send(b"HTTP/1.1 503 Service Unavailable\r\n"
                             b"Content-Length: 0\r\nConnection: close\r\n\r\n")
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:                       # no thread could be started
            self.places.release()
            raise

    def process_request_thread(self, request, client_address):
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.places.release()

    def handle_error(self, request, client_address):
        """A client that has left is no error."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30                                    # seconds for each write
    server_version = "stream"
    sys_version = ""

    def setup(self):
        super().setup()
        self.received = b""                         # bytes after the last request

    def handle_one_request(self):
        """Answer a request, once its head is there; it has no body.

        The connection of a client that takes too long is closed.
        """
        self.close_connection = True
        latest = time.monotonic() + HEAD
        while True:
            end = re.search(rb"\r?\n\r?\n", self.received)
            if end:
                break
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
        """Does the Host header name this server? It is an address, or a name of this machine."""
        host = re.sub(r":\d+$", "", self.headers.get("Host", "")).strip("[]").lower()
        try:
            return host in self.server.names or bool(ipaddress.ip_address(host))
        except ValueError:
            return False

    def do_GET(self):
        path = unquote(self.path.partition("?")[0]).lstrip("/")
        name, _, file = path.rpartition("/")        # /NAME/FILE, or /FILE for the only input
        page = self.server.pages.get(name)
        if not self.invited():
            self.answer(403, "text/plain", b"this server has another name\n")
        elif page is None and (name or file):
            self.answer(404, "text/plain", b"there is no such page\n")
        elif page is None:
            self.answer(200, "text/html", list_of_pages(self.server.pages).encode())
        elif file == "events":
            self.send_events(page)
        elif file == "video" and page.video:
            self.send_video(page.video)
        else:
            self.send_small(page, file)

    do_HEAD = do_GET

    def send_small(self, page: Page, file: str):
        with page.news:
            sentences = list(page.sentences)
        body = None
        if file == "":
            kind = "text/html"
            body = page.served()
        elif file == "frame.jpg":
            kind = "image/jpeg"
            body = page.jpeg()
        elif file == "narrations.jsonl":
            kind = "application/jsonl"
            body = "".join(json.dumps(sentence) + "\n" for sentence in sentences).encode()
        elif file == "narrations.vtt":
            kind = "text/vtt"
            cues = [vtt_cue(sentence["start"], sentence["end"], sentence["text"])
                    for sentence in sentences if "repeat" not in sentence]
            body = ("WEBVTT\n\n" + "".join(cues)).encode()
        if body is None:
            self.answer(404, "text/plain", b"there is nothing of that name\n")
        else:
            self.answer(200, kind, body)

    def answer(self, code: int, kind: str, body: bytes):
        self.send_head(code, kind, {"Content-Length": len(body)})
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_head(self, code: int, kind: str, headers: dict):
        self.send_response(code)
        if kind.startswith("text/"):
            kind += "; charset=utf-8"
        safe = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff",
                "Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY",
                "Cross-Origin-Resource-Policy": "same-origin"}
        for name, value in ({"Content-Type": kind} | headers | safe).items():
            self.send_header(name, str(value))
        self.end_headers()

    def send_events(self, page: Page):
        """Send server-sent events until the client leaves."""
        self.close_connection = True
        self.send_head(200, "text/event-stream", {"Connection": "close"})
        if self.command == "HEAD":
            return
        # a browser that connects again sends the header; a new page, the parameter
        last = self.headers.get("Last-Event-ID")
        if not last:
            match = re.search(r"[?&]after=([\w-]+)", self.path)
            last = match[1] if match else ""
        for block in page.since(last):
            self.wfile.write(block)
            time.sleep(PAUSE)

    def send_video(self, path: Path):
        """Send a file, or the range of it that the client asks for."""
        size = path.stat().st_size
        code = 200
        low = 0                                     # first and last byte
        high = size - 1
        headers = {"Accept-Ranges": "bytes"}
        match = re.fullmatch(r"bytes=([0-9]{0,15})-([0-9]{0,15})", self.headers.get("Range", ""))
        if match and (match[1] or match[2]):
            if match[1]:
                low = int(match[1])
                if match[2]:
                    high = min(high, int(match[2]))
            else:                                   # bytes=-N: the last N
                low = max(0, size - int(match[2]))
            if low <= high:
                code = 206
                headers["Content-Range"] = f"bytes {low}-{high}/{size}"
            else:
                code = 416
                headers["Content-Range"] = f"bytes */{size}"
        left = 0 if code == 416 else high - low + 1
        kinds = {".webm": "video/webm", ".ogv": "video/ogg"}
        kind = kinds.get(path.suffix.lower(), "video/mp4")
        self.send_head(code, kind, {"Content-Length": left, **headers})
        if self.command == "HEAD":
            return
        with open(path, "rb") as file:
            file.seek(low)
            while left:
                piece = file.read(min(left, CHUNK))
                if not piece:                       # the file has become shorter
                    return
                self.wfile.write(piece)
                left -= len(piece)


def list_of_pages(names: Iterable[str]) -> str:
    """The page at / where there are several inputs."""
    links = "".join(f'<li><a href="{quote(name)}/">{html.escape(name)}</a>' for name in names)
    return ("<!doctype html><meta name=color-scheme content='light dark'>"
            f"<title>Streams</title><ul>{links}")
