"""Ego4D, EgoExo4D and EPIC-Kitchens-100: from annotation files to narrations in time (paper §4.1, App. B.4).

Each data set comes in two forms, and either will do. *Published*: the sentences that the paper's models were trained
on, rewritten by a language model (FlowNar-Data). *Raw*: the files of the data set's owners; tags are removed, and
EPIC's "open fridge" becomes "You open the fridge." (`sentence`; `data.py rewrite` has a language model do it better).

Glossary
track       one annotator's narrations of one video: [(seconds, sentence)], sorted
unseen      EgoExo4D's descriptions of what the camera wearer cannot see: not trained on, but part of what is streamed
interval    the part of a video that is streamed in evaluation, with all tracks in it
notes       counts of what was corrected while reading; nothing is dropped silently
"""
from __future__ import annotations

import csv
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from io import StringIO
from math import ceil
from pathlib import Path
from typing import TypeVar

from support.common import BadData, NotDownloaded, is_number, read_json, read_text

PUBLISHED_FILES = {"ego4d": "refined_narration_stream_{split}.json",
             "egoexo4d": "refined_egocentric_atomic_descriptions_gpt_{split}.json",
             "ek100": "refined_{split}_narrations.json"}
RAW = {"ego4d": ("all_narrations_redacted.json", "narration.json"), "egoexo4d": ("atomic_descriptions_{split}.json",),
       "ek100": ("EPIC_100_{split}.csv",)}
# Ego4D has no split for narrations: a video is for validation if a benchmark's val file lists it, under this key
BENCHMARKS = {"goalstep": "videos", "fho_lta": "clips", "nlq": "videos", "moments": "videos", "av": "videos",
              "fho_oscc-pnr": "clips", "fho_sta": "annotations", "vq": "videos"}

Said = TypeVar("Said")                         # what stands at a frame: a sentence, in whatever form


@dataclass
class Track:
    video: str
    annotator: str
    narrations: list[tuple[float, str]]
    unseen: list[tuple[float, str]] = field(default_factory=list)


@dataclass
class Interval:
    video: str
    start: float                               # seconds
    end: float
    tracks: list[Track]
    origin: float = 0.0                        # seconds at which the first segment begins (App. B.5)
    summaries: list[str] = field(default_factory=list)          # Ego4D: what annotators wrote of all of it (App. C.4)


@dataclass
class Notes:
    """Counts of what was corrected."""
    counts: Counter = field(default_factory=Counter)

    def add(self, what: str, n: int = 1) -> None:
        self.counts[what] += n

    def __str__(self) -> str:
        return "; ".join(f"{n} {what}" for what, n in self.counts.most_common() if n)


# ----------------------------------------------------------------------------------------------- files

def find_annotations(root: Path, *names: str) -> Path | None:
    """The first of the named files that exists, in root/annotations, root or root/v2/annotations."""
    folders = root / "annotations", root, root / "v2" / "annotations"
    return next((folder / name for name in names for folder in folders if (folder / name).is_file()), None)


def expect(right: bool, path: Path, entry: str, what: str) -> None:
    if not right:
        raise BadData(f"{path}, {entry}: {what}")


def what_to_download(name: str, root: Path, split: str) -> NotDownloaded:
    """The error when no annotations of a data set are found: what to get, and where to put it."""
    published = PUBLISHED_FILES[name].format(split=split)
    raw = " or ".join(file.format(split=epic_split(split) if name == "ek100" else split) for file in RAW[name])
    more = {"ego4d": ", with the benchmarks' files of the same release (they say which video is for validation)",
            "egoexo4d": ", with takes.json", "ek100": ""}[name]
    owner = {"ego4d": "ego4d-data.org", "egoexo4d": "ego-exo4d-data.org", "ek100": "epic-kitchens.github.io"}[name]
    return NotDownloaded(
        f"{name} is not in {root} (--root FOLDER looks elsewhere). It needs two things:\n"
        f"  annotations  {root}/annotations/{published}  from huggingface.co/datasets/zeyun-zhong/FlowNar-Data,\n"
        f"               or {raw} from {owner}{more}\n"
        f"  features     {root}/features_metadata.json and the files it names under {root}/features,\n"
        f"               from FlowNar-Data, or by python data.py encode VIDEO... --output {root}/features\n"
        f"To try training at once, without any data: --data toy")


# -------------------------------------------------------------------------------------------- sentences

def clean(text: str) -> str:
    """An Ego4D narration without its tags: "#C C opens the fridge" -> "C opens the fridge."; "" if nothing is left."""
    text = re.sub(r"#[Uu]nsure|#[CcOo]|@c|#", "", text).strip("., \n\t")
    words = text.split()
    return " ".join([words[0].capitalize(), *words[1:]]) + "." if words else ""


def clean_summary(text: str) -> str:
    """An Ego4D summary in the second person: "#Summary C was in a room, C's dog sat" -> "You were in a room, your dog
    sat."; "" if nothing is left."""
    text = re.sub(r"#\s?\w+", "", text)
    for third, second in (("C was", "you were"), ("C is", "you are"), ("C has", "you have"), ("C's", "your"),
                          ("C", "you")):
        text = re.sub(rf"\b{third}\b", second, text)
    text = text.strip("., \n\t")
    return text[:1].upper() + text[1:] + "." if text else ""


ARTICLES = {"the", "a", "an", "my", "your", "his", "her", "its", "their", "some", "another", "both", "all", "one",
            "two", "three", "four", "it", "them", "this", "that", "these", "those"}
PREPOSITIONS = {"in", "into", "on", "onto", "from", "with", "to", "of", "off", "out", "over", "under", "around", "at",
                "inside", "through", "for", "behind", "between", "near", "against", "towards", "by", "and"}
PARTICLES = {"down", "up", "off", "on", "out", "in", "away", "back", "over", "around", "together", "apart"}


def sentence(narration: str, verb: str = "") -> str:
    """An EPIC narration as a sentence, by rule: "open fridge" -> "You open the fridge.", "put down knife on board" ->
    "You put down the knife on the board.". verb: EPIC's own column ("put-down"), which says where the object begins."""
    words = narration.lower().split()
    if not words:
        return ""
    known = verb.lower().split("-")
    length = len(known) if words[:len(known)] == known else 1 + (len(words) > 2 and words[1] in PARTICLES)
    written, rest = ["You", *words[:length]], words[length:]
    for before, word in zip([""] + rest, rest):
        if (before in PREPOSITIONS or not before) and word not in ARTICLES | PREPOSITIONS | PARTICLES:
            written.append("the")
        written.append(word)
    return " ".join(written) + "."


# ------------------------------------------------------------------------------------------------ tracks

def seconds(value, path: Path, entry: str) -> float:
    expect(is_number(value), path, entry, f"the time must be a number of seconds, not {value!r}")
    return float(value)


def track(video: str, annotator: str, rows: Iterable[tuple[float, str]], notes: Notes) -> Track:
    """Sorted by time, none before 0; narrations without words are left out."""
    rows = list(rows)
    kept = [(time, text) for time, text in rows if text.strip(" .\n")]
    notes.add("narrations without words left out", len(rows) - len(kept))
    ordered = sorted(kept, key=lambda pair: pair[0])
    notes.add("narrations that were not in order of time", sum(a is not b for a, b in zip(kept, ordered)))
    notes.add("narrations moved from before the start of their video to 0 s", sum(time < 0 for time, _ in ordered))
    return Track(video, annotator, [(max(0.0, time), text) for time, text in ordered])


def published_rows(rows, path: Path, entry: str) -> list[tuple[float, str]]:
    """[{"time": seconds, "text": str}, ...]"""
    expect(isinstance(rows, list), path, entry, "expected a list of narrations")
    for i, row in enumerate(rows):
        expect(isinstance(row, dict) and isinstance(row.get("text"), str), path, f"{entry}, narration {i}",
               'expected {"time": seconds, "text": "..."}')
    return [(seconds(row.get("time"), path, f"{entry}, narration {i}"), row["text"]) for i, row in enumerate(rows)]


def tracks(name: str, root: Path, split: str, notes: Notes) -> list[Track]:
    """All tracks of a split, for training and teacher-forced evaluation: without what the camera wearer cannot see.

    Raises NotDownloaded if there are no annotations, BadData naming file and entry if they are damaged.
    """
    found = every_track(name, root, split, notes)
    notes.add("descriptions of what the camera wearer cannot see left out", sum(len(one.unseen) for one in found))
    notes.add("annotators without narrations", sum(not one.narrations for one in found))
    return [one for one in found if one.narrations]


def every_track(name: str, root: Path, split: str, notes: Notes) -> list[Track]:
    """As `tracks`, with those that have nothing to train on; published sentences if there are any, else raw ones."""
    splits = ("train", "val", "test") if name == "ego4d" else ("train", "val")
    if split not in splits:
        raise BadData(f"{name} has no split {split!r}; choose one of {', '.join(splits)}")
    path = find_annotations(root, PUBLISHED_FILES[name].format(split=split))
    if path is None:
        return RAW_READERS[name](root, split, notes)
    content = read_json(path)
    expect(isinstance(content, dict), path, "top level", "expected an object with one entry per video")
    return READERS[name](content, path, notes)


def ego4d(content: dict, path: Path, notes: Notes) -> list[Track]:
    """{video: {annotator: [{"time", "text"}]}}"""
    for video, passes in content.items():
        expect(isinstance(passes, dict), path, f"video {video}", "expected {annotator: [narrations]}")
    return [track(video, annotator, published_rows(rows, path, f"video {video}, annotator {annotator}"), notes)
            for video, passes in content.items() for annotator, rows in passes.items()]


def ego4d_raw(root: Path, split: str, notes: Notes) -> list[Track]:
    """narration.json: two passes per video, a track each; all_narrations_redacted.json: a track per annotator."""
    path = find_annotations(root, *RAW["ego4d"])
    if path is None:
        raise what_to_download("ego4d", root, split)
    content = read_json(path)
    expect(isinstance(content, dict), path, "top level", "expected an object")
    videos = content["videos"] if isinstance(content.get("videos"), dict) else content
    found = []
    for video in ego4d_split(root, split, videos):
        entry, passes, rows = videos[video], defaultdict(list), []
        expect(isinstance(entry, dict), path, f"video {video}", "expected an object")
        sources = [(None, entry, "time", "text")] + [(name, one, "timestamp_sec", "narration_text") for name, one
                                                     in entry.items() if name.startswith("narration_pass")]
        for name, one, time, text in sources:
            listed = one.get("narrations", []) if isinstance(one, dict) else []
            expect(isinstance(listed, list), path, f"video {video}", '"narrations" must be a list')
            rows += [(name, row, time, text) for row in listed]
        for i, (annotator, row, time, text) in enumerate(rows):
            where = f"video {video}, narration {i}"
            expect(isinstance(row, dict) and isinstance(row.get(text), str), path, where, f"has no {text}")
            when, words = seconds(row.get(time), path, where), clean(row[text])
            if len(words.split()) == 1:
                notes.add("narrations of one word left out")
                continue
            passes[annotator or str(row.get("_annotation_uid"))].append((when, words))
        found += [track(video, annotator, narrations, notes) for annotator, narrations in passes.items()]
    return found


def ego4d_split(root: Path, split: str, videos: Iterable[str]) -> list[str]:
    """val: in a benchmark's validation set; test: in one's test set and in none's validation set; train: all others."""
    if path := find_annotations(root, f"narration_stream_video_uids_{split}.json"):
        chosen = read_json(path)
        expect(isinstance(chosen, list), path, "top level", "expected a list of videos")
        chosen = set(map(str, chosen))
        return [video for video in videos if video in chosen]
    held, missing = {"val": set(), "test": set()}, []
    for part, suffix in (("val", "val"), ("test", "test_unannotated")):
        for benchmark, key in BENCHMARKS.items():
            path = find_annotations(root, f"{benchmark}_{suffix}.json")
            if path is None:
                missing.append(f"{benchmark}_{suffix}.json")
                continue
            content = read_json(path)
            expect(isinstance(content, dict) and isinstance(content.get(key), list), path, "top level",
                   f'expected a list "{key}"')
            rows = (row for row in content[key] if isinstance(row, dict))
            held[part] |= {row["video_uid"] for row in rows if isinstance(row.get("video_uid"), str)}
    if missing:
        few = ", ".join(missing[:3]) + (" ..." if missing[3:] else "")
        raise BadData(f"{root}: the split of Ego4D's raw narrations is made of its benchmarks' files, and "
                      f"{len(missing)} are missing: {few}; put them into {root}/annotations")
    held["test"] -= held["val"]
    return [video for video in videos
            if (video in held[split] if split in held else video not in held["val"] | held["test"])]


def egoexo4d(content: dict, path: Path, notes: Notes) -> list[Track]:
    """{take: [{"descriptions": [{"timestamp", "text", "ego_visible"}]}, ...]}"""
    found = []
    for take, annotators in content.items():
        expect(isinstance(annotators, list), path, f"take {take}", "expected a list of annotators")
        for number, annotator in enumerate(annotators):
            entry = f"take {take}, annotator {number}"
            rows = annotator.get("descriptions") if isinstance(annotator, dict) else None
            if isinstance(annotator, dict) and annotator.get("rejected"):
                notes.add("rejected annotators left out")
                continue
            expect(isinstance(rows, list), path, entry, 'expected {"descriptions": [...]}')
            visible: dict[bool, list] = {True: [], False: []}
            for i, row in enumerate(rows):
                expect(isinstance(row, dict) and isinstance(row.get("text"), str), path, f"{entry}, description {i}",
                       "has no text")
                time = seconds(row.get("timestamp"), path, f"{entry}, description {i}")
                visible[row.get("ego_visible") is not False].append((time, row["text"].strip()))
            found.append(track(take, str(number), visible[True], notes))
            found[-1].unseen = track(take, str(number), visible[False], notes).narrations
    return found


def egoexo4d_raw(root: Path, split: str, notes: Notes) -> list[Track]:
    path = find_annotations(root, RAW["egoexo4d"][0].format(split=split))
    if path is None:
        raise what_to_download("egoexo4d", root, split)
    content = read_json(path)
    expect(isinstance(content, dict) and isinstance(content.get("annotations"), dict), path, "top level",
           'expected {"annotations": {take: [...]}}')
    return egoexo4d(content["annotations"], path, notes)


def take_names(root: Path) -> dict[str, str]:
    """EgoExo4D: take_uid -> take_name, from takes.json; {} without it."""
    path = find_annotations(root, "takes.json")
    if path is None:
        return {}
    content = read_json(path)
    expect(isinstance(content, list), path, "top level", "expected a list of takes")
    return {str(take["take_uid"]): str(take["take_name"]) for take in content
            if isinstance(take, dict) and {"take_uid", "take_name"} <= take.keys()}


def ek100(content: dict, path: Path, notes: Notes) -> list[Track]:
    """{video: [{"time", "text"}]}"""
    return [track(video, "0", published_rows(rows, path, f"video {video}"), notes) for video, rows in content.items()]


def epic_split(split: str) -> str:
    return "validation" if split == "val" else split


def ek100_raw(root: Path, split: str, notes: Notes) -> list[Track]:
    """EPIC's rows are not in order of time; a row without narration_timestamp is put at the start of its action."""
    path = find_annotations(root, RAW["ek100"][0].format(split=epic_split(split)))
    if path is None:
        raise what_to_download("ek100", root, split)
    text, narrations = read_text(path), defaultdict(list)
    if "\0" in text:
        raise BadData(f"{path}: has zero bytes; damaged? get it again")
    reader, wanted = csv.DictReader(StringIO(text)), {"video_id", "narration", "start_timestamp"}
    try:
        expect(wanted <= set(reader.fieldnames or ()), path, "first line",
               f"expected the columns {', '.join(sorted(wanted))}")
        for row in reader:
            entry = f"line {reader.line_num}"
            expect(None not in row and None not in map(row.get, wanted), path, entry,
                   "does not have as many columns as the first line")
            stamp = (row.get("narration_timestamp") or "").strip()
            if stamp in ("", "nan", "NaN"):
                notes.add("narrations without a timestamp, put at the start of their action")
                stamp = row["start_timestamp"].strip()
            narrations[row["video_id"]].append((parse_time(stamp, path, entry),
                                                sentence(row["narration"], row.get("verb") or "")))
    except csv.Error as error:
        raise BadData(f"{path}, line {reader.line_num}: is not CSV ({error})") from None
    return [track(video, "0", rows, notes) for video, rows in narrations.items()]


def parse_time(text: str, path: Path, entry: str) -> float:
    """'00:01:02.5' -> 62.5"""
    parts = text.split(":")
    expect(len(parts) == 3 and all(re.fullmatch(r"\d{1,9}(\.\d*)?", part) for part in parts), path, entry,
           f"the time must be HH:MM:SS.sss, not {text!r}")
    hours, minutes, rest = map(float, parts)
    return seconds(hours * 3600 + minutes * 60 + rest, path, entry)


READERS = {"ego4d": ego4d, "egoexo4d": egoexo4d, "ek100": ek100}
RAW_READERS = {"ego4d": ego4d_raw, "egoexo4d": egoexo4d_raw, "ek100": ek100_raw}


# ----------------------------------------------------------------------------- in time: training, streaming

def frame_at(time: float, fps: float) -> int:
    """The frame whose span (i / fps, (i + 1) / fps] holds a time in seconds; frame 0 for anything earlier."""
    return max(0, ceil(time * fps - 1e-6) - 1)                     # 1e-6: time_of(i) * fps may be rounded up


def time_of(frame: int, fps: float) -> float:
    """The end of a frame's span in seconds."""
    return (frame + 1) / fps


def intervals(name: str, root: Path, split: str, notes: Notes) -> list[Interval]:
    """What evaluation streams: Ego4D's summarised intervals, else each video from its first to its last narration.

    As published, the first segment begins with the interval in Ego4D, at 0 in the others, and EgoExo4D's unseen
    descriptions are part of it.
    """
    summaries = find_annotations(root, "segment_summaries.json") if name == "ego4d" and split == "val" else None
    if summaries is not None:
        return summarised(summaries, notes)
    videos = defaultdict(list)
    for one in every_track(name, root, split, notes):
        if rows := sorted(one.narrations + one.unseen, key=lambda pair: pair[0]):
            videos[one.video].append(Track(one.video, one.annotator, rows))
        else:
            notes.add("annotators without narrations")
    found = []
    for video, several in videos.items():
        start, end = min(one.narrations[0][0] for one in several), max(one.narrations[-1][0] for one in several)
        found.append(Interval(video, start, end, several, start if name == "ego4d" else 0.0))
    return found


def summarised(path: Path, notes: Notes) -> list[Interval]:
    """Ego4D's segment_summaries.json: {video: {"start, end": {annotator: {"narration": [{"time", "text"}],
    "summary": str}}}}; the summary may be left out."""
    found, content = [], read_json(path)
    expect(isinstance(content, dict), path, "top level", "expected an object with one entry per video")
    for video, parts in content.items():
        expect(isinstance(parts, dict), path, f"video {video}", 'expected {"start, end": {annotator: {...}}}')
        for key, annotators in parts.items():
            entry = f"video {video}, interval {key!r}"
            match = re.fullmatch(r"\s*(\d+\.?\d*)\s*,\s*(\d+\.?\d*)\s*", key)
            expect(match is not None and isinstance(annotators, dict), path, entry,
                   'expected "start, end": {annotator: {...}}')
            start, end = (seconds(float(number), path, entry) for number in match.groups())
            several, summaries = [], []
            for annotator, one in annotators.items():
                rows = published_rows(one.get("narration") if isinstance(one, dict) else None, path,
                                      f"{entry}, annotator {annotator}")
                several.append(track(video, annotator, rows, notes))
                text = one.get("summary") or ""
                expect(isinstance(text, str), path, f"{entry}, annotator {annotator}", '"summary" must be text')
                summaries.append(clean_summary(text))
            kept = [one for one in several if one.narrations]
            found.append(Interval(video, start, end, kept, start, list(filter(None, summaries))))
    return found


def assign_frames(narrations: list[tuple[float, str]], duration: float, fps: float, notes: Notes,
                  frames_there: int | None = None) -> list[tuple[int, str]]:
    """Narrations in seconds, sorted -> (frame of the feature file, sentence), frames strictly increasing.

    frames_there: how many frames the file has, if that is known; as published, it is taken to have one at the very end.

    A narration stands at the first frame not before it. A sentence that repeats the one before it is left out; all else
    is as in `one_frame_each` (the published loader loses one of two sentences in one frame's time).
    """
    last = int(duration * fps) if frames_there is None else min(int(duration * fps), frames_there - 1)
    wanted = []
    for time, text in narrations:
        if wanted and text == wanted[-1][1]:
            notes.add("repeated sentences left out")
        else:
            wanted.append((last + 1 if time > duration else min(max(ceil(time * fps), 0), last), text))
    return one_frame_each(wanted, last, notes)


def one_frame_each(wanted: list[tuple[int, Said]], last: int, notes: Notes) -> list[tuple[int, Said]]:
    """(frame, narration) in order of time -> the same, frames strictly increasing and none after `last`.

    Two on one frame stand one frame apart. Beyond the last frame, the first is moved to it and the others are left out.
    """
    beyond = sum(frame > last for frame, _ in wanted)
    notes.add("narrations beyond the end of their video moved to its last frame", min(beyond, 1))
    notes.add("narrations beyond the end of their video left out", max(beyond - 1, 0))
    kept = [(min(frame, last), said) for frame, said in wanted[:len(wanted) - max(beyond - 1, 0)]]
    notes.add("narrations left out of videos with more narrations than frames", max(0, len(kept) - last - 1))
    kept = kept[:last + 1]
    frames = []
    for frame, _ in kept:
        frames.append(max(frame, frames[-1] + 1) if frames else frame)
    for i in range(len(frames) - 1, -1, -1):                       # no further than the last frame
        frames[i] = min(frames[i], last - (len(frames) - 1 - i))
    notes.add("narrations moved by a frame or more, because another one has their frame",
              sum(frame != first for frame, (first, _) in zip(frames, kept)))
    return [(frame, said) for frame, (_, said) in zip(frames, kept)]
