"""A folder of your own videos as a data set (`--data FOLDER`). Each video has its narrations beside
it, under the same name.

    a.mp4  a.srt            or a.vtt, a.csv (cues.py), or a.json as `data.py toy` or whisper writes
                            it: {"narrations": [{"time": seconds, "text": "..."}, ...]}
    features/               written once by `data.py encode --data FOLDER`; then the videos are no
                            longer needed
    val.txt test.txt        names of the videos for validation and testing, one a line; without
                            val.txt, a fifth of the videos is for validation

Of several files of one video, the first of .json, .csv, .srt and .vtt is taken, with the name of
the video before one with a language: a.srt before a.en.srt before a.en.forced.srt, and English
before other languages.

A narration stands at its time, or at the end of its cue. A sample is a video from its first
narration to its end. Notes (tracks.py) count all corrections. A file that cannot be corrected is
refused by name.
"""
from __future__ import annotations

from collections import defaultdict
from functools import partial
from hashlib import sha256
from pathlib import Path
from unicodedata import normalize

from support.common.disk import check_name, read_json, read_text
from support.common.errors import BadData
from support.common.seal import refuse_if_changed
from support.common.text import same_name
from support.files.cues import read_cues, whole_sentences
from support.files.encoding import file_size
from support.files.features import Features, feature_file, read_header
from support.files.narrations import rows_of_video, to_sentences
from support.files.tracks import (
    NarratedVideo, Notes, Sentence, at_frames, frame_at, one_frame_each,
)

VIDEOS = (".mp4", ".mkv", ".mov", ".avi", ".webm", ".m4v", ".mpg", ".mpeg", ".ts", ".mts", ".m2ts",
          ".wmv", ".asf", ".flv", ".f4v", ".ogv", ".3gp", ".3g2", ".vob", ".dv", ".mxf")
NARRATIONS = (".json", ".csv", ".srt", ".vtt")        # the first is taken of several
SUBTITLES = (".srt", ".vtt")
SPLITS = ("train", "val", "test")
VALIDATION_SHARE = 0.2                         # of the videos


# ------------------------------------------------------------------------------------------- files


def list_videos(folder: Path, notes: Notes) -> dict[str, tuple[Path, Path | None]]:
    """{name: (file of narrations, video)}, sorted by name. The video is None if only its features
    are left.
    """
    videos = {}
    texts = []                                 # files of narrations
    unread = []                                # files of other kinds
    for file in sorted(folder.iterdir()):
        ending = file.suffix.lower()
        if file.name.startswith(".") or file.is_dir():
            continue
        if ending not in VIDEOS + NARRATIONS:
            unread.append(file)
            continue
        check_name(file)
        if not file.is_file():
            notes.add("links to what is not there left out", examples=[file.name])
        elif ending in NARRATIONS:
            texts.append(file)
        elif file.stem in videos:
            raise BadData(f"{file}: {videos[file.stem].name} has the same name; "
                          f"keep one of them, or rename one")
        else:
            videos[file.stem] = file
    encoded = [file.stem for file in folder.glob("features/*.safetensors")]
    names = {same_name(name): name for name in [*encoded, *videos]}

    texts_of = defaultdict(list)               # name of a video: its files
    for file in texts:
        texts_of[video_of(file, names)].append(file)
    alone = [file.name for file in texts_of.pop(None, []) if file.suffix.lower() in SUBTITLES]
    notes.add("subtitles without a video left out", len(alone), alone)
    beside = {video_of(file, names): f", beside it {file.name}" for file in unread}
    silent = [video.name + beside.get(name, "") for name, video in videos.items()
              if name not in texts_of]
    notes.add("videos without narrations left out", len(silent), silent)
    if not texts_of:
        raise BadData(notes.after(f"{folder}: has no video with narrations beside it, "
                                  f"such as a.mp4 and a.srt, .vtt, .csv or .json"))

    listed = {}
    for name, candidates in sorted(texts_of.items()):
        taken, *others = sorted(candidates, key=partial(preference, name))
        listed[name] = taken, videos.get(name)
        notes.add("files of narrations left out, because another one of the video is taken",
                  len(others), [f"{file.name}: {taken.name} is taken" for file in others])
    return listed


def video_of(file: Path, names: dict[str, str]) -> str | None:
    """The video that a file of narrations belongs to: of a.srt, a.en.srt and a.mp4.srt, a.

    names   {name in the form in which names are compared: name of a video}
    """
    name = same_name(file.stem)
    # of what stands after the name: a.info.json and a.scores.csv are about a, and no narrations
    longest = {".json": 0, ".csv": 3}.get(file.suffix.lower(), len(name))
    while name not in names and "." in name:
        name, _, part = name.rpartition(".")
        if len(part) > longest:
            return None
    return names.get(name)


def preference(name: str, file: Path) -> tuple:
    """The file of the video `name` for which this is least is taken."""
    language = same_name(file.stem).removeprefix(same_name(name))
    ending = NARRATIONS.index(file.suffix.lower())
    return language.count("."), not language.startswith(".en"), ending, language


def choose_split(folder: Path, names: list[str], split: str) -> list[str]:
    """The names of the videos of a split; "all" is every video.

    val.txt and test.txt in the folder list the videos of these splits, one a line; all others are
    for training. Without val.txt, `for_validation` chooses of the others.
    """
    if split not in (*SPLITS, "all"):
        raise BadData(f"unknown split {split!r}; choose one of {', '.join(SPLITS)}, all")
    listed = {same_name(name): name for name in names}
    split_of = {}
    for listed_split in ("val", "test"):
        file = folder / f"{listed_split}.txt"
        lines = read_text(file).split("\n") if file.is_file() else []
        for name in filter(None, map(str.strip, lines)):
            if Path(name).suffix.lower() in (*VIDEOS, *NARRATIONS):
                name = Path(name).stem         # a file name with its ending
            video = listed.get(same_name(name))
            if video is None or video in split_of:
                raise BadData(f"{file}: {name[:60]!r} is no video of {folder} with narrations, or "
                              f"is listed twice")
            split_of[video] = listed_split
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
        return int(sha256(name.encode()).hexdigest()[:8], 16) / 2 ** 32

    ordered = sorted(names, key=place)
    low = [name for name in ordered if place(name) < VALIDATION_SHARE]
    return (low or ordered[:1])[:len(ordered) - 1]


def read_sentences(path: Path, notes: Notes) -> list[Sentence]:
    """The narrations of a file, sorted by time, each a sentence.

    Raises BadData naming the entry or the line that is wrong.
    """
    if path.suffix.lower() == ".json":
        content = read_json(path)
        rows = rows_of_video(content)
        if rows is None:
            keys = ", ".join(content) if isinstance(content, dict) else type(content).__name__
            raise BadData(f'{path}: expected a list of {{"time": seconds, "text": str}}, alone or '
                          f'as "narrations" or "segments"; it has {keys[:100] or "nothing"}')
        narrations = to_sentences(rows, str(path))
        if narrations and narrations[0].time < 0:
            raise BadData(f"{path}: {narrations[0].time:g} s is before the start of the video")
        sentences = whole_sentences(narrations, notes)
    else:
        sentences = read_cues(path, notes)
    if not sentences:
        raise BadData(f"{path}: has no narrations; write some, or move its video away")
    return sentences


# ---------------------------------------------------------------------------------------- features


def to_encode(folder: Path, notes: Notes) -> list[str]:
    """The videos of a folder.

    Raises BadData if the narrations or the splits are wrong, before anything is encoded.
    """
    videos = list_videos(folder, notes)
    for narration_file, _ in videos.values():
        read_sentences(narration_file, notes)
    choose_split(folder, list(videos), "all")
    return [str(video) for _, video in videos.values() if video]


def file_of_features(folder: Path, name: str) -> Path:
    """Where the features of a video are, or will be."""
    forms = [name, same_name(name), normalize("NFD", name)]
    files = [feature_file(folder, form) for form in forms]
    return next(filter(Path.exists, files), files[0])


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
        wanted = settings | file_size(video) if video else settings
        path = file_of_features(folder, name)
        encode = f"python data.py encode --data {folder} --model MODEL"
        if not path.exists():
            raise BadData(f"{path}: is missing: {encode}")
        features = read_header(path)
        refuse_if_changed(str(path), features.header, wanted, f"encode again: {encode}")
        settings = {key: features.header[key] for key in ("vision", "fps", "grid")}
        sentences = read_sentences(narration_file, notes)
        placed = [(frame_at(sentence.time, features.fps), sentence) for sentence in sentences]
        beyond = sum(frame >= features.frames for frame, _ in placed)
        far_beyond = sentences[0].time > 10 * features.duration
        if far_beyond or beyond > 1 and beyond > len(placed) / 2:
            raise BadData(f"{narration_file}: {beyond} of {len(placed)} narrations are beyond the "
                          f"end of the video ({features.duration:g} s); are they of another one, "
                          f"or in milliseconds?")
        frames = {frame for frame, _ in placed}
        if len(frames) < len(placed) / 2:
            raise BadData(f"{narration_file}: its {len(placed)} narrations begin within "
                          f"{len(frames)} frames, {features.fps:g} a second; are they narrations, "
                          f"and not what a camera says of each picture? Are its times seconds or "
                          f"h:m:s, and not minutes, or parts of a day, as Excel has them?")
        placed = one_frame_each(placed, features.frames - 1, notes)
        sentences = at_frames(placed, features.fps)
        narrated.append((NarratedVideo([sentences], name=name, video=name), features))
    return narrated
