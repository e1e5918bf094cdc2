"""Narrations in files: sentences with times, as predictions or as the ground truth of videos.

    predictions     one JSON file {video: [{"time", "text"}, ...]}; or one file per video: the JSONL
                    of stream.py, .srt, .vtt or .csv (cues.py), or JSON {"narrations": [{"time",
                    "text"}, ...]}, as beside a toy video, or the list alone; or a folder of such
                    files
    truth           one JSON file with any of these entries per video:
                        video: [{"time", "text"}, ...]
                        video: [[narrations of one annotator], [of another], ...]
                        video: {"start": seconds, "annotators": [[...], ...]}
                    or one file per video, or a folder, as above

Times are in seconds, in any order. The texts of files of one video are made whole sentences, as
those beside own videos are (cues.py: `whole_sentences`), but for .jsonl, which a narrator has
written. A malformed file raises BadData: one line names the problem.
"""
from collections.abc import Iterator
from dataclasses import asdict
from itertools import permutations
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import unquote

from support.common.disk import expecting, is_number, read_json, read_jsonl
from support.common.errors import BadData
from support.common.text import same_name
from support.files.cues import TIME_NAMES, VIDEO_NAME, check_one_video, read_cues, whole_sentences
from support.files.tracks import NarratedVideo, Notes, Sentence


def read_predictions(path: Path, notes: Notes | None = None) -> dict[str, list[Sentence]]:
    """{video: sentences} from a file or a folder (formats: see above)."""
    videos = each_video(path, notes or Notes())
    return {video: to_sentences(rows, place) for video, rows, place in videos}


def read_truth(path: Path, notes: Notes | None = None) -> dict[str, NarratedVideo]:
    """{video: its true narrations} from a file or a folder (formats: see above)."""
    truths = {}
    for video, entry, place in each_video(path, notes or Notes()):
        start = 0.0
        annotators = [entry]
        with expecting(place, '{"start": seconds, "annotators": [[...], ...]}'):
            if isinstance(entry, dict):
                start = entry.get("start", 0.0)
                annotators = entry["annotators"]
            elif entry and isinstance(entry[0], list):
                annotators = entry
            if not is_number(start):
                raise ValueError(f"{start!r:.60} is no time")
            sentences = [to_sentences(rows, place) for rows in annotators]
            truths[video] = NarratedVideo(sentences, start)
    return truths


def paired(truths: dict, predictions: dict, gt: str, pred: str,
           partial: bool) -> tuple[dict, dict]:
    """Ground truth and predictions of the same videos.

    If each has a single video, the two are paired whatever their names.

    gt, pred    where they come from, for errors
    partial     leave out videos without predictions

    Raises BadData, which names the videos that only one of the two has.
    """
    if len(truths) == 1 and len(predictions) == 1:
        predictions = dict(zip(truths, predictions.values()))
    missing = sorted(truths.keys() - predictions.keys())
    extra = sorted(predictions.keys() - truths.keys())
    if extra:
        raise BadData(f"{len(extra)} videos of {pred} are not in {gt}: {', '.join(extra[:3])}")
    if missing and not partial:
        raise BadData(f"{len(missing)} videos of {gt} are not in {pred}: {', '.join(missing[:3])} "
                      f"(--partial scores the others)")
    return {video: truth for video, truth in truths.items() if video in predictions}, predictions


def check_unit(truths: dict[str, NarratedVideo], predictions: dict[str, list[Sentence]]) -> None:
    """BadData if the times of a video's truth or predictions must be in milliseconds."""
    for video, predicted in predictions.items():
        times = {
            "predictions": [sentence.time for sentence in predicted],
            "true narrations": [sentence.time for rows in truths[video].annotators
                                for sentence in rows],
        }
        for (some, theirs), (others, their_times) in permutations(times.items()):
            if theirs and their_times and median(theirs) > 60 + 10 * max(their_times):
                raise BadData(f"video {video}: half of the {some} are beyond {median(theirs):g} s, "
                              f"and the {others} end at {max(their_times):g} s; are they in "
                              f"milliseconds? give seconds")


def each_video(path: Path, notes: Notes) -> Iterator[tuple[str, Any, str]]:
    """(video, entry, place for errors) of a file or of the files of a folder.

    Raises BadData if two files have narrations of one video, because one of them would be lost.
    """
    seen = set()
    for file in narration_files(path, notes):
        for video, entry in read_videos(file, notes).items():
            place = f"{file}, video {video}"
            video = same_name(video)
            if video in seen:
                raise BadData(f"{place}: the video has narrations in another file, too; "
                              f"leave one out")
            seen.add(video)
            yield video, entry, place


# of several files with one stem, the first of these is read; .json and .jsonl are both
ENDINGS = {".json": 0, ".jsonl": 0, ".csv": 1, ".srt": 2, ".vtt": 3}


def narration_files(path: Path, notes: Notes) -> list[Path]:
    """A file itself, or the files of a folder (but for those that macOS puts beside others)."""
    if not path.is_dir():
        return [path]
    files = [file for file in sorted(path.iterdir()) if file.suffix.lower() in ENDINGS
             and not file.name.startswith(".") and not file.name.endswith(".trace.jsonl")]
    if not files:
        raise BadData(f"{path}: has no .json, .jsonl, .csv, .srt or .vtt files")
    files.sort(key=rank_of)
    best = {file.stem: rank_of(file) for file in reversed(files)}
    others = [file.name for file in files if rank_of(file) > best[file.stem]]
    notes.add("files of narrations left out, because another one of the video is taken",
              len(others), others)
    return [file for file in files if rank_of(file) == best[file.stem]]


def rank_of(file: Path) -> int:
    return ENDINGS[file.suffix.lower()]


def read_videos(file: Path, notes: Notes) -> dict:
    """{video: entry} of a file."""
    ending = file.suffix.lower()
    if ending == ".tsv":
        raise BadData(f"{file}: name it .csv, whatever separates its cells")
    if ending == ".jsonl":
        return {unquote(file.stem): read_jsonl(file)}          # the inverse of file_name
    if ending in ENDINGS and ending != ".json":
        return {file.stem: [asdict(cue) for cue in read_cues(file, notes)]}
    content = read_json(file)
    rows = rows_of_video(content)
    if not isinstance(content, dict) and not is_list_of(rows, dict):
        raise BadData(f'{file}: expected an object with one entry per video: '
                      f'{{video: [{{"time", "text"}}, ...]}}, or the list of one video')
    if rows is None:
        return content
    if not is_list_of(rows, dict):              # of several annotators
        return {file.stem: rows}
    sentences = whole_sentences(to_sentences(rows, str(file)), notes)
    return {file.stem: [asdict(sentence) for sentence in sentences]}


def rows_of_video(content) -> list | None:
    """The narrations in a JSON file of one video: a list, as {"narrations": [...]} or as whisper
    writes them. None if it is another file.
    """
    fields = content if isinstance(content, dict) else {"narrations": content}
    return next((fields[name] for name in ("narrations", "segments")
                 if isinstance(fields.get(name), list)), None)


def to_sentences(rows, where: str) -> list[Sentence]:
    """[{"time": seconds, "text": str}, ...] -> sentences, sorted by time.

    The time has the first of TIME_NAMES that the first row has. where: for errors.
    """
    if not isinstance(rows, list):
        raise BadData(f"{where}: expected a list of narrations, not {str(rows)[:60]}")
    sentences = []
    first = rows[0] if rows and isinstance(rows[0], dict) else {}
    time_name = next((name for name in TIME_NAMES if first.get(name) is not None), "time")
    for number, row in enumerate(rows):
        fields = row if isinstance(row, dict) else {}
        time = fields.get(time_name)
        text = fields.get("text")
        if not (is_number(time) and isinstance(text, str)):
            has = f"not {str(row)[:100]}"
            if fields and (time is None or text is None):
                has = f"its keys are {', '.join(fields)[:100]}"
            raise BadData(f'{where}, narration {number}: expected {{"time": seconds, "text": str}} '
                          f'(or "end", "timestamp"); {has}')
        start = fields.get("start") if time_name == "end" else None
        if is_number(start) and start > time:
            raise BadData(f"{where}, narration {number}: it ends before it begins")
        sentences.append(Sentence(float(time), text))
    for name in filter(VIDEO_NAME.fullmatch, set().union(*rows)):
        check_one_video([row[name] for row in rows if name in row], where)
    return sorted(sentences, key=attrgetter("time"))


def is_list_of(values, kind: type) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)
