"""A folder of your own videos as a data set (`--data FOLDER`). Each video has its narrations beside
it, in one file of the same name.

    a.mp4  a.srt            or a.vtt, a.csv (cues.py), or a.json: a list of {"time": seconds,
                            "text": "..."}, alone or as "narrations", as `data.py toy` writes it
    features/               written once by `data.py encode --data FOLDER`; then the videos are no
                            longer needed
    val.txt test.txt        names of the videos for validation and testing, one a line, without
                            endings; without val.txt, a fifth of the videos is for validation

A narration stands at its time, or at the end of its cue, as it is written. A sample is a video from
its first narration to its end. What is left out is counted in Notes (sentences.py); what would be
wrong without a word is refused by name.
"""
import os
from hashlib import sha256
from pathlib import Path

from support.common.disk import read_text
from support.common.errors import BadData
from support.common.marks import digest_of_file, refuse_if_changed
from support.files.features import Features, feature_file, read_header
from support.files.narrations import READ, read_predictions
from support.files.sentences import (
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
    alone = [file for file in [*videos.values(), *narrations.values()] if file.stem not in listed]
    alone += [file for file in sorted(folder.glob("*/*")) if file.suffix.lower() in VIDEOS]
    for file in alone:
        notes.add("videos or narrations left out, because the other is not beside it in the folder "
                  "itself", 1, str(file.relative_to(folder)))
    if not listed:
        raise BadData(notes.after(f"{folder}: has no video with narrations beside it, "
                                  f"such as a.mp4 and a.srt, .vtt, .csv or .json"))
    return listed


def check_not_narrations(*outputs: str | None, source: Path | None = None) -> None:
    """BadData if an output would replace narrations beside a video, under its name: people may have
    written them. None is no output.

    source      of a command, a video whatever its ending
    """
    for file in filter(None, outputs):
        path = Path(os.path.realpath(file))
        if path.suffix.lower() not in NARRATIONS or not path.exists():
            continue
        others = [*path.parent.iterdir(), *path.parent.glob("features/*")]
        videos = [other.stem for other in others
                  if other.suffix.lower() in (*VIDEOS, ".safetensors") or other == source]
        if path.stem in videos:
            raise BadData(f"{file}: is there already, and beside a video narrations of its name are "
                          f"taken for your own (train.py --data); choose another name or folder, or "
                          f"delete it first")


def files_by_name(folder: Path, endings: tuple[str, ...]) -> dict[str, Path]:
    """{name: its file} of the files with one of these endings, but for hidden ones. BadData if a
    name has several.
    """
    files = {}
    for file in sorted(folder.glob("[!.]*")):
        if file.suffix.lower() not in endings:
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
    split_of = dict.fromkeys(names, "train")
    for listed in ("val", "test"):
        file = folder / f"{listed}.txt"
        lines = read_text(file).split("\n") if file.is_file() else []
        for name in filter(None, map(str.strip, lines)):
            if split_of.get(name) != "train":
                raise BadData(f"{file}: {name[:60]!r} is no video of {folder} with narrations (its "
                              f"name without the ending), or is listed twice")
            split_of[name] = listed
    if "val" not in split_of.values():
        others = [name for name in names if split_of[name] == "train"]
        split_of |= dict.fromkeys(for_validation(others), "val")

    chosen = [name for name in names if split in ("all", split_of[name])]
    if not chosen:
        raise BadData(f"{folder}: none of its {len(names)} videos is for {split}; write names of "
                      f"videos into val.txt or test.txt there (train.py --val-limit 0 needs none)")
    return chosen


def for_validation(names: list[str]) -> list[str]:
    """A share of the videos. A hash of the name decides, so that new videos do not move the others.
    Of two videos or more, at least one is for each; a single one is for training.
    """
    place = {name: int(sha256(os.fsencode(name)).hexdigest()[:8], 16) / 2 ** 32 for name in names}
    ordered = sorted(names, key=place.get)
    low = [name for name in ordered if place[name] < VALIDATION_SHARE]
    return (low or ordered[:1])[:len(ordered) - 1]


def read_sentences(path: Path, notes: Notes) -> list[Sentence]:
    """The narrations of a file, sorted by time; those without words are left out.

    Raises BadData naming the entry or the line that is wrong.
    """
    videos = read_predictions(path, notes)
    if videos.keys() != {path.stem}:
        raise BadData(f'{path}: expected {READ}, alone or as "narrations"')
    narrations = videos[path.stem]
    sentences = [narration for narration in narrations if narration.text]
    if not sentences:
        raise BadData(f"{path}: has no narrations; write some, or move its video away")
    notes.add(f"sentences in {path.suffix} files", len(sentences))
    notes.add("narrations without words left out", len(narrations) - len(sentences))
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
    narrated = []
    for name in choose_split(folder, list(files), split)[:limit]:
        narration_file, video = files[name]
        features = features_of(folder, name, video)
        of_file = Notes()
        sentences = read_sentences(narration_file, of_file)
        placed = [(frame_at(sentence.time, features.fps), sentence) for sentence in sentences]
        # not of a video are narrations of another one, those whose times have another unit, and
        # what a camera says of each picture
        frames = {frame for frame, _ in placed}
        _, first = placed[0]
        last_frame, last = placed[-1]
        # one frame beyond the end may be the rounding of another program
        if first.time < 0 or last_frame > features.frames or len(frames) < len(placed) / 2:
            raise BadData(f"{narration_file}: {len(placed)} narrations on {len(frames)} frames, from "
                          f"{first.time:g} to {last.time:g} s, are not of this video "
                          f"({features.duration:g} s, {features.fps:g} frames a second); what is "
                          f"done in it is read, with times in seconds or h:m:s")
        placed = one_frame_each(placed, features.frames - 1, of_file)
        notes.add_of_file(of_file, narration_file.name)
        sentences = at_frames(placed, features.fps)
        narrated.append((NarratedVideo([sentences], name=name, video=name), features))
    return narrated


def features_of(folder: Path, name: str, video: Path | None) -> Features:
    """BadData if they are missing, or those of another video than is there now."""
    path = feature_file(folder, name)
    encode = f"python data.py encode --data {folder} --model MODEL"
    if not path.exists():
        raise BadData(f"{path}: is missing: {encode}")
    features = read_header(path)
    if video:
        refuse_if_changed(str(path), features.header, {"video": digest_of_file(video)},
                          f"encode again: {encode}")
    return features

