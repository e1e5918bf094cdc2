"""The page of stream.py (not in the paper): `--html FILE` at the end, `--serve [PORT]` meanwhile.

    /               the page of page.py with everything until now
    /events         what comes after it, as server-sent events
    /frame.jpg      the newest picture, as the vision encoder got it

The stream only puts a line into a list and wakes the clients' threads. Each client has a thread of
its own, and what takes time is made once for all of them, so no client delays a narration. One that
has missed events loads the page again.

Read only, and for this machine only: the server listens at 127.0.0.1. The Host header must say so,
too, because a foreign page could give its own name this address. And what a browser says of where a
request comes from must be this page: no other one may show the camera.
"""
import json
import re
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from threading import Condition, Lock, Thread

import numpy as np
from PIL import Image                   # it comes with matplotlib

from beyond.streams.inputs import Input
from beyond.streams.page import Record, make_page, video_source
from support.common.disk import expecting, read_jsonl, write_text
from support.common.errors import BadData

HOST = "127.0.0.1"
PORT = 8765
LATE = 1000                             # events that a client may be late
PAUSE = 0.05                            # seconds between two writes to one client


class Page(AbstractContextManager):
    """The page of one input. Leaving the `with` writes its file, and ends it for its clients."""

    def __init__(self, given: Input):
        source = given.source
        self.path = given.files.get("html")
        self.record = Record()
        self.shows_pictures = source.kind != "features"
        self.video = source.path if source.kind == "video" else None
        self.title = str(source)
        if source.kind in ("video", "features"):
            self.title = Path(source.given).name

        self.news = Condition()                     # of all that `tell` changes
        self.events = deque(maxlen=LATE)            # the newest, as JSON
        self.count = 0                              # of all events
        self.ended = False
        self.picture = None                         # the newest, uint8 [H, W, 3]
        self.making = Lock()                        # of `bodies`
        self.bodies = {}                            # {path: (when it was made, the bytes)}

    def remember(self, jsonl: str) -> None:
        """Take the sentences of before a restart from the --jsonl file.

        A client that is there already lacks them: it loads the page again at the next row.
        """
        with self.news, expecting(jsonl, "the --jsonl of stream.py"):
            for narration in read_jsonl(Path(jsonl)):
                self.record.add_narration(narration)

    def tell(self, row: dict, narration: dict | None) -> None:
        """Add a row of the trace and the narration of its frame, and wake the clients."""
        with self.news:
            self.events.append(json.dumps(self.record.add(row, narration)))
            self.count += 1
            self.news.notify_all()

    def __exit__(self, *_) -> None:
        with self.news:
            self.ended = True
            self.news.notify_all()
        if self.path and self.record.last >= 0:
            video = video_source(self.video, Path(self.path)) if self.video else None
            write_text(self.path, make_page(self.title, self.record.content(), video))

    def body(self, path: str, make: Callable[[], bytes], seconds: float) -> bytes:
        """What make() gives, made anew after some seconds, however many clients ask for it."""
        with self.making:
            made, body = self.bodies.get(path, (-seconds, b""))
            if time.monotonic() - made >= seconds:
                body = make()
                self.bodies[path] = time.monotonic(), body
            return body

    def html(self) -> bytes:
        """The page as it is served."""
        with self.news:
            live = {"after": self.count, "pictures": self.shows_pictures}
            content = self.record.content(live)
        return make_page(self.title, content).encode()

    def jpeg(self) -> bytes:
        """The newest picture as a file."""
        buffer = BytesIO()
        Image.fromarray(np.asarray(self.picture)).save(buffer, "jpeg", quality=90)
        return buffer.getvalue()

    def wait(self, known: int) -> tuple[list[str], int, bool]:
        """Wait until there are more events than are `known`, or the page has ended; returns the
        further events, the number of all, and whether it has ended.
        """
        with self.news:
            self.news.wait_for(lambda: self.count > known or self.ended)
            new = self.count - known            # below 0: of a page before a restart
            events = list(self.events)[-new:] if new > 0 else []
            return events, self.count, self.ended


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
    request_queue_size = 1000                       # viewers that come at once

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
        name, _, query = self.path.partition("?")
        if not self.is_own():
            self.send_error(403)
        elif name == "/":
            self.answer("text/html; charset=utf-8", page.body(name, page.html, 1.0))
        elif name == "/events":
            self.send_events(page, query)
        elif name == "/frame.jpg" and page.picture is not None:
            self.answer("image/jpeg", page.body(name, page.jpeg, 0.1))
        else:
            self.send_error(404)

    def is_own(self) -> bool:
        """Whether a request is for this machine, and from nowhere else than its own page."""
        host = self.headers.get("Host", "")
        if host.partition(":")[0] not in (HOST, "localhost"):
            return False
        page = f"http://{host}"
        site = self.headers.get("Sec-Fetch-Site", "none")
        origin = self.headers.get("Origin", page)
        referer = self.headers.get("Referer", page + "/")
        return (site in ("none", "same-origin") and origin == page
                and referer.startswith(page + "/"))

    def answer(self, kind: str, body: bytes = b"") -> None:
        """Send the head, and the body; without one, what follows is a stream."""
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        if body:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_events(self, page: Page, query: str) -> None:
        """Send the events after number N, of the query after=N, until the page ends."""
        asked = re.fullmatch(r"after=([0-9]{1,15})", query)
        known = int(asked[1]) if asked else 0
        self.answer("text/event-stream")
        ended = False
        while not ended:
            events, known, ended = page.wait(known)
            # retry [ms]: a browser without a connection asks again
            text = "".join(f"retry: 500\nevent: row\ndata: {event}\n\n" for event in events)
            if ended:
                text += "event: end\ndata: {}\n\n"
            self.wfile.write(text.encode())
            time.sleep(PAUSE)
