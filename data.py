"""Narrated videos: Ego4D, EgoExo4D, EPIC-Kitchens-100 and the toy world (paper §4.1, App. B.4).

    python data.py toy --seed 7 --minutes 3 --output kitchen.mp4
                                                    a toy video and its ground truth, kitchen.json
    python data.py stats --data NAME                a data set's row of Table 8 (App. B.4)
    python data.py encode VIDEO... --output ROOT/features
                                                    frame features of videos
    python data.py encode --data FOLDER --model MODEL
                                                    those of your own videos
                                                    (support/files/own_videos.py)

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

support/files reads annotation files (annotations.py), videos (video.py) and features (features.py).
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
from support.common.options import DATASETS, dataset_folder
from support.files import annotations, own_videos
from support.files.features import Features, Store, encode_pictures
from support.files.tracks import Interval, Notes, Track, assign_frames
from toy.files import ToyVideo, toy_videos

FPS = 2                 # frames a second of the three data sets (§4.1)


# ------------------------------------------------------ samples


@dataclass
class Sample:
    """A narrated video, or a part of one.

    It has pictures or features. Both are read from the disk while they are used, so a video is
    never in memory as a whole.
    """
    name: str
    narrations: list[tuple[int, str]]       # (frame, text), frames strictly increasing
    memory_words: list[tuple[str, ...]]     # of each narration: the words that need visual memory
    fps: float
    num_frames: int
    duration: float                         # seconds of the whole video
    # () -> pictures, uint8 [H, W, 3]; None where there are features
    source: Callable[[], Iterator[np.ndarray]] | None = None
    # (start, stop) -> features of these frames [stop - start, J, D]; None where there are pictures
    read: Callable[[int, int], Tensor] | None = None
    # for streaming from a published data set: (seconds, text) of the narrations of each annotator
    tracks: list[list[tuple[float, str]]] | None = None
    # [s] of the video where a streamed sample starts, which is added to streamed times; as
    # published, the start of an annotated interval itself, not of its first frame
    offset: float = 0.0
    origin: float = 0.0                     # [s] of the video at the first segment's start

    def frames(self) -> Iterator[np.ndarray]:
        """num_frames pictures, uint8 [H, W, 3]."""
        return islice(self.source(), self.num_frames)

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


def load_dataset(name: str, root: str | Path | None = None, split: str = "val",
                 limit: int | None = None, streaming: bool = False,
                 variant: str = "plain") -> Iterator[Sample]:
    """The samples of a data set, one after the other.

    name        "ego4d", "egoexo4d", "ek100", "toy", or a folder of your own videos
    root        folder of the data set; default data/NAME, and the toy is rendered
    limit       the largest number of samples; None: all, or world.VIDEOS of a rendered toy
    streaming   for the self-conditioned protocol: each video once, with the tracks of all its
                annotators; otherwise, one sample per annotator and video, from the first narration
                to the last
    variant     name of the world (toy/world.py: WORLDS) of the toy's rendered videos

    Raises BadData for unknown names and splits, for a root without samples, and for damaged files.
    """
    if variant != "plain" and (name != "toy" or root):
        raise BadData(f"--world {variant} is for the toy's rendered videos, without --root")
    if name == "toy":
        return map(toy_sample, toy_videos(root, split, limit, variant))

    folder = dataset_folder(name, root)
    notes = Notes()
    if name not in DATASETS:
        videos = own_videos.read_folder(folder, split, limit, notes)
        samples = [own_sample(video) for video in videos]
    else:
        samples = published_samples(name, folder, split, limit, streaming, notes)
    if not samples:
        raise BadData(f"{folder}: the {split} split of {name} has no narrations")
    process, _ = rank()
    if process == 0:
        print(notes.after(f"{name} {split}: {len(samples)} samples"), file=sys.stderr)
    return iter(samples)


def shorten(sample: Sample, max_frames: int) -> Sample:
    """At most `max_frames` frames of a sample.

    As published, a shortened sample ends with the last narration that fits.
    """
    if sample.num_frames <= max_frames:
        return sample
    narrations = [(frame, text) for frame, text in sample.narrations if frame < max_frames]
    num_frames = max_frames
    if narrations:
        last_frame, _ = narrations[-1]
        num_frames = last_frame + 1

    memory_words = sample.memory_words[:len(narrations)]
    return replace(sample, narrations=narrations, memory_words=memory_words, num_frames=num_frames)


def check_sample(sample: Sample, config) -> None:
    """Raise BadData if the frames are not what a narrator with these settings (narrator.py: Config)
    needs. Features are looked at, pictures are encoded by its own vision model.
    """
    if sample.fps != config.fps:
        raise BadData(f"{sample.name}: has {sample.fps:g} frames a second, "
                      f"the narrator needs {config.fps:g}")
    if sample.read is not None:
        _, J, width = sample.read(0, 1).shape
        if (J, width) != (config.J, config.width):
            raise BadData(f"{sample.name}: its features are {width} wide with {J} tokens a frame, "
                          f"the narrator needs {config.width} and {config.J}; "
                          f"use its vision model, {config.vision}")


# ------------------------------------------------------ Ego4D, EgoExo4D, EPIC-Kitchens-100


def published_samples(name: str, root: Path, split: str, limit: int | None, streaming: bool,
                      notes: Notes) -> list[Sample]:
    """Annotations joined with features.

    Training takes what has features, and counts what has none. Evaluation needs the features of
    all videos, because its figures are of all.
    """
    take_names = {}
    if name == "egoexo4d":              # annotations use a take's id, features can use its name
        take_names = annotations.take_names(root)
    store = Store(root, take_names)
    if streaming:
        narrated = annotations.intervals(name, root, split, notes)
    else:
        narrated = annotations.tracks(name, root, split, notes)
    samples = []
    for part in narrated:
        if len(samples) == limit:
            break
        features = store.find(part.video)
        if features is None and split == "train":
            notes.add("annotators of videos without features left out")
            continue
        if features is None:
            raise no_features(root, part.video)
        if features.fps not in (None, FPS):
            raise BadData(f"{features.path}: was encoded with {features.fps:g} frames a second, "
                          f"and {FPS:g} are needed; encode it again with --fps {FPS:g}")
        if streaming:
            samples.append(interval_sample(part, features))
        else:
            samples.append(track_sample(part, features, notes))
    if narrated and not samples:
        raise no_features(root, narrated[0].video)
    return samples


def no_features(root: Path, video: str) -> BadData:
    return BadData(f"{root}: video {video} has no features; get them and their "
                   f"features_metadata.json (FlowNar-Data), or make them: python data.py encode "
                   f"VIDEO... --output {root / 'features'}")


def track_sample(track: Track, features: Features, notes: Notes) -> Sample:
    """One annotator's narrations of one video, from the first narration to the last."""
    # As published: on the first frame that is not shown before the narration. That is one frame
    # later than `frame_at` (support/files/tracks.py) would have it, for each narration after 0 s.
    on_frames = assign_frames(track.narrations, features.duration, FPS, notes, features.frames)
    first, _ = on_frames[0]
    last, _ = on_frames[-1]
    return Sample(
        name=f"{track.video}/{track.annotator}",
        narrations=[(frame - first, text) for frame, text in on_frames],
        memory_words=[()] * len(on_frames),
        fps=FPS,
        num_frames=last - first + 1,
        duration=features.duration,
        read=partial(features.read, first=first),
    )


def interval_sample(interval: Interval, features: Features) -> Sample:
    """An interval of a video, with the tracks of all annotators.

    The times of its narrations count from the start of the video.
    """
    video = interval.video
    # As published, the first frame is rounded down (for training, up); the last one is included.
    first = int(interval.start * FPS)
    stop = int(interval.end * FPS) + 1
    # the features can be shorter than the annotated interval
    num_frames = min(stop, features.rows()) - first
    if num_frames < 1:
        raise BadData(f"{features.path}, video {video}: ends before its narrations begin "
                      f"({interval.start} s)")
    return Sample(
        name=f"{video}_{first}_{stop}",
        narrations=[],
        memory_words=[],
        fps=FPS,
        num_frames=num_frames,
        duration=features.duration,
        read=partial(features.read, first=first),
        tracks=[track.narrations for track in interval.tracks],
        offset=interval.start,
        origin=interval.origin,
    )


# ------------------------------------------------------ your own videos, and the toy's


def own_sample(video: own_videos.Narrated) -> Sample:
    """A video of a folder, from its first narration to its end, for training and for streaming."""
    features = video.features
    first, _ = video.narrations[0]
    start_of_sample = first / features.fps                          # seconds
    return Sample(
        name=video.name,
        narrations=[(frame - first, sentence.text) for frame, sentence in video.narrations],
        memory_words=[sentence.memory_words for _, sentence in video.narrations],
        fps=features.fps,
        num_frames=features.frames - first,
        duration=features.duration,
        read=partial(features.read, first=first),
        offset=start_of_sample,
        origin=start_of_sample,
    )


def toy_sample(video: ToyVideo) -> Sample:
    """A video of the toy, for training and for streaming."""
    return Sample(
        name=video.name,
        narrations=[(frame, text) for frame, text, _ in video.narrations],
        memory_words=[memory_words for _, _, memory_words in video.narrations],
        fps=video.fps,
        num_frames=video.num_frames,
        duration=video.num_frames / video.fps,
        source=video.pictures,
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


REFRACTORY = 4.0        # seconds in which the threshold is theta_low


def number_of_words(text: str) -> int:
    return len(text.split())


def statistics(samples: Iterable[Sample], words_in: Callable[[str], int] = number_of_words) -> dict:
    """The columns of Table 8, and what helps to choose --max-segment and --refractory.

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
    if segment_seconds:
        columns["longest_segment"] = max(segment_seconds)
        is_short = np.array(segment_seconds) <= REFRACTORY
        columns["segments_within_4_s"] = float(np.mean(is_short))
    return columns


if __name__ == "__main__":
    from commands.data import main
    main()
