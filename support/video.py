"""Videos, picture by picture (paper §3.1): decoding by presentation time, and writing.

    for picture in Video("kitchen.mp4", fps=2): ...       uint8 [H, W, 3], whatever the rate of the file

damaged     packets of a video file that could not be decoded faithfully
gap         time between two pictures; if it is implausibly long, the file's clock is taken to be damaged

Memory does not grow with the length of a video, and only pictures that are kept are converted.
"""
from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from math import ceil, inf, isfinite
from pathlib import Path

import av
import numpy as np
from av.video.reformatter import VideoReformatter
from tqdm import tqdm

from support.common import BadData, replacing

TOLERANCE = 0.0012                             # seconds; Matroska rounds this time and the first to milliseconds
MAX_FAILURES = 100                             # packets in a row that cannot even be read: then the rest is lost
BACKWARDS = 3.0                                # seconds; a larger step back in time starts a new clock
LONGEST = 60.0, 3600.0                         # seconds of the longest gap believed: in any file, in long ones
READABLE = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}    # not in PyAV 19


class Video:
    """The RGB pictures of a video file at a fixed rate. Each iteration opens the file anew and closes it.

    path, fps   file; frames a second to give
    largest     pictures are scaled down so that no side is longer (pixels); None: as they are
    size        height and width of the pictures as given (rotated as the file asks)
    duration    seconds that the file's header promises, or None; `frames` is the number of frames expected from it
    damaged     after (or during) an iteration: packets not decoded faithfully, and one more if the end is missing
    gaps        likewise: seconds of each gap too long to be believed; the next picture follows without a gap

    A picture is chosen by its presentation time, counted from the start of the video stream. If that start cannot be
    decoded, the first picture that can be stands in for it, so that no later picture moves. Repeated frames are the
    same array. Mirroring is ignored, and so is the aspect ratio of non-square pixels. Memory does not grow with length.
    If the size changes on the way, all pictures are scaled to the first one's.
    Raises BadData when the file is missing, is no video, or when not one picture can be decoded.
    """

    def __init__(self, path: str | Path, fps: float = 2.0, largest: int | None = None):
        if not (isfinite(fps) and fps > 0):
            raise BadData(f"frames a second must be more than 0, not {fps}")
        self.path, self.fps, self.damaged, self.gaps = path, float(fps), 0, []
        with self._open() as (container, stream):
            self.duration = promised(container, stream)
            first = next(self._decode(container, stream), None)
            if first is None:
                raise BadData(f"{path}: not one picture can be decoded; damaged; get the file again")
            scale = min(1, (largest or inf) / max(first.width, first.height))
            self._stored = max(1, round(first.width * scale)), max(1, round(first.height * scale))    # not turned yet
            self.size = self._stored if round(first.rotation / 90) % 2 else self._stored[::-1]
        self.frames = None if self.duration is None else max(1, ceil((self.duration - TOLERANCE) * self.fps))
        self.damaged = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        """uint8 [H, W, 3], frame by frame; frame i comes as soon as the picture after it has been decoded."""
        self.damaged, self.gaps = 0, []
        reformatter, index = VideoReformatter(), 0
        with self._open() as (container, stream):
            for frame, until in self._shown(container, stream):
                picture = None                                     # converted only if kept, and only once
                while index / self.fps < until - TOLERANCE:
                    picture = to_rgb(frame, reformatter, *self._stored) if picture is None else picture
                    yield picture
                    index += 1
            if self.duration is not None and self.duration - until - sum(self.gaps) > 1:
                self.damaged += 1                                  # a file cut between two packets has no other sign

    def report(self) -> None:
        """Print in one line on stderr what was damaged, if anything; to be called after an iteration."""
        found = [f"{self.damaged} damaged or missing parts were skipped"] if self.damaged else []
        if self.gaps:
            found.append(f"gaps in its clock left out: {len(self.gaps)}, the longest {max(self.gaps):.0f} s; "
                         f"times after them are earlier than the file says")
        if found:
            tqdm.write(f"{self.path}: {'; '.join(found)}", file=sys.stderr)

    @contextmanager
    def _open(self) -> Iterator[tuple]:
        """The open container and its video stream; closed at the end, or when the iteration is abandoned."""
        path = Path(self.path)
        if not path.exists():
            raise BadData(f"{path}: no such file")
        if not path.is_file():
            raise BadData(f"{path}: is {'a directory' if path.is_dir() else 'not a regular file'}; give a video file")
        if path.stat().st_size == 0:
            raise BadData(f"{path}: is empty (0 bytes); get the file again")
        with open_container(f"file:{path}", str(path)) as container:       # file: so that a ':' is no protocol's
            yield container, video_stream(container, str(path), "AUTO")

    def _decode(self, container, stream) -> Iterator[av.VideoFrame]:
        """Pictures in the order of presentation. Damage is counted, and decoding continues after it."""
        packets, failures = container.demux(stream), 0
        while failures < MAX_FAILURES:
            try:
                packet = next(packets, None)
            except (av.FFmpegError, IndexError) as error:          # IndexError: PyAV meets a stream that began late
                if isinstance(error, av.error.ExitError):          # only where a time is set (camera.py)
                    raise BadData(f"{self.path}: nothing came any more; is the sender still there?") from error
                self.damaged += not isinstance(error, IndexError)
                failures += 1
                packets = container.demux(stream)                  # a generator that has raised is finished
                continue
            if packet is None:
                return
            failures, frames = 0, []
            damaged = packet.is_corrupt                            # cut short: decoded in threads, it would spoil the
            if not damaged:                                        # pictures before it
                try:
                    frames = packet.decode()
                except av.FFmpegError:
                    damaged = True
            self.damaged += bool(damaged or any(frame.is_corrupt for frame in frames))
            yield from frames

    def _shown(self, container, stream) -> Iterator[tuple[av.VideoFrame, float]]:
        """Each picture with the time at which it leaves the screen, in seconds from the start of the stream."""
        shown, now = None, 0.0
        for frame, now, step in self._timed(container, stream):
            if shown is not None:
                yield shown, now
            shown = frame
        if shown is None:
            raise BadData(f"{self.path}: not one picture can be decoded any more; was the file changed?")
        yield shown, now + max(step, 2 * TOLERANCE)

    def _timed(self, container, stream) -> Iterator[tuple[av.VideoFrame, float, float]]:
        """Each picture with its time from the start of the stream and its duration (s). Times never decrease."""
        longest = min(max(LONGEST[0], self.duration or 0), LONGEST[1])
        origin = None if stream.start_time is None else float(stream.start_time * stream.time_base)
        now, step = 0.0, min(LONGEST[0], 1 / float(stream.average_rate or stream.guessed_rate or self.fps))
        for count, frame in enumerate(self._decode(container, stream)):
            expected = now + step if count else 0.0
            if frame.pts is None:                                  # raw streams carry no times at all
                now = expected
            else:
                pts = float(frame.pts * frame.time_base)
                back = 0 if count == 0 else BACKWARDS
                if origin is not None and pts - origin > now + longest:        # or a few bytes would fill days
                    self.gaps.append(pts - origin - expected)
                if origin is None or not now - back <= pts - origin <= now + longest:
                    origin = pts - expected                        # a new clock: concatenated, or a damaged time
                now = max(now, pts - origin)
            stated = float((frame.duration or 0) * frame.time_base)
            step = stated if 0 < stated <= longest else step
            yield frame, now, step


def open_container(file: str, name: str, **how):
    """av.open, for what is called `name` in messages; BadData if it is no video, or damaged."""
    try:
        return av.open(file, **how, **READABLE)
    except av.FFmpegError as error:
        raise BadData(f"{name}: cannot be opened as a video ({error.strerror}); truncated? not a video?") from error


def video_stream(container, name: str, threads: str):
    """The stream of a container that is a video, decoded in such `threads`; BadData if there is none."""
    if container.format.name == "tty":                             # FFmpeg would render a .txt file
        raise BadData(f"{name}: is a text file; give a video file")
    stream = container.streams.best("video")
    if stream is None or stream.disposition & av.stream.Disposition.attached_pic:
        raise BadData(f"{name}: has no video stream (audio or subtitles only); give a video file")
    stream.thread_type = threads
    return stream


def promised(container, stream) -> float | None:
    """The duration in seconds that a file's header states for its video stream, or None."""
    if stream.duration is not None:
        return float(stream.duration * stream.time_base)
    tag = re.fullmatch(r"(\d{1,9}):(\d{1,9}):(\d{1,9}(?:\.\d*)?)", stream.metadata.get("DURATION", ""))
    if tag:                                                        # Matroska
        end = 3600 * int(tag[1]) + 60 * int(tag[2]) + float(tag[3])
    elif container.duration is not None:
        end = container.duration / av.time_base
    else:
        return None
    matroska = "matroska" in container.format.name                 # it states the end, not the length
    return max(0.0, end - float((stream.start_time or 0) * stream.time_base)) if matroska else end


def to_rgb(frame: av.VideoFrame, reformatter: VideoReformatter, width: int, height: int) -> np.ndarray:
    """uint8 [H, W, 3], upright; scaled if the frame is not width x height as stored.

    By far the most expensive step after decoding: only for frames that are kept.
    """
    how = {} if (frame.width, frame.height) == (width, height) else {"interpolation": "BICUBIC"}
    rgb = reformatter.reformat(frame, width, height, "rgb24", **how).to_ndarray()                      # [H, W, 3]
    return np.ascontiguousarray(np.rot90(rgb, round(frame.rotation / 90)))      # both turn counter-clockwise


def write_video(path: str | Path, frames: Iterable[np.ndarray], fps: float, crf: int = 18) -> None:
    """H.264 in mp4 from uint8 [H, W, 3] frames of even height and width; crf 0 (lossless) to 51.

    The file appears when it is complete. Raises BadData if there are no frames or if it cannot be written.
    """
    with replacing(path) as part:
        with av.open(f"file:{part}", "w", format="mp4", options={"movflags": "+faststart"}) as container:
            stream = None
            for frame in frames:
                if stream is None:
                    stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
                    stream.height, stream.width = frame.shape[:2]
                    stream.pix_fmt, stream.options = "yuv420p", {"crf": str(crf)}
                    stream.codec_context.gop_size = max(1, round(10 * fps))     # a player can seek every 10 s
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            if stream is None:
                raise BadData(f"{path}: there are no frames to write")
            container.mux(stream.encode())
