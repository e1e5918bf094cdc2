"""A folder of your own videos as a data set (`--data FOLDER`): each has its narrations beside it, under the same name.

    a.mp4  a.srt             or a.vtt, a.csv (cues.py), a.json: {"narrations": [{"time": seconds, "text": "..."}, ...]},
                             as `data.py toy` writes it
    features/                what `data.py encode --data FOLDER` makes of the videos, once; videos may go then
    train.txt val.txt        names of videos, one a line; without these files, a fifth of the videos is for validation
    test.txt                 likewise; only if there is to be one

A narration stands at its time, or at the end of its cue; a sample is a video from its first narration to its end.
What is put right is counted in Notes (annotations.py); what cannot be is refused by name.
"""
from __future__ import annotations

import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

from support.common.devices import rank
from support.common.disk import read_json, read_text
from support.common.errors import BadData
from support.engine.checkpoint import (
    ADAPTER, NARRATOR_JSON, checkpoint_folder, read_object, required,
)
from support.files.cues import as_sentence, read_cues
from support.files.features import Store, read_header
from support.files.narrations import Sentence, to_sentences
from support.files.tracks import Notes, frame_at, one_frame_each

VIDEOS = (".mp4", ".mkv", ".mov", ".avi", ".webm", ".m4v", ".mpg", ".mpeg", ".ts", ".mts", ".wmv", ".flv", ".ogv",
          ".3gp")
NARRATIONS = (".json", ".srt", ".vtt", ".csv")
SPLITS = ("train", "val", "test")
SHARE = 0.2                                    # of the videos, for validation
# Options of train.py whose defaults differ: the paper's batches of 64 would leave few videos with a handful of steps
DEFAULTS = {"batch": 4, "epochs": 10.0}


@dataclass
class Narrated:
    """A video with its narrations; the first is at frame `first`, where the sample begins."""
    name: str
    fps: float
    frames: int                                # of the whole video
    narrations: list[tuple[int, Sentence]]     # frames strictly increasing
    store: Store                               # of its features

    @property
    def first(self) -> int:
        return self.narrations[0][0]


# ----------------------------------------------------------------------------------------- files

def list_videos(folder: Path, notes: Notes) -> dict[str, tuple[Path, Path | None]]:
    """{name: (file of narrations, video)}, sorted; no video where it is gone, but its features are there."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    videos = by_stem(files, VIDEOS)
    belong = [file for file in files if file.stem in videos or feature_file(folder, file.stem).exists()]
    narrations = by_stem(belong, NARRATIONS)
    if not narrations:
        raise BadData(f"{folder}: has no video with narrations beside it, such as a.mp4 and a.srt, .vtt, .csv or .json")
    notes.add("videos without narrations left out", len(videos.keys() - narrations.keys()))
    return {name: (file, videos.get(name)) for name, file in sorted(narrations.items())}


def by_stem(files: list[Path], endings: tuple[str, ...]) -> dict[str, Path]:
    """{name without ending: file}; BadData if two files have one name."""
    found: dict[str, Path] = {}
    for file in files:
        if file.suffix.lower() in endings and found.setdefault(file.stem, file) is not file:
            raise BadData(f"{file}: {found[file.stem].name} has the same name; keep one of them, or rename one")
    return found


def choose_split(folder: Path, names: list[str], split: str, notes: Notes) -> list[str]:
    """The names of a split; "all" is every video.

    With files: videos that none of them names are for training; if there is a train.txt, for validation; if there is a
    val.txt, too, for nothing. Without: by a hash of the name, so that new videos do not move the others; if there are
    two, one is for each.
    """
    if split not in (*SPLITS, "all"):
        raise BadData(f"unknown split {split!r}; choose one of {', '.join(SPLITS)}, all")
    where = {}
    files = {one: folder / f"{one}.txt" for one in SPLITS if (folder / f"{one}.txt").is_file()}
    for one, file in files.items():
        for n, line in enumerate(read_text(file).splitlines(), 1):
            name = line.strip() if line.strip() in names else Path(line.strip()).stem
            if line.strip() and name not in names:
                raise BadData(f"{file}, line {n}: {folder} has no video {line.strip()[:60]!r} with narrations")
            if line.strip() and where.setdefault(name, one) != one:
                raise BadData(f"{file}, line {n}: {name} is in {where[name]}.txt, too; a video is of one split")
    others = next((one for one in SPLITS[:2] if one not in files), None)
    if not files:
        place = {name: int(sha256(name.encode()).hexdigest()[:8], 16) / 2 ** 32 for name in names}
        low, *_, high = sorted([*names, names[0]], key=place.get)
        where = {name: "val" for name in names if (name == low or place[name] < SHARE) and name != high}
    notes.add("videos of no split left out", 0 if others else len(names) - len(where))
    chosen = [name for name in names if split in ("all", where.get(name, others))]
    if not chosen:
        raise BadData(f"{folder}: none of its {len(names)} videos is for {split}; write their names into "
                      f"{folder / f'{split}.txt'}" + (" (train.py --val-limit 0 needs none)" if split == "val" else ""))
    return chosen


def read_sentences(path: Path, notes: Notes) -> list[Sentence]:
    """The narrations of a file, sorted, each a sentence. Raises BadData naming the entry or the line that is wrong."""
    if path.suffix.lower() == ".json":
        content = read_json(path)
        rows = to_sentences(content.get("narrations") if isinstance(content, dict) else content, str(path))
        if negative := [n for n, y in enumerate(rows) if y.time < 0]:
            raise BadData(f"{path}, narration {negative[0]}: the time is before the start of the video")
        cleaned = [Sentence(y.time, as_sentence(y.text, notes), y.memory_words) for y in rows]
        found = sorted((y for y in cleaned if y.text), key=lambda y: y.time)
    else:
        found = [Sentence(time, text) for time, text in read_cues(path, notes)]
    if not found:
        raise BadData(f"{path}: has no narrations; write some, or move its video away")
    return found


# ----------------------------------------------------------------------------------------- features

def feature_file(folder: Path, name: str) -> Path:
    """The features of a video."""
    return folder / "features" / f"{name}.safetensors"


def to_encode(folder: Path) -> tuple[list[str], Path]:
    """The videos of a folder and where their features go, after its narrations and its splits have been checked."""
    if not folder.is_dir():
        raise BadData(f"{folder}: no such folder; --data is a folder of videos with narrations beside them")
    found = list_videos(folder, Notes())
    for file, _ in found.values():
        read_sentences(file, Notes())
    choose_split(folder, list(found), "all", Notes())
    return [str(video) for _, video in found.values() if video], folder / "features"


def file_signature(video: str | Path) -> dict[str, str]:
    """What tells that a video has changed, for the header of its features; {} if it is not there."""
    path = Path(video)
    return {"size": str(path.stat().st_size), "mtime": str(path.stat().st_mtime_ns)} if path.is_file() else {}


def up_to_date(features: Path, settings: dict[str, str]) -> bool:
    """Are the features there, made with these settings (and file_signature)?"""
    return features.exists() and settings.items() <= read_header(features)[1].items()


ENCODER_KEYS = "vision", "fps", "grid"


def encoder_settings(model: str | None, **given) -> dict:
    """What is `given` of vision, fps and grid, and what the narrator.json of a model says of the rest (published ones
    have none): fields of narrator.py's Config, without loading a language model."""
    given = {name: value for name, value in given.items() if value is not None}
    if not model:
        return given
    folder = checkpoint_folder(model)
    required(folder / ADAPTER)
    settings = read_object(folder / NARRATOR_JSON) if (folder / NARRATOR_JSON).exists() else {}
    if settings.get("width_second"):
        raise BadData(f"{model}: has two encoders (LION-FS), and features of a folder are of one; choose another model")
    found = {name: settings[name] for name in ENCODER_KEYS if name in settings}
    inside = folder / str(found.get("vision", "/"))
    return found | ({"vision": str(inside)} if inside.is_dir() and "vision" in found else {}) | given


def encoder_of(folder: str, name: str) -> str:
    """The vision model that made a video's features."""
    return read_header(feature_file(Path(folder), name))[1]["vision"]


def encoded(folder: Path, name: str, video: Path | None) -> tuple[int, dict[str, str]]:
    """Number of frames and settings of a video's features; BadData if they are missing, or the video is another one.

    A file of the same size and another time may be a copy, on another machine: `warn_of_times` says so, no more.
    """
    path, again = feature_file(folder, name), f"python data.py encode --data {folder} --model MODEL"
    if not path.exists():
        raise BadData(f"{folder}: {name} is not encoded yet: {again}")
    frames, made = read_header(path)
    if not {*ENCODER_KEYS, "size"} <= made.keys() or video and made["size"] != file_signature(video)["size"]:
        raise BadData(f"{path}: was not made of the {name} that is there now: {again}")
    return frames, made


def warn_of_times(folder: Path, videos: list[Path]) -> None:
    """A line about videos whose files have another time than those that were encoded, though the size is the same."""
    if videos and rank()[0] == 0:
        names = f"{videos[0].name} and {len(videos) - 1} more were" if videos[1:] else f"{videos[0].name} was"
        print(f"{folder}: {names} written after the encoding, or copied (another time, the same size); if it is another "
              f"video now: python data.py encode --data {folder} --model MODEL", file=sys.stderr)


# ----------------------------------------------------------------------------------------- videos with narrations

def read_folder(folder: Path, split: str, limit: int | None, notes: Notes) -> list[Narrated]:
    """The videos of a split, in the order of their names, at most `limit`, with their narrations placed on frames."""
    files, found, settings, store = list_videos(folder, notes), [], {}, None
    with_another_time = []
    for name in choose_split(folder, list(files), split, notes)[:limit]:
        file, video = files[name]
        frames, made = encoded(folder, name, video)
        if video and "mtime" in made and made["mtime"] != file_signature(video)["mtime"]:
            with_another_time.append(video)
        for key in ENCODER_KEYS:
            if made[key] != settings.setdefault(key, made[key]):
                raise BadData(f"{feature_file(folder, name)}: was made with {key} = {made[key]}, others with {settings[key]}: "
                              f"python data.py encode --data {folder} --model MODEL")
        sentences, fps = read_sentences(file, notes), float(made["fps"])
        wanted = [(frame_at(y.time, fps), y) for y in sentences]
        beyond = sum(frame >= frames for frame, _ in wanted)
        if beyond > 1 and beyond > len(wanted) / 2:
            raise BadData(f"{file}: {beyond} of {len(wanted)} narrations are beyond the end of the video "
                          f"({frames / fps:g} s); are they of another one?")
        store = store or Store(folder)
        found.append(Narrated(name, fps, frames, one_frame_each(wanted, frames - 1, notes), store))
    warn_of_times(folder, with_another_time)
    return found


# ----------------------------------------------------------------------------------------- numbers to choose options by

PERCENTS = (5, 50, 95, 99.5, 100)


def spread(lengths: list[float], soon: float = 4.0) -> dict[str, float]:
    """Percentiles of the lengths of segments (s), and the share of those that end within `soon` seconds, where two
    thresholds differ. Without segments: {}."""
    return {f"segment_{percent:g}%": float(np.percentile(lengths, percent)) for percent in PERCENTS if lengths} | (
        {"segments_within_4_s": float(np.mean(np.array(lengths) <= soon))} if lengths else {})


def advice(stats: dict) -> str:
    """A line on `spread`'s numbers, and on the options that they help to choose."""
    if "segments_within_4_s" not in stats:
        return "segments: none; every video has one narration"
    known = ", ".join(f"{percent:g} % within {stats[f'segment_{percent:g}%']:.1f}" for percent in PERCENTS[:-1])
    return (f"segments [s]: {known}, the longest {stats['segment_100%']:.1f} (--max-segment); "
            f"{stats['segments_within_4_s']:.0%} within 4 s, where --theta-low holds (--refractory)")
