"""Pictures that come from elsewhere (not in the paper): live ones as they happen, recordings through pipe or network.

    for picture in Camera("rtsp://10.0.0.7/door"): ...     uint8 [H, W, 3], at most `fps` a second, for ever

A thread reads them, so that whoever waits for them can leave at any time. Live, at most QUEUE pictures wait: when
another one comes, the oldest is dropped, so what is shown is never much older than the moment, however slow the
narrator is. Where no pictures come there are none: no black ones, and none twice. The source is opened again, for ever
or `retries` times. Of a recording nothing is dropped.
"""
from __future__ import annotations

import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import partial
from itertools import chain, islice
from math import inf
from threading import Condition, Event, Thread
from typing import Any

import av
import numpy as np
from av.video.reformatter import VideoReformatter
from torch import Tensor
from tqdm import tqdm

from streams.sources import address, is_pipe_or_url, is_live, without_secrets_numbered
from streams.together import DirectPasses
from support.common.addresses import without_secrets
from support.common.errors import BadData
from support.files.video import READABLE, Video, open_container, to_rgb, video_stream

QUEUE = 4                               # pictures that wait for a slow narrator
PATIENCE = 10.0                         # seconds without data, or without a picture, after which a source is lost
STEADY = 60.0                           # seconds of pictures after which a source counts as well again
OUTAGE = 10.0                           # seconds without pictures after which the view is no longer the same
REPEAT = 30.0                           # seconds within which a sentence that comes again is a repeat
STILL = 60.0                            # seconds without a change in the picture after which that is said
NEVER = (av.error.ProtocolNotFoundError, av.error.DemuxerNotFoundError, av.error.OptionNotFoundError,
         av.error.HTTPUnauthorizedError, av.error.HTTPForbiddenError)      # errors that do not go by themselves


class ThreadedSource:
    """Pictures that a thread of its own reads.

    source, fps, largest    see sources.py; as in Video
    options                 of FFmpeg, beside ours
    wait                    how to wait for the next picture (together.py: SharedPasses.wait, so that others go on meanwhile)
    """
    frames = size = None                                       # as in Video; not known before

    def __init__(self, source: str, fps: float = 2.0, largest: int | None = None,
                 options: dict[str, str] | None = None, wait: Callable = DirectPasses().wait):
        self.source, self.name, self.fps, self.largest = source, without_secrets(source), float(fps), largest
        self.options, self.wait = options or {}, wait
        self.items, self.changed, self.closed = deque(), Condition(), Event()
        self.thread = Thread(target=self._run, daemon=True)

    def __iter__(self) -> Iterator[np.ndarray]:
        self.thread.start()
        try:
            while (item := self.wait(self._next)) is not StopIteration:
                if isinstance(item, Exception):
                    raise item
                yield self.taken(item)
        finally:
            self.close()

    def close(self) -> None:
        """Stop the thread; one that waits for data cannot be stopped, and is left."""
        self.closed.set()
        with self.changed:
            self.changed.notify_all()
        if self.thread.is_alive():
            self.thread.join(0.5)

    def taken(self, item) -> np.ndarray:
        """An item that the thread has put has become the present picture."""
        return item

    def _next(self, seconds: float) -> Any:
        """The next item, or None if there is none within so many seconds."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.items, seconds):
                return None
            self.changed.notify_all()
            return self.items.popleft()

    def _put(self, item) -> None:
        with self.changed:
            self.items.append(item)
            self.changed.notify_all()

    def _run(self) -> None:
        end = StopIteration
        try:
            self._read()
        except Exception as error:                             # of any kind: it is not lost, but handed on
            end = error
        self._put(end)


class Recording(ThreadedSource):
    """A recording through a pipe or the network: as a Video that is read once, and waits until it is wanted."""
    video: OpenedVideo | None = None

    def _read(self) -> None:
        file, form, options = address(self.source, False, self.options)
        self.video = OpenedVideo(file, self.name, self.fps, self.largest, options)
        with self.video.container:
            for picture in self.video:
                with self.changed:
                    self.changed.wait_for(lambda: len(self.items) < QUEUE or self.closed.is_set())
                if self.closed.is_set():
                    return
                self._put(picture)

    def report(self) -> None:
        if self.video is not None:
            self.video.report()


class OpenedVideo(Video):
    """A Video that is opened only once."""

    def __init__(self, file: str, name: str, fps: float, largest: int | None, options: dict[str, str]):
        patience = None if file.startswith("pipe:") else (PATIENCE, PATIENCE)
        self.container, self.pictures = open_container(file, name, options=options, timeout=patience), None
        self.stream = video_stream(self.container, name, "AUTO")
        super().__init__(name, fps, largest)

    @contextmanager
    def _open(self) -> Iterator[tuple]:
        yield self.container, self.stream

    def _decode(self, container, stream) -> Iterator[av.VideoFrame]:
        """The first picture, at which the size was seen, comes once more."""
        if self.pictures is None:
            self.pictures = super()._decode(container, stream)
            first = list(islice(self.pictures, 1))
            self.pictures = chain(first, self.pictures)
            yield from first
        else:
            yield from self.pictures


class Camera(ThreadedSource):
    """The newest pictures of a live source.

    retries     openings in a row without a picture, after the first one, until it is given up; None: never
    time, wall  of the present picture: seconds from the first one to this one's end, and the time of day (ISO 8601)
    gap         seconds between it and the one before
    picture     it, uint8 [H, W, 3]; a picture that has not changed is the same array
    reported    the last sentence that was no repeat, and its end (s)

    A change of state is one line on stderr. Raises BadData when it is given up.
    """

    def __init__(self, *source, retries: int | None = None, **how):
        super().__init__(*source, **how)
        self.retries, self.reformatter = retries, VideoReformatter()
        self.decoded = self.dropped = self.count = self.reconnects = 0
        self.time, self.gap, self.due = 0.0, 0.0, -inf
        self.first = self.arrived = self.down = None
        self.wall, self.picture, self.lost = "", None, False
        self.seen, self.since, self.said = None, 0.0, False    # the last picture, how long it has stayed, is that said
        self.reported, self.latencies = ("", -inf), deque(maxlen=10_000)

    def taken(self, item) -> np.ndarray:
        arrived, wall, picture = item
        self.first = arrived if self.first is None else self.first
        self.gap = 0.0 if self.arrived is None else arrived - self.arrived
        self.time, self.arrived, self.picture = round(arrived - self.first + 1 / self.fps, 3), arrived, picture
        self.wall = datetime.fromtimestamp(wall, timezone.utc).isoformat(timespec="milliseconds")
        self.size, self.count = picture.shape[:2], self.count + 1
        return picture

    def restart_after_outage(self, frames: Iterable[Tensor], restart: Callable[[], None]) -> Iterator[Tensor]:
        """The frames of these pictures; restart() is called before the first one after an outage."""
        for x in frames:
            if self.gap > OUTAGE:
                restart()
            yield x

    def with_time_of_day(self, row: dict) -> dict:
        """The row of a sentence about the present picture (subtitles.py) with the time of day, and marked if it is the
        last one that was reported once more. Its latency is counted."""
        self.latencies.append(time.monotonic() - self.arrived)
        text, end = self.reported
        if row["text"] == text and row["end"] - end <= REPEAT:
            return row | {"wall": self.wall, "repeat": True}
        self.reported = row["text"], row["end"]
        return row | {"wall": self.wall}

    def report(self) -> None:
        """Print in one line on stderr what came and how late the sentences were (of the last 10,000)."""
        late = "no sentences"
        if self.latencies:
            late = "sentences {:.2f} s (p50), {:.2f} s (p95) late".format(*np.percentile(self.latencies, (50, 95)))
        self.say(f"{self.decoded} pictures decoded, {self.count} taken, {self.dropped} dropped; "
                 f"{self.reconnects} reconnects; {late}")

    def say(self, what: str) -> None:
        tqdm.write(f"{self.name}: {what}", file=sys.stderr)

    # ------------------------------------------------------------------ in the thread

    def _read(self) -> None:
        failures = 0
        while not self.closed.is_set():
            began, before, reason = time.monotonic(), self.decoded, "it ended"
            try:
                self._watch()
            except (av.FFmpegError, BadData, IndexError) as error:         # IndexError: of PyAV, as in video.py
                reason = error.strerror if isinstance(error, av.FFmpegError) else str(error)
                if isinstance(error, av.error.ExitError):
                    reason = f"nothing came for {PATIENCE:g} s"
                if isinstance(error, NEVER) and not self.decoded:
                    raise BadData(f"{self.name}: cannot be opened ({reason}); check the address") from error
            if self.closed.is_set() or self.source == "-" and self.decoded:                # a pipe has only one end
                return
            failures = 1 if self.decoded > before else failures + 1
            if self.source == "-" or self.retries is not None and failures > self.retries:
                raise BadData(f"{self.name}: no pictures at attempt {failures} ({reason}); check the source")
            if not self.lost and (self.decoded or self.retries is None):
                self.say(f"no pictures ({reason}); trying again")
                self.lost = True
            now = time.monotonic()
            if self.down is None or now - began > STEADY:
                self.down = now
            self.closed.wait(min(30, max(1, (now - self.down) / 4)) * random.uniform(0.8, 1.2))

    def _watch(self) -> None:
        """Open the source, and take its pictures until it ends or fails."""
        file, form, options = address(self.source, True, self.options)
        patience = None if self.source == "-" else (PATIENCE, PATIENCE)
        with av.open(file, format=form, options=options, timeout=patience, **READABLE) as container:
            stream = video_stream(container, "it", "SLICE")                # threads for frames would hold some back
            alive, before = time.monotonic(), self.decoded
            for packet in container.demux():
                if self.closed.is_set():
                    return
                if packet.stream is stream:
                    for frame in readable(packet):
                        if self.decoded == before:
                            self._found()
                        self._arrive(frame)
                        alive = time.monotonic()
                if time.monotonic() - alive > PATIENCE:
                    raise BadData(f"nothing that can be decoded for {PATIENCE:g} s")

    def _found(self) -> None:
        """There is the first picture after an opening."""
        self.reconnects += self.decoded > 0
        if self.lost:
            self.say("pictures come" + (" again" if self.decoded else ""))
        self.lost = False

    def _arrive(self, frame: av.VideoFrame) -> None:
        """A picture is there; if it is its turn, it is put among those that wait."""
        now = time.monotonic()
        self.decoded += 1
        if now < self.due - 0.25 / self.fps:                   # a quarter early is well: arrivals are not regular
            return
        self.due = (self.due if now < self.due + 1 / self.fps else now) + 1 / self.fps
        scale = min(1, (self.largest or inf) / max(frame.width, frame.height))
        size = (max(1, round(side * scale)) for side in (frame.width, frame.height))
        picture = self._compare(to_rgb(frame, self.reformatter, *size), now)
        with self.changed:
            if len(self.items) == QUEUE:
                self.items.popleft()
                self.dropped += 1
        self._put((now, time.time(), picture))

    def _compare(self, picture: np.ndarray, now: float) -> np.ndarray:
        """The picture, or the one before if they are equal; one that stays for long is said once."""
        if self.seen is None or not np.array_equal(self.seen, picture):
            self.seen, self.since, self.said = picture, now, False
        elif now - self.since > STILL and not self.said:
            self.say(f"the picture has not changed for {STILL:g} s")
            self.said = True
        return self.seen


def paced(items: Iterable, rate: float, wait: Callable) -> Iterator:
    """The items of a recording, `rate` a second from now on; those that are late come at once. wait: as of ThreadedSource."""
    began = time.monotonic()
    for number, item in enumerate(items):
        wait(partial(reach, began + number / rate))
        yield item


def reach(moment: float, seconds: float) -> bool | None:
    """True when the moment (of time.monotonic) has come; None if it does not come within so many seconds."""
    left = moment - time.monotonic()
    if left > 0:
        time.sleep(min(left, seconds))
    return True if left <= seconds else None


def readable(packet) -> list[av.VideoFrame]:
    """The pictures of a packet that are whole."""
    try:
        return [frame for frame in packet.decode() if not frame.is_corrupt]
    except av.FFmpegError:
        return []


def open_pictures(source: str, fps: float, largest: int | None, args, wait: Callable) -> Video | ThreadedSource:
    """The pictures of an input of the command line; args: its options (commands/stream.py: input_options)."""
    options = dict(args.source_option)
    if is_live(source, args.live):
        video = Camera(source, fps, largest, options=options, wait=wait, retries=args.retries)
    elif is_pipe_or_url(source):
        video = Recording(source, fps, largest, options, wait)
    else:
        return Video(source, fps, largest)
    video.name = without_secrets_numbered(source, args.input)
    return video
