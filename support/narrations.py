"""Narrations in files: time-stamped sentences, as predictions or as the ground truth of videos.

    predictions     one JSON file {video: [{"time", "text"}, ...]}; stream.py's JSONL, one file per video; .srt, .vtt or
                    .csv (cues.py), likewise; or a folder of such files
    truth           one JSON file {video: [{"time", "text"}, ...]}, {video: [[one annotator], [another], ...]} or
                    {video: {"start": seconds, "annotators": [[...], ...]}}; the .json beside a toy video; .srt, .vtt or
                    .csv; or a folder

Times are in seconds. A malformed file raises BadData, with one line that names the problem.
"""
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from support.annotations import Notes
from support.common import BadData, is_number, read_json, read_jsonl
from support.cues import read_cues


@dataclass
class Sentence:
    """A sentence and its time in seconds; for the toy, also those of its words that only visual memory can give."""
    time: float
    text: str
    memory_words: tuple[str, ...] = ()


@dataclass
class Truth:
    """The ground truth of one video: one list of sentences per annotator. The first segment begins at `start` (s);
    `seconds` were streamed, where that is known."""
    annotators: list[list[Sentence]]
    start: float = 0.0
    seconds: float | None = None


def read_predictions(path: Path) -> dict[str, list[Sentence]]:
    """{video: sentences} from a file or a folder; see above."""
    predictions = {}
    for file in narration_files(path):
        if file.suffix == ".jsonl":
            content = {unquote(file.stem): read_jsonl(file)}                          # the inverse of file_name
        else:
            content = read_videos(file)
        predictions |= {name: to_sentences(rows, f"{file}, video {name}") for name, rows in content.items()}
    return predictions


def read_truth(path: Path) -> dict[str, Truth]:
    """{video: Truth} from a file or a folder; see above."""
    truths = {}
    for file in narration_files(path):
        content = read_videos(file)
        if isinstance(content.get("narrations"), list) and "fps" in content:          # the .json beside a toy video
            content = {file.stem: content["narrations"]}
        for name, entry in content.items():
            where, start = f"{file}, video {name}", 0.0
            if isinstance(entry, dict):
                start, entry = entry.get("start", 0.0), entry.get("annotators")
                if not is_number(start) or not is_list_of(entry, list):
                    raise BadData(f'{where}: expected {{"start": seconds, "annotators": [[...], ...]}}')
            elif not is_list_of(entry, list) or entry == []:
                entry = [entry]
            truths[name] = Truth([to_sentences(rows, where) for rows in entry], start)
    return truths


def read_described(path: Path) -> tuple[Path, float, float, list[Sentence]]:
    """What a .json file says of the video beside it: path, frames per second, duration (s), sentences in order of time.

        {"video": "kitchen.mp4", "fps": 2, "duration": 151.5,
         "narrations": [{"time": 0.5, "text": "You fill the rack.", "memory": ["green", "bowl"]}, ...]}

    "memory" may be left out. Raises BadData naming the file and the entry that is wrong.
    """
    content, sentences = read_json(path), []

    def demand(right: bool, what: str) -> None:
        if not right:
            raise BadData(f"{path}: {what}")

    demand(isinstance(content, dict), 'must be an object with "video", "fps", "duration" and "narrations"')
    demand(isinstance(content.get("video"), str), '"video" must be the name of a file')
    for key, low, high in (("fps", 1e-3, 1e3), ("duration", 1e-3, 1e7)):
        demand(is_number(content.get(key)) and low <= content[key] <= high,
               f'"{key}" must be a number above 0, from {low:g} to {high:g}')
    demand(isinstance(content.get("narrations"), list), '"narrations" must be a list')
    for n, entry in enumerate(content["narrations"]):
        demand(isinstance(entry, dict), f"narrations[{n}] must be an object")
        time, text, memory = entry.get("time"), entry.get("text"), entry.get("memory", [])
        demand(is_number(time) and time >= 0, f'narrations[{n}]: "time" must be a number of seconds, 0 or more')
        demand(isinstance(text, str) and text.strip(), f'narrations[{n}]: "text" must be a sentence')
        demand(is_list_of(memory, str), f'narrations[{n}]: "memory" must be a list of words')
        sentences.append(Sentence(time, text, tuple(memory)))
    sentences.sort(key=lambda y: y.time)           # stable: of two at one time, the later in the file stays the later
    return path.parent / content["video"], content["fps"], content["duration"], sentences


def paired(truths: dict, predictions: dict, gt: str, pred: str, partial: bool) -> tuple[dict, dict]:
    """Truth and predictions of the same videos; of one video each, whatever their names. gt, pred: where they are from.

    partial: leave out videos without predictions. Raises BadData naming videos that only one of them has.
    """
    if len(truths) == len(predictions) == 1:
        predictions = dict(zip(truths, predictions.values()))
    missing, extra = truths.keys() - predictions.keys(), predictions.keys() - truths.keys()
    if missing and not partial or extra or not truths:
        names = sorted(missing or extra)
        raise BadData("there is nothing to score" if not names else
                      f"{len(names)} videos of {gt if missing else pred} are not in {pred if missing else gt}: "
                      f"{', '.join(names[:3])}{' ...' if names[3:] else ''}"
                      + (" (--partial scores the others)" if missing and len(missing) < len(truths) else ""))
    return {name: truth for name, truth in truths.items() if name in predictions}, predictions


def narration_files(path: Path) -> list[Path]:
    """A file, or those of a folder; of files that differ in their endings alone, .json and .jsonl, else the first."""
    if not path.is_dir():
        return [path]
    found = sorted(f for f in path.iterdir() if f.suffix in (".json", ".jsonl") and not f.name.endswith(".trace.jsonl"))
    for ending in (".csv", ".srt", ".vtt"):
        stems = {f.stem for f in found}
        found += sorted(f for f in path.iterdir() if f.suffix == ending and f.stem not in stems)
    if not found:
        raise BadData(f"{path}: has no .json, .jsonl, .csv, .srt or .vtt files")
    return found


def read_videos(file: Path) -> dict:
    if file.suffix in (".csv", ".srt", ".vtt"):
        return {file.stem: [{"time": time, "text": text} for time, text in read_cues(file, Notes())]}
    content = read_json(file)
    if not isinstance(content, dict):
        raise BadData(f'{file}: expected an object with one entry per video: {{video: [{{"time", "text"}}, ...]}}')
    return content


def to_sentences(rows, where: str) -> list[Sentence]:
    """[{"time" or "end": seconds, "text": str, ("memory": [words])}, ...] -> sentences; `where` names the source."""
    if not isinstance(rows, list):
        raise BadData(f"{where}: expected a list of narrations, not {str(rows)[:60]}")
    sentences = []
    for i, row in enumerate(rows):
        fields = row if isinstance(row, dict) else {}
        time, text, memory = fields.get("time", fields.get("end")), fields.get("text"), fields.get("memory", [])
        if not is_number(time) or not isinstance(text, str):
            raise BadData(f'{where}, narration {i}: expected {{"time": seconds, "text": "..."}}, not {str(row)[:60]}')
        if not is_list_of(memory, str):
            raise BadData(f'{where}, narration {i}: "memory" must be a list of words, or be left out')
        sentences.append(Sentence(float(time), text, tuple(memory)))
    return sentences


def is_list_of(values, kind: type) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)
