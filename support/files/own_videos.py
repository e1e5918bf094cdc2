"""A folder of your own videos as a data set (`--data FOLDER`). Each video has its narrations beside
it, in one file of the same name.

    a.mp4  a.srt            or a.vtt, a.csv (cues.py), or a.json: a list of {"time": seconds,
                            "text": "..."}, alone or as "narrations", as `data.py toy` writes it
    features/               written once by `data.py encode --data FOLDER`; then the videos are no
                            longer needed
    val.txt test.txt        names of the videos for validation and testing, one a line, without
                            endings; without val.txt, a fifth of the videos is for validation

A narration stands at its time, or at the end of its cue, as it is written. A sample is a video from
its first narration to its end. What is left out is counted in Notes (tracks.py); what would be
wrong without a word is refused by name.
"""
from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path

from support.common.disk import read_json, read_text
from support.common.errors import BadData
from support.common.seal import refuse_if_changed
from support.files.cues import read_cues
from support.files.encoding import mark_of_video
from support.files.features import Features, feature_file, read_header
from support.files.narrations import READ, rows_of_video, sentences_of
from support.files.tracks import (
    NarratedVideo, Notes, Sentence, at_frames, frame_at, one_frame_each,
)

VIDEOS = (".mp4", ".mkv", ".mov", ".avi", ".webm", ".m4v", ".mpg", ".mpeg", ".ts", ".mts", ".m2ts",
          ".wmv", ".asf", ".flv", ".f4v", ".ogv", ".3gp", ".3g2", ".vob", ".dv", ".mxf")
NARRATIONS = (".json", ".csv", ".srt", ".vtt")
SPLITS = ("train", "val", "test")
VALIDATION_SHARE = 0.2                         # of the videos


# ------------------------------------------------------------------------------------------- files


def list_videos(folder: Path, notes: Notes) -> dict[str, tuple[Path, Path | None]]:
    """{name: (file of narrations, video)}, sorted by name. The video is None if only its features
    are left.
    """
    videos = files_by_name(folder, VIDEOS)
    narrations = files_by_name(folder, NARRATIONS)
    encoded = {file.stem for file in folder.glob("features/*.safetensors")}
    listed = {name: (file, videos.get(name)) for name, file in narrations.items()
              if name in videos or name in encoded}
    inside = [str(file.relative_to(folder)) for file in sorted(folder.glob("*/*"))
              if file.suffix.lower() in VIDEOS]
    silent = [file.name for name, file in videos.items() if name not in listed]
    alone = [file.name for name, file in narrations.items() if name not in listed]
    notes.add("videos without narrations left out", len(silent), silent)
    notes.add("files of narrations without a video left out", len(alone), alone)
    notes.add("videos in folders inside left out", len(inside), inside)
    if not listed:
        raise BadData(notes.after(f"{folder}: has no video with narrations beside it, "
                                  f"such as a.mp4 and a.srt, .vtt, .csv or .json"))
    return listed


def files_by_name(folder: Path, endings: tuple[str, ...]) -> dict[str, Path]:
    """{name: its file} of the files with one of these endings. BadData if a name has several."""
    files = {}
    for file in sorted(folder.iterdir()):
        if file.suffix.lower() not in endings or file.name.startswith(".") or file.is_dir():
            continue
        if file.stem in files:
            raise BadData(f"{file}: {files[file.stem].name} has the same name; keep one of them, "
                          f"or rename one")
        files[file.stem] = file
    return files


def choose_split(folder: Path, names: list[str], split: str) -> list[str]:
    """The names of the videos of a split; "all" is every video.

    val.txt and test.txt in the folder list the videos of these splits, one a line; all others are
    for training. Without val.txt, `for_validation` chooses of the others.
    """
    if split not in (*SPLITS, "all"):
        raise BadData(f"unknown split {split!r}; choose one of {', '.join(SPLITS)}, all")
    split_of = {}
    for listed_split in ("val", "test"):
        file = folder / f"{listed_split}.txt"
        lines = read_text(file).split("\n") if file.is_file() else []
        for name in filter(None, map(str.strip, lines)):
            if name not in names or name in split_of:
                raise BadData(f"{file}: {name[:60]!r} is no video of {folder} with narrations (its "
                              f"name without the ending), or is listed twice")
            split_of[name] = listed_split
    if "val" not in split_of.values():
        others = [name for name in names if name not in split_of]
        split_of |= dict.fromkeys(for_validation(others), "val")

    chosen = [name for name in names if split in ("all", split_of.get(name, "train"))]
    if not chosen:
        hint = " (train.py --val-limit 0 needs none)" if split == "val" else ""
        raise BadData(f"{folder}: none of its {len(names)} videos is for {split}; "
                      f"write names of videos into {folder / 'val.txt'} or test.txt{hint}")
    return chosen


def for_validation(names: list[str]) -> list[str]:
    """A share of the videos. A hash of the name decides, so that new videos do not move the others.
    Of two videos or more, at least one is for each; a single one is for training.
    """
    def place(name: str) -> float:             # from 0 to 1
        return int(sha256(os.fsencode(name)).hexdigest()[:8], 16) / 2 ** 32

    ordered = sorted(names, key=place)
    low = [name for name in ordered if place(name) < VALIDATION_SHARE]
    return (low or ordered[:1])[:len(ordered) - 1]


def read_sentences(path: Path, notes: Notes) -> list[Sentence]:
    """The narrations of a file, sorted by time; those without words are left out.

    Raises BadData naming the entry or the line that is wrong.
    """
    if path.suffix.lower() == ".json":
        rows = rows_of_video(read_json(path))
        if rows is None:
            raise BadData(f'{path}: expected {READ}, alone or as "narrations"')
        narrations = sentences_of(rows, path, path.stem)
    else:
        narrations = read_cues(path, notes)
    sentences = [narration for narration in narrations if narration.text]
    notes.add(f"sentences in {path.suffix} files", len(sentences))
    notes.add("narrations without words left out", len(narrations) - len(sentences))
    if not sentences:
        raise BadData(f"{path}: has no narrations; write some, or move its video away")
    if sentences[0].time < 0:
        raise BadData(f"{path}: {sentences[0].time:g} s is before the start of the video")
    return sentences


# ---------------------------------------------------------------------------------------- features


def to_encode(folder: Path, notes: Notes) -> list[str]:
    """The videos of a folder.

    Raises BadData if the narrations or the splits are wrong, before anything is encoded.
    """
    videos = list_videos(folder, notes)
    for narration_file, _ in videos.values():
        of_file = Notes()
        read_sentences(narration_file, of_file)
        notes.add_of_file(of_file, narration_file.name)
    choose_split(folder, list(videos), "all")
    return [str(video) for _, video in videos.values() if video]


# -------------------------------------------------------------------------- videos with narrations


def read_folder(
    folder: Path,
    split: str,
    limit: int | None,
    notes: Notes,
) -> list[tuple[NarratedVideo, Features]]:
    """The videos of a split, sorted by name, at most `limit`, each with its features.

    Sentences stand at the ends of frames, no two at the same.
    """
    files = list_videos(folder, notes)
    settings = {}                              # with which the features of all videos were made
    narrated = []
    for name in choose_split(folder, list(files), split)[:limit]:
        narration_file, video = files[name]
        wanted = settings | mark_of_video(video) if video else settings
        path = feature_file(folder, name)
        encode = f"python data.py encode --data {folder} --model MODEL"
        if not path.exists():
            raise BadData(f"{path}: is missing: {encode}")
        features = read_header(path)
        refuse_if_changed(str(path), features.header, wanted, f"encode again: {encode}")
        settings = {key: features.header.get(key) for key in ("vision_mark", "fps", "grid")}
        of_file = Notes()
        sentences = read_sentences(narration_file, of_file)
        placed = [(frame_at(sentence.time, features.fps), sentence) for sentence in sentences]
        check_on_video(placed, features, narration_file)
        placed = one_frame_each(placed, features.frames - 1, of_file)
        notes.add_of_file(of_file, narration_file.name)
        sentences = at_frames(placed, features.fps)
        narrated.append((NarratedVideo([sentences], name=name, video=name), features))
    return narrated


def check_on_video(
    placed: list[tuple[int, Sentence]],
    features: Features,
    narration_file: Path,
) -> None:
    """BadData if narrations (frame, sentence) cannot be those of the video: they are of another
    one, or their times have another unit, or they are what a camera says of each picture.
    """
    last, sentence = placed[-1]
    if last > features.frames:                 # one frame may be the rounding of another program
        raise BadData(f"{narration_file}: its narration at {sentence.time:g} s, "
                      f"{sentence.text[:60]!r}, is beyond the end of the video "
                      f"({features.duration:g} s); times in seconds of this video are read")
    frames = {frame for frame, _ in placed}
    if len(frames) < len(placed) / 2:
        raise BadData(f"{narration_file}: its {len(placed)} narrations begin within {len(frames)} "
                      f"frames, {features.fps:g} a second; narrations of what is done are read, with "
                      f"times in seconds or h:m:s")
