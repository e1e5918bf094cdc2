"""Pictures as they come, from cameras, pipes and the network (not in the paper).

    for picture in Camera("rtsp://10.0.0.7/door"): ...     uint8 [H, W, 3], at most `fps` a second

    camera camera:1 /dev/video0                     a camera of this machine
    rtsp://... rtmp://... udp://... tcp://...       live, like every address but http
    lavfi:testsrc=rate=25,realtime                  live: FFmpeg's test pictures
    http://... https://... -                        live with --live; - is standard input. Else a
                                                    recording (support/files/video.py)

The newest pictures count: at most QUEUE of them wait for a slow narrator, and when another one
comes, the oldest is dropped. A decoder that is slower than its stream goes on at a key frame. What
comes before its time, as the segments of a playlist do, is given at the pace of the stream's clock.
While no pictures come there are none: no black ones, and none twice.
"""
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from math import inf
from queue import Empty, Queue
from threading import Event, Thread

import av
import numpy as np
from av.video.reformatter import VideoReformatter

from support.common.errors import BadData
from support.common.progress import say_when
from support.common.text import without_secrets
from support.files.video import PATIENCE, to_rgb, upright_size, video_stream

QUEUE = 4                               # pictures that wait for the narrator
LONGEST_PAUSE = 30                      # seconds between two attempts to open it again
OUTAGE = 10.0                           # seconds without pictures after which the view has changed
EARLY = 0.25                            # of 1 / fps: a picture may come so early, as clocks jitter
# Seconds without a packet until a source is given up: PATIENCE (support/files/video.py); then this,
# where not even two pictures have come. And seconds without a picture that can be decoded
LONG_PATIENCE = 120.0
LATE = 1.5                              # seconds behind the stream: then pictures are left out
CATCH_UP = 0.5                          # seconds in which all packets that lie ready are read
LONGEST_STEP = 10.0                     # seconds between packets: else it is another clock

# FFmpeg's format for cameras, and its name of the one with a number, by operating system
CAMERAS = {
    "linux": ("v4l2", "/dev/video{}"),
    "darwin": ("avfoundation", "{}"),
    "win32": ("dshow", "video={}"),
}
# Options of FFmpeg: do not hold pictures back, nor leave 20 of them out to measure their rate
LIVE_OPTIONS = {
    "fflags": "discardcorrupt",
    "flags": "low_delay",
    "analyzeduration": "1000000",
    "probesize": "1000000",
    "fpsprobesize": "0",
    "max_ts_probe": "0",                            # six pictures, which may take minutes
}
UDP = {"overrun_nonfatal": "1", "fifo_size": "50000"}
# Further ones, for a format or a protocol
OPTIONS = {
    "rtsp": {"rtsp_transport": "tcp", "max_delay": "500000"},
    "udp": UDP,
    "rtp": UDP,                                     # carried by it
    "avfoundation": {"framerate": "30"},
    "http": {"reconnect": "1"},
}


# ---------------------------------------------------------------------- options

def address(source: str, given: dict[str, str]) -> tuple[str, str | None, dict[str, str]]:
    """What FFmpeg opens for a live source: file, format, options.

    The format is None where FFmpeg finds it in the file. Options that are `given` replace ours.
    """
    file = source
    form = None
    if source.startswith("camera"):
        form, name = CAMERAS[sys.platform]
        file = name.format(source.partition(":")[2] or "0")
    elif source.startswith("/dev/video"):
        form = "v4l2"
    elif source.startswith("lavfi:"):
        file = source.removeprefix("lavfi:")
        form = "lavfi"
    elif source == "-":
        file = "pipe:0"

    protocol = form or source.partition(":")[0].lower().removesuffix("s")       # rtsps, https
    return file, form, LIVE_OPTIONS | OPTIONS.get(protocol, {}) | given


def source_option(text: str) -> tuple[str, str]:
    """An argparse type: NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        # the message must not repeat the text, which may hold a password
        raise ArgumentTypeError("must be NAME=VALUE, such as rtsp_transport=udp")
    return name, value


def paced(items: Iterable, rate: float) -> Iterator:
    """The items of a recording, `rate` a second from now on; late items come at once."""
    began = time.monotonic()
    for number, item in enumerate(items):
        time.sleep(max(0, began + number / rate - time.monotonic()))
        yield item


# ---------------------------------------------------------------------- cameras

def uptime() -> float:
    """Seconds since some moment. They go on while the machine sleeps, and what a camera shows may
    then have changed: on Linux and macOS, time.monotonic stands still meanwhile.
    """
    if not hasattr(time, "clock_gettime"):          # Windows
        return time.monotonic()
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Camera:
    """The newest pictures of a live source. A thread reads them, and opens the source again.

    source      see above
    fps         pictures to give per second, at most
    largest     scale pictures down so that no side is longer (pixels); None: keep their size
    options     of FFmpeg, beside ours
    retries     how often in a row it is opened again without a picture; None: for ever

    arrived     when the present picture came (uptime)
    first       when the first one came
    gap         seconds between the picture before and this one; inf: there was none
    begin       the time from which on pictures have come without an outage: more than OUTAGE
                seconds without one, or three pictures where these are rare
    late        the most seconds from the arrival of a picture to its sentence
    behind      the most seconds from a picture's time by the stream's clock to its arrival

    A change of state is one line on stderr. Raises BadData if the source is not there at the start,
    or is given up.
    """
    frames = None                                   # as in Video; not known before

    def __init__(self, source: str, fps: float = 2.0, largest: int | None = None,
                 options: dict[str, str] | None = None, retries: int | None = None):
        self.source = source
        self.retries = inf if retries is None else retries
        self.period = 1 / fps
        self.largest = largest
        self.address = address(source, options or {})
        self.name = without_secrets(self.address[0])        # camera is /dev/video0
        self.waiting = Queue(QUEUE)                 # (arrived, picture), an error, or None
        self.closed = Event()
        self.thread = Thread(target=self._run, daemon=True)

        self.arrived = -inf
        self.first: float | None = None
        self.gap = inf
        self.begin = 0.0
        self.late = 0.0
        self.behind = 0.0
        # counts for the report
        self.decoded = 0
        self.taken = 0
        self.dropped = 0
        self.reconnects = 0
        # of the thread
        self.may_end = source == "-"                # a pipe that has ended stays so
        self.due = -inf                             # when the next picture is wanted
        self.newest_at = 0.0                        # when the newest came, or it was opened

    def __iter__(self) -> Iterator[np.ndarray]:
        self.thread.start()
        try:
            for arrived, picture in iter(self._next, None):
                if self.first is None:
                    self.first = arrived
                self.gap = arrived - self.arrived
                self.arrived = arrived
                if self.after_outage:
                    self.begin = round(arrived - self.first, 3)
                self.taken += 1
                yield picture
        finally:
            self.close()

    def _next(self) -> tuple[float, np.ndarray] | None:
        """The next of those that wait. Until the first picture, what happens is told."""
        while True:
            try:
                item = self.waiting.get(timeout=PATIENCE)
            except Empty:
                if self.taken == 0:
                    self.say("no picture yet")
                continue
            if isinstance(item, Exception):
                raise item
            return item

    def close(self) -> None:
        """Stop the thread. A thread that waits for data cannot be stopped, and is left."""
        self.closed.set()
        if self.thread.is_alive():
            self.thread.join(0.5)

    @property
    def after_outage(self) -> bool:
        """Whether the present picture is the first after an outage, or of all."""
        return self.gap > max(OUTAGE, 3 * self.period)

    @property
    def time(self) -> float:
        """Seconds from the first picture to the end of the present one."""
        return round(self.arrived - self.first + self.period, 3)

    @property
    def wall(self) -> float:
        """The time of day when the present picture came (time.time)."""
        return time.time() - uptime() + self.arrived

    def with_time_of_day(self, row: dict) -> dict:
        """The row of a sentence about the present picture (subtitles.py) with the time of day.

        It does not reach back over an outage.
        """
        self.late = max(self.late, uptime() - self.arrived)
        time_of_day = datetime.fromtimestamp(self.wall, timezone.utc)
        return row | {
            "start": max(row["start"], self.begin),
            "wall": time_of_day.isoformat(timespec="milliseconds"),
        }

    def report(self) -> None:
        """Print in one line on stderr what came, and how late the sentences were."""
        late = self.late + self.behind
        self.say(f"{self.decoded} pictures decoded, {self.taken} taken, {self.dropped} dropped; "
                 f"{self.reconnects} reconnects; sentences at most {late:.2f} s late")

    def say(self, text: str) -> None:
        say_when(f"{self.name}: {text}")

    # ------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        """Put pictures with their times, and at last None or an error."""
        end = None
        try:
            for item in self._pictures():
                self._put(item)
        except Exception as error:                  # of any kind: `__iter__` raises it
            end = error
        self._put(end)

    def _put(self, item) -> None:
        if self.waiting.full():
            try:
                self.waiting.get_nowait()
                self.dropped += 1
            except Empty:                           # it has just been taken
                pass
        self.waiting.put(item)

    def _pictures(self) -> Iterator[tuple[float, np.ndarray]]:
        """(arrived, picture). The source is opened again and again, with growing pauses."""
        patience = PATIENCE
        failures = 0                                # in a row
        while True:
            reason = "it ended"
            is_silent = False
            try:
                for arrived, picture in self._watch(patience):
                    if failures > 0 and self.decoded > 0:
                        self.reconnects += 1
                        self.say("pictures come again")
                    failures = 0
                    self.decoded += 1
                    if picture is not None:
                        yield arrived, picture
            except av.FFmpegError as error:
                reason = error.strerror
                is_silent = isinstance(error, av.error.ExitError)
                # where an rtsp server has not even answered, FFmpeg calls the data invalid
                if is_silent or time.monotonic() - self.newest_at > patience:
                    reason = f"nothing came for {patience:g} s"
            except (BadData, IndexError) as error:  # IndexError: as in video.py
                reason = str(error)
            if self.closed.is_set() or self.may_end and self.decoded:
                return
            failures += 1
            is_snapshot = self.decoded < 2
            may_be_rare = is_silent and patience < LONG_PATIENCE
            if failures > self.retries or is_snapshot and not may_be_rare:
                raise BadData(f"{self.name}: no pictures at attempt {failures} ({reason}); "
                              f"check the source")
            if is_snapshot:
                patience = LONG_PATIENCE
            if failures == 1:
                self.say(f"no pictures ({reason}); trying again")
            self.closed.wait(min(LONGEST_PAUSE, 2 ** (failures - 1)))

    def _watch(self, patience: float) -> Iterator[tuple[float, np.ndarray | None]]:
        """Open the source, and give all that can be decoded until it ends or fails: (arrived,
        picture), or (arrived, None) of one that is not wanted.
        """
        file, form, options = self.address
        # whoever writes into a pipe may rest
        timeout = None if self.source == "-" else (patience, patience)
        reformatter = VideoReformatter()
        self.newest_at = time.monotonic()
        with av.open(file, format=form, options=options, timeout=timeout,
                     metadata_errors="replace") as container:
            if self.source.lower().startswith("http") and container.duration:
                self.may_end = True                 # a film, or a playlist with its last line
                raise BadData("it states its end; without --live all of it is narrated")
            # one thread for each slice: with one for each frame, decoding holds some back
            stream = video_stream(container, "it", "SLICE")
            for packet, turn in self._in_turn(container, stream):
                for frame in undamaged(packet):
                    self.newest_at = time.monotonic()
                    picture = None
                    if self._is_due(turn):
                        size = upright_size(frame, stream, self.largest)
                        picture = to_rgb(frame, reformatter, size)
                    yield turn, picture

    def _in_turn(self, container, stream) -> Iterator[tuple[av.Packet, float]]:
        """(packet, when it is its turn), by the stream's clock.

        A sender that waits until we read on, as that of a playlist, may give a packet before its
        time: then it waits. What others send early is newer, and welcome. If decoding is LATE, as
        compared with the earliest packet, packets are left out up to the newest key frame.
        """
        waits_for_us = self.source.lower().startswith(("http", "-"))
        no_times = container.format.flags & av.format.Flags.no_timestamps.value
        is_test = self.source.startswith("lavfi:")          # no key frames are marked there
        clock = None                                # what the stream's shows at the packet
        due = 0.0                                   # when the packet should come, by this clock
        late_since = None
        for packet in container.demux():
            now = uptime()
            if self.closed.is_set():
                return
            if packet.stream is stream:
                before, clock = clock, None
                if packet.dts is not None and not (no_times or is_test):
                    clock = float(packet.dts * stream.time_base)
                if None in (before, clock) or not 0 <= clock - before <= LONGEST_STEP:
                    due = now                       # no clock, or a new one
                else:
                    due += clock - before
                if not waits_for_us:
                    due = min(due, now)
                self.behind = max(self.behind, now - due)
                if late_since is None and now - due > LATE:
                    late_since = now
                elif late_since and packet.is_keyframe and now - late_since > CATCH_UP:
                    late_since = None
                    due = now
                if late_since:
                    self.dropped += 1
                    stream.codec_context.flush_buffers()
                else:
                    time.sleep(max(0, due - now))
                    yield packet, due if waits_for_us else now
            if time.monotonic() - self.newest_at > LONG_PATIENCE:
                raise BadData(f"nothing that can be decoded for {LONG_PATIENCE:g} s")

    def _is_due(self, now: float) -> bool:
        """Whether it is the turn of a picture that comes now; then the next one is due later."""
        if now < self.due - EARLY * self.period:
            return False
        if now >= self.due + self.period:           # the first picture, or a very late one
            self.due = now
        self.due += self.period
        return True


def undamaged(packet) -> list[av.VideoFrame]:
    """The undamaged pictures of a packet."""
    try:
        return [frame for frame in packet.decode() if not frame.is_corrupt]
    except av.FFmpegError:
        return []
