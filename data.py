"""Narrated videos: decoding, frame features, the toy data set (paper §4.1, App. B.4).

    python data.py toy --seed 7 --minutes 3 --output kitchen.mp4     a toy video and its ground truth, kitchen.json
    python data.py stats --data toy                                  the columns of App. B.4's table

Glossary
fps         frames a second that the narrator sees (2 in the paper), whatever the rate of the file
frame i     the picture on screen i / fps seconds after the first one; it stands for the time up to (i + 1) / fps
narration   (frame, text): the sentence written after its frame; the first is at frame 0 in the toy world
segment     the frames after one narration up to the next: as many segments as narrations
memory      words of a narration that only visual memory can give; () where there are none
x           frame features [T, J, D]: frames, tokens per frame, width
damaged     packets of a video file that could not be decoded faithfully

Does not include yet: Ego4D, EgoExo4D and EPIC-Kitchens-100, and feature extraction from videos.
"""
from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from math import ceil, isfinite
from pathlib import Path

import av
import numpy as np
import torch
from av.video.reformatter import VideoReformatter
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from toy import world


class BadData(ValueError):
    """Something that the user can put right; the message is one line that says what to do."""


# ----------------------------------------------------------------------------------------- time and frames

def frame_at(time: float, fps: float) -> int:
    """The frame whose span (i / fps, (i + 1) / fps] holds a time in seconds; frame 0 for anything earlier."""
    return max(0, ceil(time * fps - 1e-6) - 1)                     # 1e-6: time_of(i) * fps may exceed i + 1 by a rounding


def time_of(frame: int, fps: float) -> float:
    """The end of a frame's span in seconds."""
    return (frame + 1) / fps


# --------------------------------------------------------------------------------------------------- video

TOLERANCE = 0.0012                             # seconds; Matroska rounds this time and the first to milliseconds
MAX_FAILURES = 100                             # packets in a row that cannot even be read: give the rest up
BACKWARDS = 3.0                                # seconds; a larger step back in time starts a new clock


class Video:
    """The RGB pictures of a video file at a fixed rate. Each iteration opens the file anew and closes it.

    path, fps   file; frames a second to give
    size        height and width of the pictures as shown (rotated as the file asks)
    duration    seconds that the file's header promises, or None; `frames` is the number of frames expected from it
    damaged     after (or during) an iteration: packets not decoded faithfully, and one more if the end is missing

    A picture is chosen by its presentation time, counted from the start of the video stream. If that start cannot be
    decoded, the first picture that can be stands in for it, so that no later picture moves. Repeated frames are the
    same array. Mirroring is ignored, and so is the aspect ratio of non-square pixels. Memory does not grow with length.
    Raises BadData when the file is missing, is no video, or when not one picture can be decoded.
    """

    def __init__(self, path: str | Path, fps: float = 2.0):
        if not (isfinite(fps) and fps > 0):
            raise BadData(f"frames a second must be more than 0, not {fps}")
        self.path, self.fps, self.damaged = Path(path), float(fps), 0
        with self._open() as (container, stream):
            self.duration = promised(container, stream)
            first = next(self._decode(container, stream), None)
            if first is None:
                raise BadData(f"{path}: not one picture can be decoded; damaged; get the file again")
            quarter_turns = round(first.rotation / 90)
            self.size = (first.width, first.height) if quarter_turns % 2 else (first.height, first.width)
        self.frames = None if self.duration is None else max(1, ceil((self.duration - TOLERANCE) * self.fps))
        self.damaged = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        """uint8 [H, W, 3], frame by frame; frame i comes as soon as the picture after it has been decoded."""
        self.damaged = 0
        reformatter, index = VideoReformatter(), 0
        with self._open() as (container, stream):
            for frame, until in self._shown(container, stream):
                picture = None                                     # converted only if kept, and only once
                while index / self.fps < until - TOLERANCE:
                    picture = to_rgb(frame, reformatter) if picture is None else picture
                    yield picture
                    index += 1
            if self.duration is not None and self.duration - until > 1:
                self.damaged += 1                                  # a file cut between two packets has no other sign

    def report(self) -> None:
        """Says on stderr, in one line, what was damaged (if anything). For whoever iterates."""
        if self.damaged:
            tqdm.write(f"{self.path}: {self.damaged} damaged or missing parts were skipped", file=sys.stderr)

    @contextmanager
    def _open(self) -> Iterator[tuple]:
        """The open container and its video stream; closed at the end, or when the iteration is abandoned."""
        path = self.path
        if not path.exists():
            raise BadData(f"{path}: no such file")
        if not path.is_file():
            raise BadData(f"{path}: is {'a directory' if path.is_dir() else 'not a regular file'}; give a video file")
        if path.stat().st_size == 0:
            raise BadData(f"{path}: is empty (0 bytes); get the file again")
        try:                                                       # file: keeps a ':' in a name from being a protocol
            container = av.open(f"file:{path}", metadata_errors="replace")
        except av.FFmpegError as error:
            raise BadData(f"{path}: cannot be opened as a video ({error.strerror}); truncated? not a video?") from error
        with container:
            if container.format.name == "tty":                     # FFmpeg would render a .txt file
                raise BadData(f"{path}: is a text file; give a video file")
            stream = container.streams.best("video")
            if stream is None or stream.disposition & av.stream.Disposition.attached_pic:
                raise BadData(f"{path}: has no video stream (audio or subtitles only); give a video file")
            stream.thread_type = "AUTO"
            yield container, stream

    def _decode(self, container, stream) -> Iterator[av.VideoFrame]:
        """Pictures in the order of presentation. Damage is counted, and decoding goes on behind it."""
        packets, failures = container.demux(stream), 0
        while failures < MAX_FAILURES:
            try:
                packet = next(packets, None)
            except (av.FFmpegError, IndexError) as error:          # IndexError: PyAV meets a stream that began late
                self.damaged += not isinstance(error, IndexError)
                failures += 1
                packets = container.demux(stream)                  # a generator that has raised is finished
                continue
            if packet is None:
                return
            failures, frames = 0, []
            damaged = packet.is_corrupt                            # cut short: decoded in threads, it would take the
            if not damaged:                                        # pictures before it along
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
        """Each picture with its time from the start of the stream and its own duration, in seconds. Never runs back."""
        usual = 1 / float(stream.average_rate or stream.guessed_rate or self.fps)
        longest = 3600 if self.duration is None else max(60, self.duration)
        origin = None if stream.start_time is None else float(stream.start_time * stream.time_base)
        now, step = 0.0, 0.0
        for count, frame in enumerate(self._decode(container, stream)):
            expected = now + step
            if frame.pts is None:                                  # raw streams carry no times at all
                now = expected
            else:
                pts = float(frame.pts * frame.time_base)
                back = 0 if count == 0 else BACKWARDS
                if origin is None or not now - back <= pts - origin <= now + longest:
                    origin = pts - expected                        # a new clock: concatenated, or a damaged time
                now = max(now, pts - origin)
            step = float((frame.duration or 0) * frame.time_base)
            step = step if 0 < step <= longest else usual
            yield frame, now, step


def promised(container, stream) -> float | None:
    """The duration in seconds that a file's header states for its video stream, or None."""
    if stream.duration is not None:
        return float(stream.duration * stream.time_base)
    tag = re.fullmatch(r"(\d+):(\d+):([\d.]+)", stream.metadata.get("DURATION", ""))
    if tag:                                                        # Matroska
        end = 3600 * int(tag[1]) + 60 * int(tag[2]) + float(tag[3])
    elif container.duration is not None:
        end = container.duration / av.time_base
    else:
        return None
    matroska = "matroska" in container.format.name                 # it states the end, not the length
    return max(0.0, end - float((stream.start_time or 0) * stream.time_base)) if matroska else end


def to_rgb(frame: av.VideoFrame, reformatter: VideoReformatter) -> np.ndarray:
    """uint8 [H, W, 3], upright. By far the most expensive step after decoding: only for frames that are kept."""
    rgb = reformatter.reformat(frame, format="rgb24").to_ndarray()                                     # [H, W, 3]
    return np.ascontiguousarray(np.rot90(rgb, round(frame.rotation / 90)))      # both turn counter-clockwise


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary name beside `path`, which becomes `path` at the end, or vanishes if anything is raised on the way."""
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    if path.is_dir():
        raise BadData(f"{path}: is a directory; give the name of a file")
    try:
        part.touch()
    except OSError as error:
        raise BadData(f"{path}: cannot be written ({error.strerror}); choose another place") from error
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


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


# ------------------------------------------------------------------------------------------------ features

FEATURES = re.compile(r"(.+?\.safetensors)(?::(.*))?|(.+\.pt)", re.IGNORECASE)


def is_features(spec: str) -> bool:
    """Does an argument name frame features (FILE.safetensors, FILE.safetensors:NAME, FILE.pt), not a video?"""
    return FEATURES.fullmatch(str(spec)) is not None


def load_features(spec: str, tokens: int | None = None, width: int | None = None) -> Tensor:
    """Frame features [T, J, D] on the CPU, in the floating point format in which they are stored.

    spec: FILE.safetensors (with one tensor), FILE.safetensors:NAME, or FILE.pt (a tensor; read with weights_only)
    tokens, width: what J and D must be, if given. Raises BadData for anything that is not such features.
    """
    match = FEATURES.fullmatch(str(spec))
    if match is None:
        raise BadData(f"{spec}: features are FILE.safetensors, FILE.safetensors:NAME or FILE.pt")
    path = Path(match[1] or match[3])
    if not path.is_file():
        raise BadData(f"{path}: {'is a directory, not a feature file' if path.is_dir() else 'no such file'}")
    x = _read_pt(path) if match[3] else _read_safetensors(path, match[2])
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise BadData(f"{spec}: features must be floating point, not {str(x.dtype).removeprefix('torch.')}")
    if x.ndim != 3 or x.numel() == 0:
        raise BadData(f"{spec}: features must be [frames, tokens, width], none of them 0, not {list(x.shape)}")
    for name, given, wanted in (("tokens per frame", x.shape[1], tokens), ("wide", x.shape[2], width)):
        if wanted is not None and given != wanted:
            raise BadData(f"{spec}: features are {given} {name}, the model wants {wanted}; use its vision model")
    if not x.isfinite().all():
        raise BadData(f"{spec}: features contain NaN or infinite values; extract them again")
    return x


def _read_safetensors(path: Path, name: str | None) -> Tensor:
    try:
        with safe_open(path, "pt") as file:
            names = sorted(file.keys())
            few = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
            if name is None and len(names) != 1:
                raise BadData(f"{path}: holds {len(names)} tensors; name one: FILE:NAME (it has {few or 'none'})")
            if name is not None and name not in names:
                raise BadData(f"{path}: has no tensor {name!r} (names: {few or 'none'})")
            return file.get_tensor(names[0] if name is None else name)
    except (SafetensorError, OSError) as error:
        raise BadData(f"{path}: cannot be read as safetensors ({error}); damaged?") from error


def _read_pt(path: Path) -> Tensor:
    try:
        x = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:                 # a damaged pickle can raise nearly anything
        reason = type(error).__name__          # the message itself can be a page long
        raise BadData(f"{path}: cannot be read as a tensor ({reason}); damaged, or no plain tensor?") from error
    if not isinstance(x, Tensor):
        raise BadData(f"{path}: holds a {type(x).__name__}; save one tensor [frames, tokens, width]")
    return x.detach()


# ------------------------------------------------------------------------------------------------- samples

@dataclass
class Sample:
    """A narrated video; nothing is decoded or rendered before `frames()` is called, and never all at once."""
    name: str
    narrations: list[tuple[int, str]]          # (frame, text), frames strictly increasing
    memory: list[tuple[str, ...]]              # one per narration: the words that only visual memory can give
    fps: float
    num_frames: int
    source: Callable[[], Iterator[np.ndarray]]

    def frames(self) -> Iterator[np.ndarray]:
        """num_frames pictures, uint8 [H, W, 3]."""
        return self.source()


def make_sample(name: str, told: Iterable[tuple[int, str, tuple]], fps: float, num_frames: int,
                source: Callable[[], Iterator[np.ndarray]]) -> Sample:
    """A Sample from (frame, text, memory) in any order; of two on one frame the later replaces the earlier."""
    by_frame = {frame: (text, memory) for frame, text, memory in told}
    order = sorted(by_frame)
    return Sample(name, [(frame, by_frame[frame][0]) for frame in order], [by_frame[frame][1] for frame in order],
                  fps, num_frames, source)


def read_sample(path: str | Path) -> Sample:
    """The sample that a .json file describes; times are in seconds, "video" is relative to the file's folder.

        {"video": "kitchen.mp4", "fps": 2, "duration": 151.5,
         "narrations": [{"time": 0.5, "text": "You fill the rack.", "memory": ["green", "bowl"]}, ...]}

    "memory" may be left out. Raises BadData naming the file and the entry that is wrong.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadData(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise BadData(f"{path}: is not JSON ({error})") from error

    def check(right: bool, what: str) -> None:
        if not right:
            raise BadData(f"{path}: {what}")

    check(isinstance(content, dict), 'must be an object with "video", "fps", "duration" and "narrations"')
    check(isinstance(content.get("video"), str), '"video" must be the name of a file')
    for key in ("fps", "duration"):
        check(is_number(content.get(key)) and content[key] > 0, f'"{key}" must be a number above 0')
    check(isinstance(content.get("narrations"), list), '"narrations" must be a list')
    fps, num_frames, told = content["fps"], frame_at(content["duration"], content["fps"]) + 1, []
    for n, entry in enumerate(content["narrations"]):
        check(isinstance(entry, dict), f"narrations[{n}] must be an object")
        time, text, memory = entry.get("time"), entry.get("text"), entry.get("memory", [])
        check(is_number(time) and time >= 0, f'narrations[{n}]: "time" must be a number of seconds, 0 or more')
        check(frame_at(time, fps) < num_frames, f"narrations[{n}]: {time} s is after the end ({content['duration']} s)")
        check(isinstance(text, str) and text.strip(), f'narrations[{n}]: "text" must be a sentence')
        check(isinstance(memory, list) and all(isinstance(word, str) for word in memory),
              f'narrations[{n}]: "memory" must be a list of words')
        told.append((time, text, tuple(memory)))
    told.sort(key=lambda entry: entry[0])      # stable: "the later" of one frame is the later in time, then in the file
    frames = ((frame_at(time, fps), text, memory) for time, text, memory in told)
    video = path.parent / content["video"]
    return make_sample(path.stem, frames, fps, num_frames, lambda: _decoded(video, fps, num_frames))


def is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)


def _decoded(path: Path, fps: float, num_frames: int) -> Iterator[np.ndarray]:
    video, count = Video(path, fps), 0
    for count, frame in enumerate(islice(video, num_frames), 1):
        yield frame
    video.report()
    if count < num_frames:
        raise BadData(f"{path}: has {count} frames, its .json promises {num_frames}; truncated? get the video again")


# ------------------------------------------------------------------------------------------- the toy world

# Seeds below a million are free: for demonstrations (`data.py toy --seed 7`) and tests of the code.
TOY_SEEDS = {"train": range(1_000_000, 2_000_000), "val": range(2_000_000, 2_100_000),
             "test": range(3_000_000, 3_100_000)}                  # test: for reported numbers only
TOY_COUNT = {"train": 800, "val": 30, "test": 30}                  # videos if no limit is given
TOY_SEGMENTS = (8, 12)                                             # least and most segments of a video
MEAN_SEGMENT = 3.5                                                 # seconds


def toy_sample(seed: int, segments: int) -> Sample:
    """The toy video of a seed; rendered while its frames are asked for."""
    kitchen = world.Kitchen(seed, segments)
    told = ((n.frame, n.text, tuple(n.memory)) for n in kitchen.narrations)
    return make_sample(f"toy-{seed}", told, world.FPS, len(kitchen), lambda: map(kitchen.render, range(len(kitchen))))


def toy_samples(split: str, count: int, segments: tuple[int, int] = TOY_SEGMENTS) -> Iterator[Sample]:
    """The first `count` toy videos of a split, each of lo to hi segments (inclusive), drawn from its own seed."""
    if split not in TOY_SEEDS:
        raise BadData(f"unknown split {split!r}; choose one of {', '.join(TOY_SEEDS)}")
    seeds, (low, high) = TOY_SEEDS[split], segments
    if not 1 <= count <= len(seeds):
        raise BadData(f"toy {split}: give from 1 to {len(seeds)} videos, not {count}")
    if not 1 <= low <= high:
        raise BadData(f"toy {split}: segments must be (least, most), from 1 up, not {segments}")
    draw = lambda seed: int(np.random.default_rng((seed, 0)).integers(low, high + 1))
    return (toy_sample(seed, draw(seed)) for seed in seeds[:count])


def write_toy(seed: int, minutes: float, output: str | Path) -> Sample:
    """Writes OUTPUT.mp4 and, last, OUTPUT.json, each when complete; of about `minutes`, up to the end of a segment."""
    output = Path(output)
    if output.suffix.lower() != ".mp4":
        raise BadData(f"{output}: the name of the output must end in .mp4")
    if seed < 0 or not (isfinite(minutes) and minutes > 0):
        raise BadData(f"--seed must be 0 or more and --minutes more than 0, not {seed} and {minutes}")
    segments = ceil(60 * minutes / MEAN_SEGMENT)
    sample = toy_sample(seed, segments)
    segments = max(1, round(segments * 60 * minutes * sample.fps / sample.num_frames))     # segments vary: correct once
    sample = toy_sample(seed, segments)
    narrations = [{"time": time_of(frame, sample.fps), "text": text} | ({"memory": list(words)} if words else {})
                  for (frame, text), words in zip(sample.narrations, sample.memory)]
    content = {"video": output.name, "fps": sample.fps, "duration": sample.num_frames / sample.fps,
               "narrations": narrations}
    with replacing(output.with_suffix(".json")) as part:
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        bar = tqdm(sample.frames(), total=sample.num_frames, desc=output.name, unit="frame", leave=False, disable=None)
        write_video(output, bar, sample.fps)
    return sample


DATASETS = ("toy", "ego4d", "egoexo4d", "ek100")


def load_dataset(name: str, root: str | Path | None = None, split: str = "val",
                 limit: int | None = None) -> Iterator[Sample]:
    """The samples of a data set, one after the other.

    name    "toy": without a root it is rendered on the fly; with one, it is read from ROOT/SPLIT if there is such a
            folder, else from ROOT, in the order of the names of the .json files (each beside its .mp4)
    limit   at most so many; None: all in the root, or TOY_COUNT of the split
    Raises BadData for unknown or unsupported names and splits and for a root without samples.
    """
    if name not in DATASETS:
        raise BadData(f"unknown data set {name!r}; choose one of {', '.join(DATASETS)}")
    if name != "toy":
        raise BadData(f"{name} is not yet supported by this version; try --data toy")
    if split not in TOY_SEEDS:
        raise BadData(f"unknown split {split!r}; choose one of {', '.join(TOY_SEEDS)}")
    if limit is not None and limit < 1:
        raise BadData(f"the limit must be 1 video or more, not {limit}")
    if root is None:
        return toy_samples(split, limit or TOY_COUNT[split])
    folder = Path(root) / split if (Path(root) / split).is_dir() else Path(root)
    files = sorted(folder.glob("*.json"))[:limit]
    if not files:
        raise BadData(f"{folder}: {'has no .json files' if folder.is_dir() else 'no such folder'}; "
                      f"make some: python data.py toy --count 10 --output {root}")
    return map(read_sample, files)


def statistics(samples: Iterable[Sample]) -> dict:
    """App. B.4's columns: seconds, counts and words (mean over videos; durations and words over all narrations)."""
    lengths, counts, texts, recalled = [], [], [], 0
    for sample in samples:
        lengths.append(sample.num_frames / sample.fps)
        counts.append(len(sample.narrations))
        texts += [text for _, text in sample.narrations]
        recalled += sum(map(bool, sample.memory))
    told = max(1, len(texts))                                      # videos without narrations have no segments
    return {"videos": len(lengths), "length_mean": float(np.mean(lengths)), "length_std": float(np.std(lengths)),
            "segments_per_video": float(np.mean(counts)), "segment_duration": sum(lengths) / told,
            "words_per_narration": sum(len(text.split()) for text in texts) / told, "memory_share": recalled / told}


# -------------------------------------------------------------------------------------------- command line

def run(main: Callable[[], None], also: tuple[type[BaseException], ...] = ()) -> None:
    """Runs a command line and exits: 0 done, 1 bad input (one line on stderr), 130 Ctrl-C; argparse exits with 2.

    also: further exceptions that are the user's to put right. A closed pipe (`| head`) ends quietly, with a shell's 141.
    """
    try:
        main()
        sys.stdout.flush()
        code = 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())         # or Python's last flush complains
        code = 141
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except (BadData, OSError, *also) as error:
        named = isinstance(error, OSError) and error.filename is not None
        message = f"{error.filename}: {error.strerror}" if named else str(error) or type(error).__name__
        print("error:", " ".join(message.split()), file=sys.stderr)
        code = 1
    sys.exit(code)


def toy_command(options: argparse.Namespace) -> None:
    output = Path(options.output)
    if options.count == 1:
        sample = write_toy(options.seed, options.minutes, output)
        print(f"{output}, {output.with_suffix('.json')}: {sample.num_frames / sample.fps:g} s, "
              f"{len(sample.narrations)} narrations")
        return
    if options.count < 1 or output.suffix.lower() == ".mp4":
        raise BadData(f"--count must be 1 or more, and from 2 on --output is a folder, not {output} for {options.count}")
    output.mkdir(parents=True, exist_ok=True)
    for seed in tqdm(range(options.seed, options.seed + options.count), desc=str(output), unit="video"):
        video = output / f"toy-{seed:07d}.mp4"
        if not (video.exists() and video.with_suffix(".json").exists()):       # the .json comes last: finished
            write_toy(seed, options.minutes, video)
    print(f"{output}: {options.count} videos")


def stats_command(options: argparse.Namespace) -> None:
    samples = load_dataset(options.data, options.root, options.split, options.limit)
    stats = statistics(tqdm(samples, desc=options.data, unit="video", disable=None))
    print("videos  length [s]       segments  seg. dur. [s]  words / narration  memory narrations")
    print("{videos:6d}  {length_mean:7.1f} +- {length_std:5.1f} {segments_per_video:9.1f}  {segment_duration:13.2f}  "
          "{words_per_narration:17.1f}  {memory_share:17.1%}".format_map(stats))
    if options.json:
        print(json.dumps({"data": options.data, "split": options.split} | stats))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="data.py", description="Toy videos; statistics (paper App. B.4).")
    commands = parser.add_subparsers(dest="command", required=True)
    toy = commands.add_parser("toy", help="write toy videos with their ground truth")
    toy.add_argument("--seed", type=int, default=7, help="which video (default: %(default)s)")
    toy.add_argument("--minutes", type=float, default=3, help="about how long (default: %(default)s)")
    toy.add_argument("--output", required=True, help="FILE.mp4 (FILE.json comes beside it); a folder with --count")
    toy.add_argument("--count", type=int, default=1, help="videos of SEED, SEED + 1, ...; finished ones are kept")
    toy.set_defaults(command=toy_command)
    stats = commands.add_parser("stats", help="size, length and narrations of a data set")
    stats.add_argument("--data", required=True, help=" | ".join(DATASETS))
    stats.add_argument("--root", help="folder of the data set (toy: rendered on the fly without one)")
    stats.add_argument("--split", default="val", choices=list(TOY_SEEDS), help="default: %(default)s")
    stats.add_argument("--limit", type=int, help="at most so many videos")
    stats.add_argument("--json", action="store_true", help="one JSON object as the last line")
    stats.set_defaults(command=stats_command)
    options = parser.parse_args(arguments)
    options.command(options)


if __name__ == "__main__":
    run(main)
