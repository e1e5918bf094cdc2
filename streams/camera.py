"""Pictures from cameras, pipes and the network (not in the paper): live pictures as they come, and
recordings.

    for picture in Camera("rtsp://10.0.0.7/door"): ...     uint8 [H, W, 3], at most `fps` a second

A thread reads the pictures, so that Ctrl-C works while no picture comes. Of a live source, at most
QUEUE pictures wait: when another one comes, the oldest is dropped. So the narrator never sees a
picture that is much older than the moment, however slow it is. While no pictures come there are
none: no black ones, and none twice. The source is opened again, for ever or `retries` times. Of a
recording nothing is dropped.
"""
from __future__ import annotations

import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
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
from support.common.errors import BadData
from support.common.text import without_secrets
from support.files.video import READABLE, Video, open_container, to_rgb, video_stream

QUEUE = 4                               # pictures that wait for a slow narrator
PATIENCE = 10.0                         # seconds without data, or a picture, until a source is lost
STEADY = 60.0                           # seconds of pictures after which a source is well again
OUTAGE = 10.0                           # seconds without pictures after which the view has changed
REPEAT = 30.0                           # seconds within which the same sentence is a repeat
STILL = 60.0                            # seconds after which an unchanged picture is reported
EARLY = 0.25                            # of 1 / fps: a picture may come so early, as clocks jitter
LATENCIES = 10_000                      # sentences whose latency is kept
# errors that do not pass by themselves
NEVER = (av.error.ProtocolNotFoundError, av.error.DemuxerNotFoundError,
         av.error.OptionNotFoundError, av.error.HTTPUnauthorizedError,
         av.error.HTTPForbiddenError)


class ThreadedSource:
    """Pictures that a thread of its own reads.

    source, fps, largest    see sources.py; as in Video
    options                 of FFmpeg, beside ours
    """
    frames = None                                   # as in Video; not known before
    size = None

    def __init__(self, source: str, fps: float = 2.0, largest: int | None = None,
                 options: dict[str, str] | None = None):
        self.source = source
        self.name = without_secrets(source)
        self.fps = float(fps)
        self.largest = largest
        self.options = options or {}
        self.items = deque()                        # that the thread has put, and nobody has taken
        self.changed = Condition()                  # of `items` and `closed`
        self.closed = Event()
        self.thread = Thread(target=self._run, daemon=True)

    def __iter__(self) -> Iterator[np.ndarray]:
        self.thread.start()
        try:
            while True:
                item = None
                while item is None:
                    item = self._next(0.1)
                if item is StopIteration:
                    return
                if isinstance(item, Exception):
                    raise item
                yield self.taken(item)
        finally:
            self.close()

    def close(self) -> None:
        """Stop the thread. A thread that waits for data cannot be stopped, and is left."""
        self.closed.set()
        with self.changed:
            self.changed.notify_all()
        if self.thread.is_alive():
            self.thread.join(0.5)

    def taken(self, item) -> np.ndarray:
        """Make an item of the thread the present picture; returns the picture."""
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
        """The thread: puts pictures, and at last StopIteration or an error."""
        try:
            self._read()
            end = StopIteration
        except Exception as error:                  # of any kind: `__iter__` raises it
            end = error
        self._put(end)


class Recording(ThreadedSource):
    """A recording through a pipe or the network: as a Video, but it is read only once.

    At most QUEUE pictures are read ahead.
    """
    video: OpenedVideo | None = None

    def _read(self) -> None:
        file, _, options = address(self.source, False, self.options)
        self.video = OpenedVideo(file, self.name, self.fps, self.largest, options)
        with self.video.container:
            for picture in self.video:
                with self.changed:
                    self.changed.wait_for(
                        lambda: len(self.items) < QUEUE or self.closed.is_set())
                if self.closed.is_set():
                    return
                self._put(picture)
        # A damaged file is narrated as far as it goes. Here it may be the connection that has ended.
        if self.video.broke_off and self.source != "-":
            raise BadData(f"{self.name}: broke off before its end; with --state, the same command goes "
                          f"on when the connection is there again")

    def report(self) -> None:
        if self.video is not None:
            self.video.report()


class OpenedVideo(Video):
    """A Video that is opened only once."""

    def __init__(self, file: str, name: str, fps: float, largest: int | None,
                 options: dict[str, str]):
        timeout = None if file.startswith("pipe:") else (PATIENCE, PATIENCE)
        self.container = open_container(file, name, options=options, timeout=timeout)
        self.stream = video_stream(self.container, name, "AUTO")
        self.pictures = None                        # not decoded yet
        super().__init__(name, fps, largest)

    @contextmanager
    def _open(self) -> Iterator[tuple]:
        yield self.container, self.stream

    def _decode(self, container, stream) -> Iterator[av.VideoFrame]:
        """The pictures. Video.__init__ takes the first one to see its size; it comes once more."""
        if self.pictures is None:
            self.pictures = super()._decode(container, stream)
            first = list(islice(self.pictures, 1))
            self.pictures = chain(first, self.pictures)
            yield from first
        else:
            yield from self.pictures


class Camera(ThreadedSource):
    """The newest pictures of a live source.

    retries     how often in a row it is opened again without a picture, until it is given up;
                None: for ever
    picture     the present picture, uint8 [H, W, 3]; an unchanged picture is the same array
    arrived     when it came (time.monotonic)
    wall        the time of day when it came (ISO 8601)
    time        seconds from the first picture to the end of this one
    gap         seconds between the picture before and this one
    reported    the last sentence that was no repeat, and its end (s)

    A change of state is one line on stderr. Raises BadData when it is given up.
    """

    def __init__(self, *source, retries: int | None = None, **options):
        super().__init__(*source, **options)
        self.retries = retries
        self.reformatter = VideoReformatter()
        # of the present picture
        self.picture = None
        self.arrived = None
        self.first = None                           # when the first picture came
        self.wall = ""
        self.time = 0.0
        self.gap = 0.0
        # counts for the report
        self.decoded = 0
        self.count = 0                              # taken
        self.dropped = 0
        self.reconnects = 0
        self.latencies = deque(maxlen=LATENCIES)    # seconds
        self.reported = ("", -inf)
        # of the thread
        self.due = -inf                             # when the next picture is wanted
        self.down = None                            # when the attempts to open it again began
        self.lost = False                           # an outage has been reported, and lasts
        self.newest = None                          # the last picture
        self.newest_since = 0.0                     # since when it has not changed
        self.still_reported = False

    def taken(self, item) -> np.ndarray:
        arrived, wall, picture = item
        if self.first is None:
            self.first = arrived
        if self.arrived is not None:
            self.gap = arrived - self.arrived
        self.arrived = arrived
        self.picture = picture
        self.time = round(arrived - self.first + 1 / self.fps, 3)
        time_of_day = datetime.fromtimestamp(wall, timezone.utc)
        self.wall = time_of_day.isoformat(timespec="milliseconds")
        self.size = picture.shape[:2]
        self.count += 1
        return picture

    def restart_after_outage(self, frames: Iterable[Tensor],
                             restart: Callable[[], None]) -> Iterator[Tensor]:
        """The frames of these pictures; calls restart() before the first one after an outage: more
        than OUTAGE seconds, or three pictures where these are rare."""
        for x in frames:
            if self.gap > max(OUTAGE, 3 / self.fps):
                restart()
            yield x

    def with_time_of_day(self, row: dict) -> dict:
        """The row of a sentence about the present picture (subtitles.py) with the time of day.

        It is marked as a repeat if it has been reported within REPEAT seconds. Its latency is kept.
        """
        self.latencies.append(time.monotonic() - self.arrived)
        text, end = self.reported
        if row["text"] == text and row["end"] - end <= REPEAT:
            return row | {"wall": self.wall, "repeat": True}
        self.reported = (row["text"], row["end"])
        return row | {"wall": self.wall}

    def report(self) -> None:
        """Print in one line on stderr what came, and how late the last LATENCIES sentences were."""
        late = "no sentences"
        if self.latencies:
            median, slow = np.percentile(self.latencies, (50, 95))
            late = f"sentences {median:.2f} s (p50), {slow:.2f} s (p95) late"
        self.say(f"{self.decoded} pictures decoded, {self.count} taken, {self.dropped} dropped; "
                 f"{self.reconnects} reconnects; {late}")

    def say(self, text: str) -> None:
        tqdm.write(f"{self.name}: {text}", file=sys.stderr)

    # ------------------------------------------------------------------ in the thread

    def _read(self) -> None:
        """Open the source again and again, with growing pauses."""
        failures = 0                                # in a row
        while not self.closed.is_set():
            opened = time.monotonic()
            decoded_before = self.decoded
            reason = "it ended"
            try:
                self._watch()
            except (av.FFmpegError, BadData, IndexError) as error:      # IndexError: as in video.py
                reason = reason_of(error)
                if isinstance(error, NEVER) and not self.decoded:
                    raise BadData(f"{self.name}: cannot be opened ({reason}); "
                                  f"check the address") from error
            if self.closed.is_set():
                return
            if self.source == "-" and self.decoded:             # a pipe that has ended stays so
                return
            if self.decoded > decoded_before:
                failures = 1
            else:
                failures += 1
            if self.source == "-" or self.retries is not None and failures > self.retries:
                raise BadData(f"{self.name}: no pictures at attempt {failures} ({reason}); "
                              f"check the source")
            if not self.lost and (self.decoded or self.retries is None):
                self.say(f"no pictures ({reason}); trying again")
                self.lost = True

            # a quarter of the outage so far, 1 to 30 s, and up to a fifth more or less, at random:
            # so cameras do not keep step
            now = time.monotonic()
            if self.down is None or now - opened > STEADY:
                self.down = now
            pause = min(30, max(1, (now - self.down) / 4))
            self.closed.wait(pause * random.uniform(0.8, 1.2))

    def _watch(self) -> None:
        """Open the source, and take its pictures until it ends or fails."""
        file, form, options = address(self.source, True, self.options)
        timeout = None if self.source == "-" else (PATIENCE, PATIENCE)
        with av.open(file, format=form, options=options, timeout=timeout, **READABLE) as container:
            # one thread for each slice: with one for each frame, decoding holds some back
            stream = video_stream(container, "it", "SLICE")
            newest_at = time.monotonic()
            decoded_before = self.decoded
            for packet in container.demux():
                if self.closed.is_set():
                    return
                if packet.stream is stream:
                    for frame in readable(packet):
                        if self.decoded == decoded_before:
                            self._connected()
                        self._arrive(frame)
                        newest_at = time.monotonic()
                if time.monotonic() - newest_at > PATIENCE:
                    raise BadData(f"nothing that can be decoded for {PATIENCE:g} s")

    def _connected(self) -> None:
        """Count and report the first picture after an opening."""
        if self.decoded > 0:
            self.reconnects += 1
        if self.lost:
            self.say("pictures come again" if self.decoded else "pictures come")
        self.lost = False

    def _arrive(self, frame: av.VideoFrame) -> None:
        """Put a decoded picture into the queue, if it is its turn."""
        now = time.monotonic()
        self.decoded += 1
        period = 1 / self.fps
        if now < self.due - EARLY / self.fps:
            return
        if now >= self.due + period:                # the first picture, or a very late one
            self.due = now
        self.due += period                          # of the next one
        scale = min(1, (self.largest or inf) / max(frame.width, frame.height))
        width = max(1, round(frame.width * scale))
        height = max(1, round(frame.height * scale))
        picture = to_rgb(frame, self.reformatter, width, height)
        picture = self._compare(picture, now)
        with self.changed:
            if len(self.items) == QUEUE:
                self.items.popleft()
                self.dropped += 1
        self._put((now, time.time(), picture))

    def _compare(self, picture: np.ndarray, now: float) -> np.ndarray:
        """The picture, or the one before if they are equal. A picture that stays is reported."""
        if self.newest is None or not np.array_equal(self.newest, picture):
            self.newest = picture
            self.newest_since = now
            self.still_reported = False
        elif now - self.newest_since > STILL and not self.still_reported:
            self.say(f"the picture has not changed for {STILL:g} s")
            self.still_reported = True
        return self.newest


def reason_of(error: Exception) -> str:
    """Why a source has no pictures, for a message."""
    if isinstance(error, av.error.ExitError):
        return f"nothing came for {PATIENCE:g} s"
    if isinstance(error, av.FFmpegError):
        return error.strerror
    return str(error)


def paced(items: Iterable, rate: float) -> Iterator:
    """The items of a recording, `rate` a second from now on; late items come at once."""
    began = time.monotonic()
    for number, item in enumerate(items):
        time.sleep(max(0, began + number / rate - time.monotonic()))
        yield item


def readable(packet) -> list[av.VideoFrame]:
    """The undamaged pictures of a packet."""
    try:
        return [frame for frame in packet.decode() if not frame.is_corrupt]
    except av.FFmpegError:
        return []


def open_pictures(source: str, fps: float, largest: int | None, args) -> Video | ThreadedSource:
    """The pictures of an input of the command line.

    args: its options (commands/stream.py: input_options).
    """
    options = dict(args.source_option)
    if is_live(source, args.live):
        video = Camera(source, fps, largest, options=options, retries=args.retries)
    elif is_pipe_or_url(source):
        video = Recording(source, fps, largest, options)
    else:
        return Video(source, fps, largest)
    video.name = without_secrets_numbered(source, args.input)
    return video
