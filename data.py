"""Narrated videos: Ego4D, EgoExo4D, EPIC-Kitchens-100 and your own (paper §4.1, App. B.4).

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
sentence    text at a time [s] of the video
narration   (frame, text): a sentence on the frame after which it is written, counted from the first
            frame of its sample; for training, the first is at frame 0
segment     the frames after one narration up to the next: as many segments as narrations

support/files reads annotation files (annotations.py), videos (video.py) and features (features.py).
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
from torch import Tensor

from support.common.errors import BadData
from support.common.garbage import without_collection
from support.common.options import DATASETS, dataset_folder
from support.common.progress import say_as_one
from support.common.text import counted
from support.files import annotations, own_videos
from support.files.annotations import FPS
from support.files.features import Features, Store, check_fit, encode_pictures
from support.files.sentences import BEYOND, NarratedVideo, Notes, assign_frames, at_frames, frame_at


# ------------------------------------------------------ samples


@dataclass
class Sample(NarratedVideo):
    """A narrated video, or a part of one, with its frames.

    It has pictures or features. Both are read from the disk while they are used, so a video is
    never in memory as a whole.
    """
    fps: float = FPS
    num_frames: int = 0
    duration: float = 0.0                   # seconds of the whole video
    # () -> pictures, uint8 [H, W, 3]; None where there are features
    source: Callable[[], Iterator[np.ndarray]] | None = None
    features: Features | None = None        # None where there are pictures

    def __post_init__(self):
        self.seconds = self.num_frames / self.fps

    @property
    def narrations(self) -> list[tuple[int, str]]:
        """(frame, text) of the sentences of the first annotator."""
        sentences = self.annotators[0] if self.annotators else []
        return [(frame_at(sentence.time - self.start, self.fps), sentence.text)
                for sentence in sentences]

    def frames(self) -> Iterator[np.ndarray]:
        """num_frames pictures, uint8 [H, W, 3]."""
        return islice(self.source(), self.num_frames)

    def read(self, start: int, stop: int) -> Tensor:
        """The features of some of its frames, [stop - start, J, D]."""
        return self.features.read(self.first + start, self.first + stop)

    def tokens(self, vision: Callable[[Tensor], Tensor] | None = None,
               batch: int = 1) -> Iterator[Tensor]:
        """Frame tokens [J, D], frame by frame. `vision` encodes pictures, `batch` at a time."""
        if self.features is None:
            yield from encode_pictures(self.frames(), vision, batch)
            return
        # Features are read in blocks: one frame at a time is slow, the whole video does not fit.
        for start in range(0, self.num_frames, 256):
            stop = min(start + 256, self.num_frames)
            yield from self.read(start, stop)


def load_dataset(
    name: str,
    root: str | Path | None = None,
    split: str = "val",
    limit: int | None = None,
    streaming: bool = False,
) -> list[Sample]:
    """The samples of a data set.

    name        "ego4d", "egoexo4d", "ek100", or a folder of your own videos
    root        folder of the data set; default data/NAME
    limit       the largest number of samples; None: all
    streaming   for the self-conditioned protocol: each video once, with the sentences of all its
                annotators; otherwise, one sample per annotator and video, from the first sentence
                to the last

    Raises BadData for unknown names and splits, for a root without samples, and for damaged files.
    """
    folder = dataset_folder(name, root)
    notes = Notes()
    if name not in DATASETS:
        videos = own_videos.read_folder(folder, split, limit, notes)
        samples = [own_sample(video, features) for video, features in videos]
    else:
        with without_collection():
            samples = samples_of_data_set(name, folder, split, limit, streaming, notes)
    if not samples:
        raise BadData(notes.after(f"{folder}: the {split} split of {name} has no narrations"))
    left = sum(len(sentences) for sample in samples for sentences in sample.annotators)
    if notes.counts[BEYOND] >= left:
        raise BadData(f"{folder}: {notes.counts[BEYOND]} narrations are beyond the ends of their "
                      f"videos, {left} within; are they of other videos, or in milliseconds?")
    say_as_one(notes.after(f"{name} {split}: {counted(len(samples), 'sample')}"))
    return samples


def shorten(samples: list[Sample], max_frames: int) -> list[Sample]:
    """At most `max_frames` frames of each sample. How many are longer is told.

    As in the authors' code, a shortened sample ends with the last narration that fits.
    """
    longer = 0
    shortened = []
    for sample in samples:
        if sample.num_frames > max_frames:
            longer += 1
            frames = [frame for frame, _ in sample.narrations if frame < max_frames]
            num_frames = frames[-1] + 1 if frames else max_frames
            sentences = sample.annotators[0][:len(frames)]
            sample = replace(sample, annotators=[sentences], num_frames=num_frames)
        shortened.append(sample)
    if longer:
        say_as_one(f"{longer} of {len(samples)} samples have more than {max_frames} frames; they are used "
                   f"up to their last narration within these (--max-frames)")
    return shortened


def check_sample(sample: Sample, config) -> None:
    """Raise BadData if the frames are not what a narrator with these settings (narrator.py: Config)
    needs. Features are looked at, pictures are encoded by its own vision model.
    """
    shape = sample.features.shape if sample.features else None
    check_fit(sample.name, sample.fps, shape, config)


def header_of_all(samples: list[Sample]) -> dict[str, str]:
    """What the features of the samples say of the vision model that made them; {} if no file says
    anything. How many say nothing is told.

    Raises BadData if there are several. The same model may lie in several folders.
    """
    encoders = {}                           # a vision model: what a file says, and a sample
    headers = [(sample.features.header, sample.name) for sample in samples if sample.features]
    for header, name in headers:
        if header:
            model = header.get("vision_mark") or Path(header["vision"]).name
            encoders.setdefault(model, (header, name))
    if len(encoders) > 1:
        made = ", ".join(f"of {name} by {header['vision']}, {model}"
                         for model, (header, name) in encoders.items())
        raise BadData(f"the features are of several vision models ({made}); encode with one")
    silent = sum("vision_mark" not in header for header, _ in headers)
    if silent:
        say_as_one(f"{silent} of {len(headers)} samples have features that do not say which vision "
                   f"model made them; that it is one and the narrator's is not compared")
    for header, _ in encoders.values():
        return header
    return {}


# ------------------------------------------------------ Ego4D, EgoExo4D, EPIC-Kitchens-100


def samples_of_data_set(
    name: str,
    root: Path,
    split: str,
    limit: int | None,
    streaming: bool,
    notes: Notes,
) -> list[Sample]:
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
            samples.append(interval_sample(part, features, notes))
        else:
            samples.append(track_sample(part, features, notes))
    if narrated and not samples:
        raise no_features(root, narrated[0].video)
    return samples


def no_features(root: Path, video: str) -> BadData:
    own = root / "features"
    return BadData(f"{root}: video {video} has no features. They are read where "
                   f"features_metadata.json has them, in {root}, {own} or a folder of it (both are "
                   f"in FlowNar-Data); or make them: python data.py encode VIDEO... --output {own}")


def track_sample(track: NarratedVideo, features: Features, notes: Notes) -> Sample:
    """One annotator's narrations of one video, from the first narration to the last."""
    # As in the authors' code: on the first frame that is not shown before the narration. That is
    # one frame later than `frame_at` (support/files/sentences.py) would have it, for each narration
    # after 0 s.
    sentences, = track.annotators
    placed = assign_frames(sentences, features.duration, FPS, notes, features.shape[0])
    first, _ = placed[0]
    last, _ = placed[-1]
    return Sample(
        [at_frames(placed, FPS)],
        name=track.name,
        start=first / FPS,
        num_frames=last - first + 1,
        duration=features.duration,
        features=features,
        first=first,
    )


def interval_sample(interval: NarratedVideo, features: Features, notes: Notes) -> Sample:
    """An interval of a video, with the sentences of all annotators at their own times."""
    # the features can be shorter than the annotated interval
    num_frames = min(interval.stop, features.shape[0]) - interval.first
    if num_frames < 1:
        raise BadData(f"{features.path}, video {interval.video}: ends before its narrations begin "
                      f"({interval.start} s)")
    end = (interval.first + num_frames) / FPS
    times = [sentence.time for sentences in interval.annotators for sentence in sentences]
    notes.add("narrations beyond the end of their features, which cannot be found",
              sum(time > end for time in times))
    notes.add("narrations before their interval, which cannot be found",
              sum(time < interval.start for time in times))
    return Sample(
        interval.annotators,
        interval.origin,
        name=interval.name,
        # the start of the interval itself, not of its first frame: added to streamed times
        start=interval.start,
        end=interval.end,
        num_frames=num_frames,
        duration=features.duration,
        features=features,
        first=interval.first,
    )


def own_sample(video: NarratedVideo, features: Features) -> Sample:
    """A video of a folder, from its first narration to its end, for training and for streaming."""
    sentences, = video.annotators
    first = frame_at(sentences[0].time, features.fps)
    start = first / features.fps                                    # seconds
    return Sample(
        [sentences],
        start,
        name=video.name,
        start=start,
        fps=features.fps,
        num_frames=features.frames - first,
        duration=features.duration,
        features=features,
        first=first,
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
    """The columns of Table 8.

    Lengths and numbers of segments are means over videos; durations of segments and words are means
    over all narrations. words_in: text -> its number of words, or of tokens.
    """
    lengths = []                        # seconds of each video
    narrations_per_video = []
    words = []                          # of each narration
    for sample in samples:
        lengths.append(sample.num_frames / sample.fps)
        narrations_per_video.append(len(sample.narrations))
        words += [words_in(text) for _, text in sample.narrations]
    narrations = max(1, len(words))     # no division by zero where no video has a narration
    return {
        "videos": len(lengths),
        "length_mean": float(np.mean(lengths)),
        "length_std": float(np.std(lengths)),
        "segments_per_video": float(np.mean(narrations_per_video)),
        "segment_duration": sum(lengths) / narrations,
        "words_per_narration": sum(words) / narrations,
    }


if __name__ == "__main__":
    from beyond.commands.data_command import main
    main()
