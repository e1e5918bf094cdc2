"""Videos, picture by picture (§3.1): decoding by presentation time, and writing.

    for picture in Video("kitchen.mp4", fps=2): ...       uint8 [H, W, 3], whatever the file's rate
    Video("https://example.org/kitchen.mp4"), Video("-")  through the network; from standard input

damaged     packets of a video file that could not be decoded faithfully
gap         time between two pictures. If a gap is implausibly long, the file's clock is assumed to
            be damaged
shown       a picture is shown from its presentation time until that of the next picture

Memory does not grow with the length of a video, and only pictures that are kept are converted.
"""
import re
from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import chain
from math import ceil, inf
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryDirectory

import av
import numpy as np
from av.stream import Disposition
from av.video.reformatter import VideoReformatter

from support.common.disk import replacing
from support.common.errors import BadData
from support.common.progress import say
from support.common.text import seconds_of, without_secrets
from support.files.clock import Decoded, presented
from support.files.sources import source_of

# seconds; Matroska rounds the times of this picture and of the first to milliseconds
TOLERANCE = 0.0012
MAX_FAILURES = 100                             # unreadable packets in a row: then the rest is lost
# seconds: a longer gap is not believed. Where the header states a longer duration, gaps up to that
# duration are believed, but none above the second number
LONGEST_GAP = 60.0
LONGEST_GAP_IN_LONG_VIDEOS = 3600.0
# and in formats whose clocks may change on the way (.ts), as in FFmpeg: there it is a new clock
LONGEST_GAP_WHERE_CLOCKS_CHANGE = 10.0
TIMELESS = 25                                  # so many pictures without times are not reported
PATIENCE = 10.0                                # seconds without data until a sender is given up
READ = "a video file (no folder), an address (http://, https://) or - (standard input) is read"
# FFmpeg's numbers: of what a stream says about its colours, of the transfer functions of HDR
UNSPECIFIED = 2
PQ, HLG = 16, 18
COLOURS = ("colorspace", "color_primaries", "color_trc")
# linear light of BT.2020 and of P3 in the primaries of BT.709
BT2020 = [[1.6605, -0.5876, -0.0728],
          [-0.1246, 1.1329, -0.0083],
          [-0.0182, -0.1006, 1.1187]]
P3 = [[1.2249, -0.2249, 0],
      [-0.0421, 1.0421, 0],
      [-0.0196, -0.0786, 1.0983]]
TO_BT709 = {1: np.eye(3), 11: P3, 12: P3}      # by FFmpeg's numbers of primaries; others: BT2020
ENCODER = "libx264"
# of a small copy: pixels of its longer side, pictures a second, rate factor of H.264
COPY_SIZE = 480
COPY_RATE = 25
COPY_CRF = 30
TIMES_OF_DECODING = ("avi", "asf")             # is what these formats have, and no others
# of a playlist without its last line: all of it, until it has been asked in vain so often for more
PLAYLIST_OPTIONS = {"live_start_index": "0", "m3u8_hold_counters": "2"}


class Video:
    """The RGB pictures of a video file at a fixed rate. They can be read once, as from a pipe.

    path        the file; or an address, http:// or https://; or "-", standard input
    fps         pictures to give per second
    largest     scale pictures down so that no side is longer (pixels); None: keep their size
    options     of FFmpeg, such as {"framerate": "10"} for a file without times
    title       that the file gives itself, or ""
    size        height and width of the pictures as given (rotated as the file asks)
    duration    seconds from time 0 to the end that the file's header states, or None
    frames      the number of pictures expected from `duration`, or None
    rate        pictures a second in the file
    damaged     until now, the number of packets not decoded faithfully; at the end, one more if the
                end is missing
    leaps       until now, seconds by which the clock of the file went back (below 0) or leapt too
                far to be believed. The next picture follows without a gap

    Time 0 is that of the file (`start_of`), whose sound may begin before its pictures. Until the
    first picture that can be decoded, that picture is given. Repeated frames are the same array.
    Pictures are as a player shows them: turned and mirrored as the file asks, with square pixels,
    in the colours that the stream states, or else the container, and HDR in those of ordinary
    video. If the size changes on the way, all are scaled to the first size.

    Raises BadData if the file is missing, is no video, or has no picture that can be decoded; of
    what is sent, also if it breaks off; of colours that FFmpeg cannot convert, at the picture.
    """

    def __init__(self, path: str | Path, fps: float = 2.0, largest: int | None = None,
                 options: dict[str, str] | None = None):
        self.path = path
        self.name = without_secrets(str(path))
        self.fps = float(fps)
        self.largest = largest
        self.damaged = 0
        self.leaps = []
        self._read = False                     # whether an iteration has begun
        self._broken_off = False               # whether the last that came was an error of reading
        self._timeless = 0                     # pictures without a time of their own
        self._last_clock = -inf                # the latest time that was read, right or wrong
        self._read_to = 0                      # byte of the file at which the last packet ends
        self._container = open_file(path, options)
        self._stream = video_stream(self._container, self.name, "AUTO")
        self._tracks = len(film_tracks(self._container))
        # what the container says of the colours; decoding replaces it by what the stream says
        context = self._stream.codec_context
        self._colours = {name: getattr(context, name) for name in COLOURS}
        self.title = self._container.metadata.get("title", "")
        flags = self._container.format.flags
        self._clock_may_change = bool(flags & av.format.Flags.ts_discont.value)
        self.duration = promised(self._container, self._stream)
        self.frames = None
        if self.duration is not None:
            self.frames = max(1, ceil((self.duration - TOLERANCE) * self.fps))

        pictures = self._decode()
        first = next(pictures, None)           # it shows the size
        if first is None:
            raise BadData(f"{self.name}: not one picture can be decoded; {READ} (of an .mp4 that is "
                          f"sent, the index comes first: ffmpeg -c copy -movflags +faststart)")
        self._pictures = chain([first], pictures)
        self.size = upright_size(first, self._stream, self.largest)

        self._by_dts = self._container.format.name in TIMES_OF_DECODING
        self._start = start_of(self._container)
        self._has_times = not flags & av.format.Flags.no_timestamps.value
        # whether the file states where it begins and how long a picture is shown
        self._states_times = self._has_times and not self._by_dts
        rate = self._stream.guessed_rate
        if not self._has_times and "framerate" in (options or {}):
            rate = self._stream.average_rate   # as told, whatever stands in the pictures
        self.rate = float(rate or self._stream.average_rate or self.fps)
        self._step = min(LONGEST_GAP, 1 / self.rate)           # a picture's duration, if not stated

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
                        picture = self._converted(frame, reformatter)
                    yield picture
                    index += 1
        # a file that was cut between two packets shows no other sign of it
        gaps = sum(leap for leap in self.leaps if leap > 0)
        shown = max(end + gaps, self._last_clock - (self._start or 0.0))
        missing = (self.duration or 0) - shown
        is_sent = "://" in str(self.path)
        if missing > 1 + 2 * self._step or is_sent and self._broken_off:
            self.damaged += 1
            # a damaged file is narrated as far as it goes, but this may have been the connection
            if is_sent:
                raise BadData(f"{self.name}: broke off before its end, or its server does not say "
                              f"where that is (save it then, and give the file); with --state, the "
                              f"same command goes on when the connection is there again")

    def _converted(self, frame: av.VideoFrame, reformatter: VideoReformatter) -> np.ndarray:
        """A frame as it is given. BadData if FFmpeg cannot convert its colours."""
        for name, of_container in self._colours.items():
            if getattr(frame, name) == UNSPECIFIED:
                setattr(frame, name, of_container)
        try:
            return to_rgb(frame, reformatter, self.size)
        except av.FFmpegError as error:
            raise BadData(f"{self.name}: its colours (matrix {frame.colorspace} of H.273) cannot be "
                          f"converted; BT.601, BT.709 and BT.2020 are read") from error

    def report(self) -> None:
        """Print what is to be known of the file in one line on stderr; after an iteration."""
        problems = []
        if self._tracks > 1:
            problems.append("of several video tracks, the one marked as default was read, or the first")
        if self._timeless > TIMELESS or not self._has_times:
            problems.append(f"its pictures have no time of their own, {1 / self._step:g} a second are "
                            f"assumed (--source-option framerate=N, if the file has no times)")
        if self._has_unread_film():
            problems.append("another film stands behind the one that was read")
        if self.damaged:
            problems.append(f"{self.damaged} damaged or missing parts were skipped")
        if self.leaps:
            problems.append(f"its clock leaps or goes back {len(self.leaps)} times, by up to "
                            f"{max(map(abs, self.leaps)):.0f} s; what follows goes on without a gap")
        if problems:
            say(f"{self.name}: {'; '.join(problems)}")

    def _has_unread_film(self) -> bool:
        """Whether the file begins again behind what was read: of several .mp4 or .flv files that
        were joined byte by byte, FFmpeg reads the first, of .mkv files the first two.
        """
        if self._clock_may_change or not self._has_times or not Path(self.path).is_file():
            return False
        with open(self.path, "rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            # any .mp4, or what begins as this file does: so many bytes tell the beginning of an .mxf
            # from its end
            begins = re.compile(rb"(?s)\0\0\0.ftyp|" + re.escape(content[:14]))
            return bool(begins.search(content, self._read_to))

    def _decode(self) -> Iterator[av.VideoFrame]:
        """Pictures in the order of presentation. Damage is counted, and decoding continues."""
        packets = self._container.demux(self._stream)
        failures = 0
        while failures < MAX_FAILURES:
            try:
                packet = next(packets, None)
            except av.error.ExitError as error:
                # a time limit is set for senders only
                raise BadData(f"{self.name}: nothing came any more; "
                              f"is the sender still there?") from error
            except (av.FFmpegError, IndexError) as error:
                self._broken_off |= isinstance(error, OSError | av.error.HTTPError)
                # PyAV raises IndexError if a stream begins late, which is no damage
                if not isinstance(error, IndexError) and failures == 0:
                    self.damaged += 1
                failures += 1
                # a generator that has raised has ended
                packets = self._container.demux(self._stream)
                continue
            if packet is None:
                return
            failures = 0
            self._broken_off = False
            if packet.size == 0 and packet.pts is not None:
                continue                       # Theora: the picture before is shown again
            self._read_to = max(self._read_to, (packet.pos or 0) + packet.size)
            frames = []
            # A marked packet was cut short, and would spoil the pictures before it. Where clocks
            # may change, in .ts and in playlists, the mark is a mere suspicion: each seam has one.
            damaged = packet.is_corrupt and not self._clock_may_change
            if not damaged:
                try:
                    frames = packet.decode()
                except av.FFmpegError:
                    damaged = True
            if damaged or any(frame.is_corrupt for frame in frames):
                self.damaged += 1
            yield from frames

    def _shown(self) -> Iterator[tuple[av.VideoFrame, float]]:
        """(picture, the time at which the next one replaces it), in seconds from time 0.

        Times never decrease.
        """
        # a gap is believed up to the stated duration, but none of hours
        longest_gap = min(max(LONGEST_GAP, self.duration or 0), LONGEST_GAP_IN_LONG_VIDEOS)
        if self._clock_may_change:
            longest_gap = LONGEST_GAP_WHERE_CLOCKS_CHANGE
        # what the clock shows at time 0; None: what it shows at the first picture
        origin = self._start if self._states_times else None
        claims = presented(self._claims(), origin, longest_gap, self.leaps)
        before, begin = next(claims)
        for claim, time in claims:
            self._timeless += claim.clock is None
            # of a playlist, FFmpeg leaves out missing segments without a word; pictures are shorter
            self.damaged += self._container.format.name == "hls" and time - begin > 2
            yield before.picture, time
            before, begin = claim, time
        yield before.picture, begin + max(before.step, 2 * TOLERANCE)

    def _claims(self) -> Iterator[Decoded]:
        """The pictures with the times that the file has for them."""
        for frame in self._pictures:
            ticks = frame.dts if self._by_dts else frame.pts
            clock = None                       # raw streams have no times
            if ticks is not None:
                clock = float(ticks * frame.time_base)
                self._last_clock = max(self._last_clock, clock)
            stated = float((frame.duration or 0) * frame.time_base)
            if 0 < stated <= LONGEST_GAP_IN_LONG_VIDEOS and self._states_times:
                self._step = stated
            yield Decoded(frame, clock, self._step)


def open_file(path: str | Path, options: dict[str, str] | None = None):
    """The open container of a video; `options` are FFmpeg's.

    Raises BadData if it is missing, no file, damaged, or no video.
    """
    source = str(path)
    name = without_secrets(source)
    options = PLAYLIST_OPTIONS | (options or {})
    timeout = None                             # whoever writes into a pipe may rest
    if source == "-":
        file = "pipe:0"
    elif source_of(source).kind == "pipe":
        file = source
        options = {"reconnect": "1"} | options
        timeout = (PATIENCE, PATIENCE)
    elif Path(path).is_file():
        file = f"file:{path}"                  # FFmpeg does not take a name with a ':' for a URL
    else:
        raise BadData(f"{name}: no such file; {READ}")
    try:
        # a tag that is not UTF-8 must not stop us
        container = av.open(file, options=options, timeout=timeout, metadata_errors="replace")
    except av.FFmpegError as error:
        reason = error.strerror
        if isinstance(error, av.error.ExitError):
            reason = f"nothing came for {PATIENCE:g} s"
        raise BadData(f"{name}: cannot be opened as a video ({reason}); {READ}") from error
    if timeout and is_endless(container):
        raise BadData(f"{name}: comes as it happens and states no end; give --live, or save it and "
                      f"give the file")
    return container


def is_endless(container) -> bool:
    """Whether what is sent is no recording: a playlist without its last line, or pictures without
    times (a web camera's), if neither says how long it is.
    """
    lacks_times = container.format.flags & av.format.Flags.no_timestamps.value
    is_sent = container.size <= 0                          # a file has a size
    return container.duration is None and (
        container.format.name == "hls" or lacks_times and is_sent)


def video_stream(container, name: str, threads: str):
    """The video stream of a container, to be decoded with PyAV's kind of `threads`.

    Raises BadData if there is none.
    """
    form = container.format.name
    # FFmpeg would draw the letters of a text, and give all films of a list the first one's time base
    if form in ("tty", "concat"):
        raise BadData(f"{name}: is a text file or a list of films; {READ}")
    tracks = film_tracks(container)
    if not tracks:
        raise BadData(f"{name}: has no video stream (sound with a cover, subtitles or nothing)")
    # players show the first of those that are marked for it, or the first
    stream = max(tracks, key=lambda track: track.disposition & Disposition.default)
    if stream.codec_context is None:
        raise BadData(f"{name}: this FFmpeg has no decoder for its video")
    stream.thread_type = threads
    return stream


def film_tracks(container) -> list:
    """The video streams that are no covers."""
    return [stream for stream in container.streams.video
            if not stream.disposition & Disposition.attached_pic]


def start_of(container) -> float | None:
    """What a file's clock (seconds) shows at its time 0: where its first stream begins; but in .mp4
    and .mov 0, as players have it, if nothing is before that.
    """
    if container.start_time is None:
        return None
    start = container.start_time / av.time_base
    return min(0.0, start) if "mp4" in container.format.name else start


def promised(container, stream) -> float | None:
    """The seconds from time 0 to the end of the pictures that a file's header states, or None."""
    start = start_of(container) or 0.0
    # Matroska: a tag has the end of the stream, and FFmpeg may guess another one from the sound
    tag = re.fullmatch(r"(\d{1,9}):(\d{1,9}):(\d{1,9}(?:\.\d*)?)",
                       stream.metadata.get("DURATION", ""))
    if tag:
        end = seconds_of(tag.groups())
    elif stream.duration is not None:
        begin = float(stream.start_time * stream.time_base) if stream.start_time else start
        end = begin + float(stream.duration * stream.time_base)
    elif container.duration is None or container.format.name == "flv":
        return None                            # a .flv states that of its sound, too
    else:
        end = container.duration / av.time_base
        if "matroska" not in container.format.name:            # it states the time of the end
            end += (container.start_time or 0) / av.time_base
    return max(0.0, end - start)


def turn_of(frame: av.VideoFrame) -> tuple[int, bool]:
    """How a picture, as stored, is shown: by how many quarters it is turned counter-clockwise, and
    whether its rows are read from the last to the first before that.
    """
    try:
        matrix = frame.side_data.get("DISPLAYMATRIX")
    except ValueError:                         # there is a kind of side data unknown to PyAV
        matrix = None
    is_mirrored = False
    if matrix is not None:                     # it sends (x, y) to (ax + cy, bx + dy)
        a, b, _, c, d, *_ = np.frombuffer(bytes(matrix), np.int32).tolist()
        is_mirrored = a * d < b * c
    return round(frame.rotation / 90) % 4, is_mirrored


def upright_size(frame: av.VideoFrame, stream, largest: int | None) -> tuple[int, int]:
    """Height and width of an upright picture with square pixels whose sides shall not be longer
    than `largest`.
    """
    shape = float(stream.sample_aspect_ratio or 1)     # width of a pixel, divided by its height
    sides = [frame.height, frame.width * shape]
    scale = min(1, (largest or inf) / max(sides))
    height, width = [max(1, round(side * scale)) for side in sides]
    quarters, _ = turn_of(frame)
    return (width, height) if quarters % 2 else (height, width)


def to_rgb(frame: av.VideoFrame, reformatter: VideoReformatter,
           size: tuple[int, int]) -> np.ndarray:
    """A frame as uint8 [H, W, 3], upright; scaled if it has another size than (H, W).

    This is by far the most expensive step after decoding: call it for frames that are kept.
    """
    quarters, is_mirrored = turn_of(frame)
    height, width = size[::-1] if quarters % 2 else size                    # as stored
    is_scaled = (frame.height, frame.width) != (height, width)
    scaling = "BICUBIC" if is_scaled else None
    is_hdr = frame.color_trc in (PQ, HLG)
    form = "rgb48le" if is_hdr else "rgb24"
    scaled = reformatter.reformat(frame, width, height, form, interpolation=scaling)
    rgb = scaled.to_ndarray()                                               # [H, W, 3]
    if is_hdr:
        rgb = hdr_to_sdr(rgb, frame.color_trc, frame.color_primaries)
    if is_mirrored:
        rgb = rgb[::-1]
    return np.ascontiguousarray(np.rot90(rgb, quarters))


def hdr_to_sdr(rgb: np.ndarray, transfer: int, primaries: int) -> np.ndarray:
    """uint16 [H, W, 3] in the colours of HDR (PQ or HLG) -> uint8 in those of ordinary video
    (BT.709, gamma 2.4). 203 cd/m2 (ITU-R BT.2408) becomes white; what is brighter, too.
    """
    to_bt709 = np.float32(TO_BT709.get(primaries, BT2020))
    x = rgb / np.float32(65535)
    if transfer == PQ:
        y = x ** (1 / 78.84375)
        light = np.maximum(y - 0.8359375, 0) / (18.8515625 - 18.6875 * y)
        light = 10_000 * light ** (1 / 0.1593017578125)                        # cd/m2
    else:                                      # as a display of 1000 cd/m2 shows it
        bright = (np.exp((x - 0.55991073) / 0.17883277) + 0.28466892) / 12
        scene = np.where(x <= 0.5, x ** 2 / 3, bright)
        luminance = scene @ (np.float32([0.2126, 0.7152, 0.0722]) @ to_bt709)
        light = 1000 * scene * luminance[..., None] ** 0.2
    light = np.clip(light / 203 @ to_bt709.T, 0, 1)
    return np.round(255 * light ** (1 / 2.4)).astype(np.uint8)


def write_video(path: str | Path, frames: Iterable[np.ndarray], fps: float, crf: int = 18,
                title: str | None = None) -> None:
    """H.264 in mp4 from uint8 [H, W, 3] frames of even height and width; crf 0 (lossless) to 51.
    Players show the title.

    The file appears when it is complete. Raises BadData if it cannot be written.
    """
    with replacing(path) as temporary:
        with av.open(f"file:{temporary}", "w", format="mp4",
                     options={"movflags": "+faststart"}) as container:
            if title:
                container.metadata["title"] = title
            stream = None
            for frame in frames:
                if stream is None:
                    stream = container.add_stream(ENCODER,
                                                  rate=Fraction(fps).limit_denominator(1001))
                    stream.height, stream.width = frame.shape[:2]
                    stream.pix_fmt = "yuv420p"
                    stream.options = {"crf": str(crf)}
                    # a key frame every 10 s, so that a player can seek there
                    stream.codec_context.gop_size = max(1, round(10 * fps))
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(stream.encode())


def small_copy(path: Path) -> bytes:
    """A video as a small .mp4 that browsers play, without sound."""
    pictures = Video(path, COPY_RATE, COPY_SIZE)
    height, width = pictures.size
    even = (picture[:height // 2 * 2, :width // 2 * 2] for picture in pictures)
    with TemporaryDirectory() as folder:
        copy = Path(folder) / "copy.mp4"
        write_video(copy, even, COPY_RATE, COPY_CRF)
        return copy.read_bytes()
