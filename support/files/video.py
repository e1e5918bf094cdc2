"""Videos, picture by picture (§3.1): decoding by presentation time, and writing.

    for picture in Video("kitchen.mp4", fps=2): ...       uint8 [H, W, 3], whatever the file's rate

damaged     packets of a video file that could not be decoded faithfully
gap         time between two pictures. If a gap is implausibly long, the file's clock is assumed to
            be damaged
shown       a picture is shown from its presentation time until that of the next picture

Memory does not grow with the length of a video, and only pictures that are kept are converted.
"""
from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import chain
from math import ceil, inf, isfinite
from pathlib import Path

import av
import numpy as np
from av.video.reformatter import VideoReformatter
from tqdm import tqdm

from support.common.disk import replacing
from support.common.errors import BadData
from support.common.text import without_secrets

# seconds; Matroska rounds the times of this picture and of the first to milliseconds
TOLERANCE = 0.0012
MAX_FAILURES = 100                             # unreadable packets in a row: then the rest is lost
BACKWARDS = 3.0                                # seconds; a larger step back in time is a new clock
# seconds: a longer gap is not believed. Where the header states a longer duration, gaps up to that
# duration are believed, but none above the second number
LONGEST_GAP = 60.0
LONGEST_GAP_IN_LONG_VIDEOS = 3600.0


class Video:
    """The RGB pictures of a video file at a fixed rate. They can be read once, as from a pipe.

    path        the file
    fps         pictures to give per second
    largest     scale pictures down so that no side is longer (pixels); None: keep their size
    container   PyAV's, if the file is open already
    size        height and width of the pictures as given (rotated as the file asks)
    duration    seconds that the file's header states, or None
    frames      the number of pictures expected from `duration`, or None
    damaged     until now, the number of packets not decoded faithfully; at the end, one more if the
                end is missing
    broke_off   at the end: whether more than a second of the end is missing
    gaps        until now, seconds of each gap that was too long to be believed. The next picture
                follows without a gap

    A picture is chosen by its presentation time, counted from the start of the video stream. If the
    start cannot be decoded, the first picture that can be decoded replaces it, so that no later
    picture moves. Repeated frames are the same array. Mirroring and the aspect ratio of non-square
    pixels are ignored. If the size changes on the way, all pictures are scaled to the first size.

    Raises BadData if the file is missing, is no video, or has no picture that can be decoded.
    """

    def __init__(self, path: str | Path, fps: float = 2.0, largest: int | None = None,
                 container=None):
        if not (isfinite(fps) and fps > 0):
            raise BadData(f"frames a second must be more than 0, not {fps}")
        self.path = path
        self.name = without_secrets(str(path))
        self.fps = float(fps)
        self.largest = largest
        self.damaged = 0
        self.broke_off = False
        self.gaps = []
        self._read = False                     # whether an iteration has begun
        self._container = open_file(path) if container is None else container
        self._stream = video_stream(self._container, self.name, "AUTO")
        self.duration = promised(self._container, self._stream)
        self.frames = None
        if self.duration is not None:
            self.frames = max(1, ceil((self.duration - TOLERANCE) * self.fps))

        pictures = self._decode()
        first = next(pictures, None)           # shows the size
        if first is None:
            raise BadData(f"{self.name}: not one picture can be decoded; damaged; "
                          f"get the file again")
        self._pictures = chain([first], pictures)
        width, height = scaled_size(first, self.largest)
        self._stored = width, height           # before rotation
        quarter_turns = round(first.rotation / 90)
        self.size = (width, height) if quarter_turns % 2 else (height, width)

    def __iter__(self) -> Iterator[np.ndarray]:
        """uint8 [H, W, 3], frame by frame.

        Frame i is given as soon as the picture after it has been decoded. The file is closed at the
        end, or when the iteration is abandoned.
        """
        assert not self._read, "a video is read once; open it again"
        self._read = True
        reformatter = VideoReformatter()
        index = 0                              # of the next frame to give; its time is index / fps
        with self._container:
            for frame, end in self._shown():
                picture = None                 # converted only if it is given, and only once
                while index / self.fps < end - TOLERANCE:
                    if picture is None:
                        picture = to_rgb(frame, reformatter, *self._stored)
                    yield picture
                    index += 1
        # a file that was cut between two packets shows no other sign of it
        if self.duration is not None and self.duration - end - sum(self.gaps) > 1:
            self.broke_off = True
            self.damaged += 1

    def report(self) -> None:
        """Print damage and gaps in one line on stderr, if there are any; after an iteration."""
        problems = []
        if self.damaged:
            problems.append(f"{self.damaged} damaged or missing parts were skipped")
        if self.gaps:
            problems.append(f"gaps in its clock left out: {len(self.gaps)}, "
                            f"the longest {max(self.gaps):.0f} s; "
                            f"times after them are earlier than the file says")
        if problems:
            tqdm.write(f"{self.name}: {'; '.join(problems)}", file=sys.stderr)

    def _decode(self) -> Iterator[av.VideoFrame]:
        """Pictures in the order of presentation. Damage is counted, and decoding continues."""
        packets = self._container.demux(self._stream)
        failures = 0
        while failures < MAX_FAILURES:
            try:
                packet = next(packets, None)
            except av.error.ExitError as error:
                # a time limit is set for network sources only (streams/live.py)
                raise BadData(f"{self.name}: nothing came any more; "
                              f"is the sender still there?") from error
            except (av.FFmpegError, IndexError) as error:
                # PyAV raises IndexError if a stream begins late, which is no damage
                if not isinstance(error, IndexError):
                    self.damaged += 1
                failures += 1
                # a generator that has raised has ended
                packets = self._container.demux(self._stream)
                continue
            if packet is None:
                return
            failures = 0
            frames = []
            # a packet that was cut short is not decoded: in threads, it would spoil the pictures
            # before it
            damaged = packet.is_corrupt
            if not damaged:
                try:
                    frames = packet.decode()
                except av.FFmpegError:
                    damaged = True
            if damaged or any(frame.is_corrupt for frame in frames):
                self.damaged += 1
            yield from frames

    def _shown(self) -> Iterator[tuple[av.VideoFrame, float]]:
        """(picture, the time at which the next one replaces it), in seconds from the start of the
        stream."""
        shown = None
        for frame, now, step in self._timed():
            if shown is not None:
                yield shown, now
            shown = frame
        yield shown, now + max(step, 2 * TOLERANCE)

    def _timed(self) -> Iterator[tuple[av.VideoFrame, float, float]]:
        """(picture, its time from the start of the stream, its duration), both in seconds.

        Times never decrease.
        """
        stream = self._stream
        # a gap is believed up to the stated duration, but none of hours
        longest_gap = min(max(LONGEST_GAP, self.duration or 0), LONGEST_GAP_IN_LONG_VIDEOS)
        origin = None                          # what the file's clock shows at time 0
        if stream.start_time is not None:
            origin = float(stream.start_time * stream.time_base)
        rate = float(stream.average_rate or stream.guessed_rate or self.fps)
        now = 0.0
        step = min(LONGEST_GAP, 1 / rate)      # the duration of the picture at `now`
        for count, frame in enumerate(self._pictures):
            expected = now + step if count else 0.0
            if frame.pts is None:              # raw streams have no times
                now = expected
            else:
                pts = float(frame.pts * frame.time_base)
                earliest = now - BACKWARDS if count else now
                latest = now + longest_gap
                if origin is not None and pts - origin > latest:
                    # believed, it would turn a file of a few bytes into days of frames
                    self.gaps.append(pts - origin - expected)
                if origin is None or not earliest <= pts - origin <= latest:
                    # a new clock: videos were concatenated, or the time is damaged
                    origin = pts - expected
                now = max(now, pts - origin)
            stated = float((frame.duration or 0) * frame.time_base)
            if 0 < stated <= longest_gap:
                step = stated
            yield frame, now, step


def open_file(path: str | Path):
    """The open container of a video file.

    Raises BadData if it is missing, no file, damaged, or no video.
    """
    name = without_secrets(str(path))
    if not Path(path).exists():
        raise BadData(f"{name}: no such file")
    if not Path(path).is_file():
        raise BadData(f"{name}: is not a regular file; give a video file")
    # with "file:", FFmpeg does not take a name with a ':' for a URL
    return open_container(f"file:{path}", name)


def open_container(file: str, name: str, **settings):
    """av.open(file, **settings). `name` is what messages call the file.

    Raises BadData if the file is damaged, or is no video.
    """
    try:
        # a tag that is not UTF-8 must not stop us
        return av.open(file, metadata_errors="replace", **settings)
    except av.FFmpegError as error:
        hint = "check the address" if "://" in name else "truncated? not a video?"
        raise BadData(f"{name}: cannot be opened as a video ({error.strerror}); {hint}") from error


def video_stream(container, name: str, threads: str):
    """The video stream of a container, to be decoded with PyAV's kind of `threads`.

    Raises BadData if there is none.
    """
    if container.format.name == "tty":         # FFmpeg would draw the letters of a .txt file
        raise BadData(f"{name}: is a text file; give a video file")
    stream = container.streams.best("video")
    # an attached picture is the cover of an audio file
    if stream is None or stream.disposition & av.stream.Disposition.attached_pic:
        raise BadData(f"{name}: has no video stream (audio or subtitles only); give a video file")
    stream.thread_type = threads
    return stream


def promised(container, stream) -> float | None:
    """The duration (seconds) that a file's header states for its video stream, or None."""
    if stream.duration is not None:
        return float(stream.duration * stream.time_base)
    # Matroska: a tag of the stream
    tag = re.fullmatch(r"(\d{1,9}):(\d{1,9}):(\d{1,9}(?:\.\d*)?)",
                       stream.metadata.get("DURATION", ""))
    if tag:
        end = 3600 * int(tag[1]) + 60 * int(tag[2]) + float(tag[3])
    elif container.duration is not None:
        end = container.duration / av.time_base
    else:
        return None
    if "matroska" not in container.format.name:
        return end
    # Matroska states the time of the end, not the length
    return max(0.0, end - float((stream.start_time or 0) * stream.time_base))


def scaled_size(frame: av.VideoFrame, largest: int | None) -> tuple[int, int]:
    """Width and height of a picture, as stored, whose sides shall not be longer than `largest`."""
    scale = min(1, (largest or inf) / max(frame.width, frame.height))
    return max(1, round(frame.width * scale)), max(1, round(frame.height * scale))


def to_rgb(frame: av.VideoFrame, reformatter: VideoReformatter, width: int,
           height: int) -> np.ndarray:
    """uint8 [H, W, 3], upright; scaled if the frame as stored is not width x height.

    This is by far the most expensive step after decoding: call it for frames that are kept.
    """
    scaling = {}
    if (frame.width, frame.height) != (width, height):
        scaling = {"interpolation": "BICUBIC"}
    rgb = reformatter.reformat(frame, width, height, "rgb24", **scaling).to_ndarray()  # [H, W, 3]
    # `rotation` and rot90 both turn counter-clockwise
    return np.ascontiguousarray(np.rot90(rgb, round(frame.rotation / 90)))


def write_video(path: str | Path, frames: Iterable[np.ndarray], fps: float, crf: int = 18) -> None:
    """H.264 in mp4 from uint8 [H, W, 3] frames of even height and width; crf 0 (lossless) to 51.

    The file appears when it is complete. Raises BadData if there are no frames or if it cannot be
    written.
    """
    with replacing(path) as temporary:
        with av.open(f"file:{temporary}", "w", format="mp4",
                     options={"movflags": "+faststart"}) as container:
            stream = None
            for frame in frames:
                if stream is None:
                    stream = container.add_stream("libx264",
                                                  rate=Fraction(fps).limit_denominator(1001))
                    stream.height, stream.width = frame.shape[:2]
                    stream.pix_fmt = "yuv420p"
                    stream.options = {"crf": str(crf)}
                    # a key frame every 10 s, so that a player can seek there
                    stream.codec_context.gop_size = max(1, round(10 * fps))
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            if stream is None:
                raise BadData(f"{path}: there are no frames to write")
            container.mux(stream.encode())
