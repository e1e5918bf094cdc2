"""Narrations in files: sentences with times, as predictions or as the ground truth of videos.

    predictions     one JSON file {video: [{"time", "text"}, ...]}; or one file per video: the
                    .jsonl of stream.py, .srt, .vtt or .csv (cues.py), or JSON {"narrations":
                    [{"time", "text"}, ...]}, as beside a toy video, or the list alone; or a folder
                    of such files
    truth           one JSON file with any of these entries per video:
                        video: [{"time", "text"}, ...]
                        video: [[narrations of one annotator], [of another], ...]
                    or one file per video, or a folder, as above

Times are in seconds; "end" is another name of "time". Other names are not read; in a list that
stands for one video, what they say is the same in all rows. In JSON rows may stand in any order, in
.jsonl as the stream has written them. Texts are as they are written, and in one line
(support/common/text.py: one_line). A malformed file raises BadData: one line names the problem.
"""
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from urllib.parse import unquote

from support.common.disk import expecting, is_number, read_json, read_jsonl
from support.common.errors import BadData
from support.common.progress import say
from support.common.text import listed, one_line
from support.files.cues import read_cues
from support.files.sentences import NarratedVideo, Notes, Sentence


ROW = '{"time" or "end": seconds, "text": str}'
READ = f"a list of narrations [{ROW}, ...]"
# what our own files say of a narration: the .jsonl of stream.py, the .json of a toy video
NAMES = {"n", "frame", "start", "end", "time", "text", "p_skip", "tokens", "wall", "memory"}
ENDINGS = (".json", ".jsonl", ".csv", ".srt", ".vtt")


def read_predictions(path: Path, notes: Notes | None = None) -> dict[str, list[Sentence]]:
    """{video: sentences} from a file or a folder (forms: see above)."""
    videos = read_narrations(path, notes or Notes(), several=False)
    return {video: sentences for video, [sentences] in videos.items()}


def read_truth(path: Path, notes: Notes) -> dict[str, NarratedVideo]:
    """{video: its true narrations} from a file or a folder (forms: see above)."""
    videos = read_narrations(path, notes, several=True)
    return {video: NarratedVideo(annotators) for video, annotators in videos.items()}


def paired(truths: dict, predictions: dict, gt: str, pred: str,
           partial: bool) -> tuple[dict, dict]:
    """Ground truth and predictions of the same videos.

    If each has a single video, the two are paired whatever their names.

    gt, pred    where they come from, for errors
    partial     leave out videos without predictions

    Raises BadData, which names the videos that only one of the two has.
    """
    if len(truths) == len(predictions) == 1 and truths.keys() != predictions.keys():
        say(f"{pred} is scored against {gt}, though its video has another name")
        predictions = dict(zip(truths, predictions.values()))
    if partial:
        truths = {video: truth for video, truth in truths.items() if video in predictions}
    alone = sorted(truths.keys() ^ predictions.keys())
    if alone:
        raise BadData(f"{len(alone)} videos are in one of {gt} and {pred} alone: "
                      f"{listed(alone)} (--partial leaves out those without predictions, "
                      f"none without a truth)")
    return truths, predictions


def read_narrations(path: Path, notes: Notes, several: bool) -> dict[str, list[list[Sentence]]]:
    """{video: the sentences of each annotator} of a file, or of the files of a folder.

    several     whether a video may have several annotators

    BadData if two files have narrations of one video, because one of them would be lost.
    """
    files = [path]
    if path.is_dir():
        # but for hidden files, which macOS puts beside others, and traces of stream.py
        files = [file for file in sorted(path.glob("[!.]*"))
                 if file.suffix.lower() in ENDINGS and not file.name.endswith(".trace.jsonl")]
    if not files:
        raise BadData(f"{path}: has no {', '.join(ENDINGS)} files")
    videos = {}
    for file in files:
        for video, annotators in read_file(file, notes, several).items():
            if video in videos:
                raise BadData(f"{file}, video {video}: the video has narrations in another file, "
                              f"too; leave one out")
            videos[video] = annotators
    return videos


def read_file(file: Path, notes: Notes, several: bool) -> dict[str, list[list[Sentence]]]:
    """{video: the sentences of each annotator} of a file."""
    ending = file.suffix.lower()
    if ending not in ENDINGS:
        raise BadData(f"{file}: is no folder, and narrations are read from {', '.join(ENDINGS)} "
                      f"files; export one")
    if ending in (".csv", ".srt", ".vtt"):
        return {file.stem: [read_cues(file, notes)]}
    if ending == ".jsonl":
        rows = read_jsonl(file)
        with expecting(file, "the rows of stream.py, each with its number n"):
            # they begin anew where a second run was appended, and the two would be taken for one
            numbers = [row["n"] for row in rows]
            if numbers != sorted(set(numbers)):
                raise BadData(f"{file}: its numbers (n) do not rise; one stream a file is read")
        content = {unquote(file.stem): rows}   # the inverse of file_name
    else:
        content = read_json(file)
        if isinstance(content, dict) and isinstance(content.get("narrations"), list):
            content = content["narrations"]
        if isinstance(content, list):
            content = {file.stem: content}

    with expecting(file, f"{READ}, or {{video: {READ}}}"):
        entries = content.items()
    videos = {}
    for video, entry in entries:
        annotators = [entry]
        if several and is_list_of(entry, list) and entry:
            annotators = entry
        where = f"{file}, video {video}"
        videos[video] = [to_sentences(rows, where) for rows in annotators]
        for rows in annotators:
            check_one_video(where, rows)
    return videos


def check_one_video(where: str, rows: list[dict]) -> None:
    """BadData if rows differ in what is not read: they may be of several videos, or annotators."""
    for before, now in pairwise(rows):
        for name in sorted((before.keys() | now.keys()) - NAMES):
            if before.get(name) != now.get(name):
                raise BadData(f"{where}: {name!r} differs from row to row; rows of several videos are "
                              f"read as {{video: rows}}, of several annotators as {{video: [rows, "
                              f"rows]}}; if they are of one, leave it out")


def to_sentences(rows, where: str) -> list[Sentence]:
    """[{"time" or "end": seconds, "text": str}, ...] -> sentences, sorted by time.

    A text that is in one line stays as it is: scores count its blanks. where: for errors.
    """
    if not isinstance(rows, list):
        raise BadData(f"{where}: expected {READ}, not {str(rows)[:60]}")
    sentences = []
    for number, row in enumerate(rows):
        fields = row if isinstance(row, dict) else {}
        time = fields.get("time", fields.get("end"))
        text = fields.get("text")
        start = fields.get("start", time)
        has_two = "time" in fields and "end" in fields
        if has_two or not (is_number(time) and isinstance(text, str)):
            raise BadData(f"{where}, narration {number}: expected {ROW}, not {str(row)[:100]}")
        if not (is_number(start) and start <= time):
            raise BadData(f"{where}, narration {number}: it starts at {start} and ends at {time}")
        if not text.isprintable():
            text = one_line(text)
        sentences.append(Sentence(float(time), text))
    return sorted(sentences, key=attrgetter("time"))


def is_list_of(values, kind: type) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)
