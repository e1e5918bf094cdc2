"""Narrated videos: Ego4D, EgoExo4D, EPIC-Kitchens-100 and the toy world (paper §4.1, App. B.4).

    python data.py toy --seed 7 --minutes 3 --output kitchen.mp4
                                                    a toy video and its ground truth, kitchen.json
    python data.py stats --data NAME                a data set's row of Table 8 (App. B.4)
    python data.py encode VIDEO... --output ROOT/features
                                                    frame features of videos
    python data.py encode --data FOLDER --model MODEL
                                                    those of your own videos
                                                    (support/files/own_videos.py)
    python data.py rewrite --data NAME --llm ID     raw narrations as sentences, by a language model

Glossary
fps         frames a second that the narrator sees (2 in the paper), whatever the rate of the file
frame i     the picture on screen i / fps seconds after the first one; it stands for the time up to
            (i + 1) / fps
narration   (frame, text): the sentence written after its frame; for training, the first is at
            frame 0
segment     the frames after one narration up to the next: as many segments as narrations
memory_words
            words of a narration that only visual memory can give; () if there are none: only the
            toy has such words

support/ reads annotation files (annotations.py), videos (video.py) and features (features.py).
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from torch import Tensor

from support.common.devices import rank
from support.common.errors import BadData
from support.common.options import DATASETS, WHICH, dataset_folder, is_dataset
from support.files import annotations, own_videos
from support.files.features import Store, encode_pictures
from support.files.narrations import read_described
from support.files.tracks import Notes, assign_frames, frame_at
from support.files.video import Video
from toy import world


# ------------------------------------------------------ samples


@dataclass
class Sample:
    """A narrated video, or a part of one.

    `frames` and `tokens` decode or render the video while they are read, so it is never in memory
    as a whole.

    source      the pictures; None where there are features
    read        (start, stop) -> features of these frames [stop - start, J, D]; None where there are
                pictures
    tracks      (seconds, text) of the narrations of each annotator, in a sample for streaming from
                a published data set; None otherwise
    """
    name: str
    narrations: list[tuple[int, str]]       # (frame, text), frames strictly increasing
    memory_words: list[tuple[str, ...]]     # of each narration: the words that need visual memory
    fps: float
    num_frames: int
    duration: float                         # seconds of the whole video
    source: Callable[[], Iterator[np.ndarray]] | None
    read: Callable[[int, int], Tensor] | None = None
    tracks: list[list[tuple[float, str]]] | None = None
    # [s] of the video where a streamed sample starts, which is added to streamed times; as published,
    # the start of an annotated interval itself, not of its first frame
    offset: float = 0.0
    origin: float = 0.0                     # [s] of the video at the first segment's start

    def frames(self) -> Iterator[np.ndarray]:
        """num_frames pictures, uint8 [H, W, 3]."""
        return self.source()

    def tokens(self, vision: Callable[[Tensor], Tensor] | None = None,
               batch: int = 1) -> Iterator[Tensor]:
        """Frame tokens [J, D], frame by frame. `vision` encodes pictures, `batch` at a time."""
        if self.read is None:
            yield from encode_pictures(self.frames(), vision, batch)
            return
        # Features are read in blocks: one frame at a time is slow, the whole video does not fit.
        for start in range(0, self.num_frames, 256):
            stop = min(start + 256, self.num_frames)
            yield from self.read(start, stop)


def make_sample(name: str, narrations: Iterable[tuple[int, str, tuple]], fps: float,
                num_frames: int,
                source: Callable[[], Iterator[np.ndarray]] | None) -> Sample:
    """A Sample from (frame, text, memory words) in any order.

    Of two narrations on one frame, the later one replaces the earlier one.
    """
    text_of = {}
    memory_words_of = {}
    for frame, text, memory_words in narrations:
        text_of[frame] = text
        memory_words_of[frame] = memory_words
    frames = sorted(text_of)
    return Sample(
        name=name,
        narrations=[(frame, text_of[frame]) for frame in frames],
        memory_words=[memory_words_of[frame] for frame in frames],
        fps=fps,
        num_frames=num_frames,
        duration=num_frames / fps,
        source=source,
    )


def shorten(sample: Sample, max_frames: int | None) -> Sample:
    """At most `max_frames` frames of a sample; None: all of them.

    As published, a shortened sample ends with the last narration that fits.
    """
    if max_frames is None or sample.num_frames <= max_frames:
        return sample
    narrations = [(frame, text) for frame, text in sample.narrations if frame < max_frames]
    num_frames = max_frames
    if narrations:
        last_frame, _ = narrations[-1]
        num_frames = last_frame + 1

    def first_pictures() -> Iterator[np.ndarray]:
        return islice(sample.source(), num_frames)

    return replace(
        sample,
        narrations=narrations,
        memory_words=sample.memory_words[:len(narrations)],
        num_frames=num_frames,
        source=None if sample.source is None else first_pictures,
    )


def read_sample(path: str | Path) -> Sample:
    """The sample that a .json file beside a video describes (support/files/narrations.py)."""
    video, fps, duration, sentences = read_described(Path(path))
    num_frames = frame_at(duration, fps) + 1
    narrations = []
    for n, sentence in enumerate(sentences):
        frame = frame_at(sentence.time, fps)
        if frame >= num_frames:
            raise BadData(f"{path}: narrations[{n}]: {sentence.time} s is after the end "
                          f"({duration} s)")
        narrations.append((frame, sentence.text, sentence.memory_words))
    decode = partial(decode_pictures, video, fps, num_frames)
    return make_sample(Path(path).stem, narrations, fps, num_frames, decode)


def decode_pictures(path: Path, fps: float, num_frames: int) -> Iterator[np.ndarray]:
    """The pictures of a video, uint8 [H, W, 3]. BadData if there are fewer than `num_frames`."""
    video = Video(path, fps)
    count = 0
    for picture in islice(video, num_frames):
        count += 1
        yield picture
    video.report()
    if count < num_frames:
        raise BadData(f"{path}: has {count} frames, its .json promises {num_frames}; truncated? "
                      "get the video again")


# ------------------------------------------------------ the toy world


def toy_sample(kitchen: world.Kitchen) -> Sample:
    """A toy video, rendered as its frames are read."""
    narrations = [(narration.frame, narration.text, narration.memory_words)
                  for narration in kitchen.narrations]

    def render_pictures() -> Iterator[np.ndarray]:
        return map(kitchen.render, range(len(kitchen)))

    return make_sample(f"toy-{kitchen.seed}", narrations, world.FPS, len(kitchen), render_pictures)


# ------------------------------------------------------ any data set


def load_dataset(name: str, root: str | Path | None = None, split: str = "val",
                 limit: int | None = None, streaming: bool = False, max_frames: int | None = None,
                 shape: tuple = (None, None), variant: str = "plain") -> Iterator[Sample]:
    """The samples of a data set, one after the other.

    name        "toy": without a root, its videos are rendered on the fly; with a root, they are
                read from ROOT/SPLIT if this folder exists, else from ROOT, in the order of the
                names of the .json files (each beside its .mp4).
                "ego4d", "egoexo4d", "ek100": one sample per annotator and video, from the first
                narration to the last; root is data/NAME by default.
                A folder: your own videos (support/files/own_videos.py), without a root
    limit       the largest number of samples; None: all in the root, or world.VIDEOS of the split
    streaming   for the self-conditioned protocol: each video once, with the tracks of all its
                annotators
    max_frames  a sample ends with the last narration that fits into so many frames; streamed
                samples are never shortened
    shape       (J, D) of the features; BadData if they have another shape
    variant     name of the world (toy/world.py: WORLDS) of the toy's rendered videos
    Raises BadData for unknown names and splits, for a root without samples, and for damaged files.
    """
    if not is_dataset(name):
        raise BadData(f"unknown data set {name!r}; {WHICH}")
    for value in (limit, max_frames):
        if value is not None and value < 1:
            raise BadData(f"the limit of videos or frames must be 1 or more, not {value}")
    if variant != "plain" and (name != "toy" or root):
        raise BadData(f"--world {variant} is for the toy's rendered videos, without --root")
    if streaming:
        max_frames = None
    if name != "toy":
        folder = dataset_folder(name, root)
        return annotated(name, folder, split, limit, streaming, max_frames, shape)
    if split not in world.SEEDS:
        raise BadData(f"unknown split {split!r}; choose one of {', '.join(world.SEEDS)}")
    if root is None:
        videos = world.kitchens(split, limit, world=world.find_world(variant))
        return (shorten(toy_sample(kitchen), max_frames) for _, kitchen in videos)
    folder = Path(root) / split
    if not folder.is_dir():
        folder = Path(root)
    files = sorted(folder.glob("*.json"))[:limit]
    if not files:
        problem = "has no .json files" if folder.is_dir() else "no such folder"
        raise BadData(f"{folder}: {problem}; "
                      f"make some: python data.py toy --count 10 --output {root}")
    return (shorten(read_sample(file), max_frames) for file in files)


def annotated(name: str, root: Path, split: str, limit: int | None, streaming: bool,
              max_frames: int | None, shape: tuple) -> Iterator[Sample]:
    """The samples of Ego4D, EgoExo4D, EK100 or a folder: annotations joined with features.

    A line on stderr reports how many samples there are, and what was corrected in the annotations.
    """
    notes = Notes()
    if name not in DATASETS:
        videos = own_videos.read_folder(root, split, limit, notes)
        samples = [own_sample(video, shape) for video in videos]
    else:
        read = annotations.intervals if streaming else annotations.tracks
        entries = read(name, root, split, notes)[:limit]
        take_names = None
        if name == "egoexo4d":          # annotations use a take's id, features can use its name
            take_names = annotations.take_names(root)
        store = Store(root, take_names)
        if streaming:
            samples = [interval_sample(interval, store, shape) for interval in entries]
        else:
            samples = [track_sample(track, store, shape, notes) for track in entries]
    before = sum(len(sample.narrations) for sample in samples)
    samples = [shorten(sample, max_frames) for sample in samples]
    after = sum(len(sample.narrations) for sample in samples)
    notes.add("narrations cut off by the limit of frames", before - after)
    if not samples:
        raise BadData(f"{root}: the {split} split of {name} has no narrations")
    process, _ = rank()
    if process == 0:
        separator = "; " if str(notes) else ""
        print(f"{name} {split}: {len(samples)} samples{separator}{notes}", file=sys.stderr)
    return iter(samples)


def entry_of(store: Store, video: str) -> dict:
    """The store's entry of a video. BadData if its features have another rate than is needed."""
    entry = store.entry(video)
    fps = entry.get("fps", world.FPS)
    if fps != world.FPS:
        raise BadData(f"{store.root}: video {video} was encoded with {fps:g} frames a second, and "
                      f"{world.FPS} are needed; encode it again with --fps {world.FPS}")
    return entry


def track_sample(track: annotations.Track, store: Store, shape: tuple, notes: Notes) -> Sample:
    """One annotator's narrations of one video, from the first narration to the last."""
    entry = entry_of(store, track.video)
    duration = entry["duration"]
    # As published: on the first frame that is not shown before the narration. That is one frame
    # later than `frame_at` would have it, for each narration after 0 s.
    on_frames = assign_frames(track.narrations, duration, world.FPS, notes, entry.get("frames"))
    first, _ = on_frames[0]
    last, _ = on_frames[-1]

    def read(start: int, stop: int) -> Tensor:
        return store.read(track.video, first + start, first + stop, *shape)

    return Sample(
        name=f"{track.video}/{track.annotator}",
        narrations=[(frame - first, text) for frame, text in on_frames],
        memory_words=[()] * len(on_frames),
        fps=world.FPS,
        num_frames=last - first + 1,
        duration=duration,
        source=None,
        read=read,
    )


def interval_sample(interval: annotations.Interval, store: Store, shape: tuple) -> Sample:
    """An interval of a video, with the tracks of all annotators.

    The times of its narrations count from the start of the video.
    """
    video = interval.video
    # As published, the first frame is rounded down (for training, up); the last one is included.
    first = int(interval.start * world.FPS)
    stop = int(interval.end * world.FPS) + 1
    # the features can be shorter than the annotated interval
    num_frames = min(stop, store.rows(video)) - first
    if num_frames < 1:
        file = store.locate(video)[0]
        raise BadData(f"{file}, video {video}: ends before its narrations begin "
                      f"({interval.start} s)")

    def read(start: int, stop: int) -> Tensor:
        return store.read(video, first + start, first + stop, *shape)

    return Sample(
        name=f"{video}_{first}_{stop}",
        narrations=[],
        memory_words=[],
        fps=world.FPS,
        num_frames=num_frames,
        duration=entry_of(store, video)["duration"],
        source=None,
        read=read,
        tracks=[track.narrations for track in interval.tracks],
        offset=interval.start,
        origin=interval.origin,
    )


def own_sample(video: own_videos.Narrated, shape: tuple) -> Sample:
    """A video of a folder, from its first narration to its end, for training and for streaming."""
    first = video.first
    narrations = [(frame - first, sentence.text, sentence.memory_words)
                  for frame, sentence in video.narrations]
    sample = make_sample(video.name, narrations, video.fps, video.frames - first, None)

    def read(start: int, stop: int) -> Tensor:
        return video.store.read(video.name, first + start, first + stop, *shape)

    start_of_sample = first / video.fps                             # seconds
    return replace(
        sample,
        duration=video.frames / video.fps,
        offset=start_of_sample,
        origin=start_of_sample,
        read=read,
    )


# ------------------------------------------------------ statistics

# Table 8 (App. B.4): videos for training, videos for validation, then the columns of `statistics`:
# mean length and its standard deviation [s], segments a video, segment duration [s], and the length
# of a narration in tokens of Llama.
PAPER = {
    "ego4d": (102986, 17059, 237.7, 92.0, 53, 4.5, 12),
    "egoexo4d": (3219, 826, 151.4, 232.7, 58, 2.6, 17),
    "ek100": (495, 138, 493.9, 621.3, 112, 4.4, 10),
}


def number_of_words(text: str) -> int:
    return len(text.split())


def statistics(samples: Iterable[Sample], words_in: Callable[[str], int] = number_of_words) -> dict:
    """The columns of Table 8, and the `spread` of segments (support/files/own_videos.py).

    Lengths and numbers of segments are means over videos; durations of segments and words are means
    over all narrations. words_in: text -> its number of words, or of tokens.
    """
    lengths = []                        # seconds of each video
    narrations_per_video = []
    words = []                          # of each narration
    with_memory_words = 0               # narrations that need visual memory
    segment_seconds = []
    for sample in samples:
        lengths.append(sample.num_frames / sample.fps)
        narrations_per_video.append(len(sample.narrations))
        words += [words_in(text) for _, text in sample.narrations]
        with_memory_words += sum(1 for memory_words in sample.memory_words if memory_words)
        frames = [frame for frame, _ in sample.narrations]
        segment_seconds += (np.diff(frames) / sample.fps).tolist()
    narrations = max(1, len(words))     # no division by zero where no video has a narration
    columns = {
        "videos": len(lengths),
        "length_mean": float(np.mean(lengths)),
        "length_std": float(np.std(lengths)),
        "segments_per_video": float(np.mean(narrations_per_video)),
        "segment_duration": sum(lengths) / narrations,
        "words_per_narration": sum(words) / narrations,
        "memory_share": with_memory_words / narrations,
    }
    return columns | own_videos.spread(segment_seconds)


if __name__ == "__main__":
    from commands.data import main
    main()
