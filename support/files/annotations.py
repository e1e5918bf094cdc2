"""Ego4D, EgoExo4D and EPIC-Kitchens-100: annotation files as narrations in time (§4.1, App. B.4).

Each data set comes in two forms, and one of them is enough:
published   sentences that a language model has rewritten (FlowNar-Data). The paper's models were
            trained on them.
raw         the files of the data set's owners. Tags are removed, and EPIC's "open fridge" becomes
            "You open the fridge." by rule (`sentence`). `data.py rewrite` uses a language model.

Glossary
track       one annotator's narrations of one video: [(seconds, sentence)], sorted by time
unseen      EgoExo4D's descriptions of things outside the camera wearer's view. They are left out of
            training, but they are part of the streamed interval
interval    the part of a video that is streamed in evaluation, with all tracks in it
notes       counts of all corrections made while reading. Nothing is dropped silently
"""
from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterable
from io import StringIO
from pathlib import Path

from support.common.disk import is_number, read_json, read_text
from support.common.errors import BadData, NotDownloaded
from support.files.tracks import Interval, Notes, Track


# ------------------------------------------------------------------------------------------- files

PUBLISHED_FILES = {
    "ego4d": "refined_narration_stream_{split}.json",
    "egoexo4d": "refined_egocentric_atomic_descriptions_gpt_{split}.json",
    "ek100": "refined_{split}_narrations.json",
}
RAW_FILES = {
    "ego4d": ("all_narrations_redacted.json", "narration.json"),
    "egoexo4d": ("atomic_descriptions_{split}.json",),
    "ek100": ("EPIC_100_{split}.csv",),
}
OWNERS = {
    "ego4d": "ego4d-data.org",
    "egoexo4d": "ego-exo4d-data.org",
    "ek100": "epic-kitchens.github.io",
}
# files that the raw form needs, too
COMPANION_FILES = {
    "ego4d": ", with the benchmarks' files of the same release "
             "(they say which video is for validation)",
    "egoexo4d": ", with takes.json",
    "ek100": "",
}
# Ego4D has no split for narrations: a video is for validation if a benchmark's val file lists it.
# benchmark -> the key of the list in its files
BENCHMARKS = {"goalstep": "videos", "fho_lta": "clips", "nlq": "videos", "moments": "videos",
              "av": "videos", "fho_oscc-pnr": "clips", "fho_sta": "annotations", "vq": "videos"}


def find_annotations(root: Path, *names: str) -> Path | None:
    """The first of the named files that exists in root/annotations, root or root/v2/annotations."""
    for name in names:
        for folder in (root / "annotations", root, root / "v2" / "annotations"):
            if (folder / name).is_file():
                return folder / name
    return None


def expect(right: bool, path: Path, entry: str, what: str) -> None:
    """Raise BadData, which names the file and the entry in it, unless `right`."""
    if not right:
        raise BadData(f"{path}, {entry}: {what}")


def what_to_download(name: str, root: Path, split: str) -> NotDownloaded:
    """The error if a data set has no annotations: the files to get, and the place to put them."""
    published = PUBLISHED_FILES[name].format(split=split)
    raw_split = epic_split(split) if name == "ek100" else split
    raw = " or ".join(file.format(split=raw_split) for file in RAW_FILES[name])
    return NotDownloaded(
        f"{name} is not in {root} (--root FOLDER looks elsewhere). It needs two things:\n"
        f"  annotations  {root}/annotations/{published}"
        f"  from huggingface.co/datasets/zeyun-zhong/FlowNar-Data,\n"
        f"               or {raw} from {OWNERS[name]}{COMPANION_FILES[name]}\n"
        f"  features     {root}/features_metadata.json and the files it names"
        f" under {root}/features,\n"
        f"               from FlowNar-Data, or by python data.py encode VIDEO..."
        f" --output {root}/features\n"
        f"To try training at once, without any data: --data toy")


# --------------------------------------------------------------------------------------- sentences


def clean(text: str) -> str:
    """An Ego4D narration without its tags: "#C C opens the fridge" -> "C opens the fridge."

    Returns "" if nothing is left.
    """
    text = re.sub(r"#[Uu]nsure|#[CcOo]|@c|#", "", text).strip("., \n\t")
    words = text.split()
    if not words:
        return ""
    words[0] = words[0].capitalize()
    return " ".join(words) + "."


def clean_summary(text: str) -> str:
    """An Ego4D summary without its tags and in the second person:

    "#Summary C was in a room, C's dog sat" -> "You were in a room, your dog sat."
    Returns "" if nothing is left.
    """
    text = re.sub(r"#\s?\w+", "", text)
    second_person = {"C was": "you were", "C is": "you are", "C has": "you have", "C's": "your",
                     "C": "you"}               # "C" comes last, because it matches in the others
    for before, after in second_person.items():
        text = re.sub(rf"\b{before}\b", after, text)
    text = text.strip("., \n\t")
    if not text:
        return ""
    return text[0].upper() + text[1:] + "."


ARTICLES = {"the", "a", "an", "my", "your", "his", "her", "its", "their", "some", "another", "both",
            "all", "one", "two", "three", "four", "it", "them", "this", "that", "these", "those"}
PREPOSITIONS = {"in", "into", "on", "onto", "from", "with", "to", "of", "off", "out", "over",
                "under", "around", "at", "inside", "through", "for", "behind", "between", "near",
                "against", "towards", "by", "and"}
PARTICLES = {"down", "up", "off", "on", "out", "in", "away", "back", "over", "around", "together",
             "apart"}


def sentence(narration: str, verb: str = "") -> str:
    """An EPIC narration as a sentence, by rule: "open fridge" -> "You open the fridge.",
    "put down knife on board" -> "You put down the knife on the board."

    verb: EPIC's own column, such as "put-down". It tells where the object begins.
    """
    words = narration.lower().split()
    if not words:
        return ""
    verb_words = verb.lower().split("-")
    if words[:len(verb_words)] == verb_words:
        verb_length = len(verb_words)
    elif len(words) > 2 and words[1] in PARTICLES:
        verb_length = 2
    else:
        verb_length = 1

    written = ["You", *words[:verb_length]]
    noun_may_begin = True                      # after the verb, and after each preposition
    for word in words[verb_length:]:
        if noun_may_begin and word not in ARTICLES | PREPOSITIONS | PARTICLES:
            written.append("the")
        written.append(word)
        noun_may_begin = word in PREPOSITIONS
    return " ".join(written) + "."


# ------------------------------------------------------------------------------- rows and tracks


def to_seconds(value, path: Path, entry: str) -> float:
    expect(is_number(value), path, entry, f"the time must be a number of seconds, not {value!r}")
    return float(value)


def make_track(video: str, annotator: str, rows: list[tuple[float, str]], notes: Notes) -> Track:
    """A Track from [(seconds, text)]: sorted, no time below 0, no narration without words."""
    kept = [(time, text) for time, text in rows if text.strip(" .\n")]
    notes.add("narrations without words left out", len(rows) - len(kept))

    ordered = sorted(kept, key=lambda narration: narration[0])
    moved = sum(1 for before, after in zip(kept, ordered) if before is not after)
    notes.add("narrations that were not in order of time", moved)

    early = sum(1 for time, _ in ordered if time < 0)
    notes.add("narrations moved from before the start of their video to 0 s", early)
    return Track(video, annotator, [(max(0.0, time), text) for time, text in ordered])


def published_rows(rows, path: Path, entry: str) -> list[tuple[float, str]]:
    """[{"time": seconds, "text": str}, ...] -> [(seconds, text)]"""
    expect(isinstance(rows, list), path, entry, "expected a list of narrations")
    for i, row in enumerate(rows):
        has_text = isinstance(row, dict) and isinstance(row.get("text"), str)
        expect(has_text, path, f"{entry}, narration {i}",
               'expected {"time": seconds, "text": "..."}')
    return [(to_seconds(row.get("time"), path, f"{entry}, narration {i}"), row["text"])
            for i, row in enumerate(rows)]


# ------------------------------------------------------------------------ tracks of a data set


def tracks(name: str, root: Path, split: str, notes: Notes) -> list[Track]:
    """All tracks of a split with narrations, for training and teacher-forced evaluation.

    Raises NotDownloaded if there are no annotations, BadData naming file and entry if they are
    damaged.
    """
    all_tracks = every_track(name, root, split, notes)
    notes.add("descriptions of what the camera wearer cannot see left out",
              sum(len(track.unseen) for track in all_tracks))
    notes.add("annotators without narrations",
              sum(1 for track in all_tracks if not track.narrations))
    return [track for track in all_tracks if track.narrations]


def every_track(name: str, root: Path, split: str, notes: Notes) -> list[Track]:
    """All tracks of a split, also empty ones; from the published files if they are there, else raw.

    Raises as `tracks` does.
    """
    splits = ("train", "val", "test") if name == "ego4d" else ("train", "val")
    if split not in splits:
        raise BadData(f"{name} has no split {split!r}; choose one of {', '.join(splits)}")
    path = find_annotations(root, PUBLISHED_FILES[name].format(split=split))
    if path is None:
        return RAW_READERS[name](root, split, notes)
    content = read_json(path)
    expect(isinstance(content, dict), path, "top level",
           "expected an object with one entry per video")
    return READERS[name](content, path, notes)


def ego4d(content: dict, path: Path, notes: Notes) -> list[Track]:
    """Published: {video: {annotator: [{"time", "text"}]}}"""
    for video, annotators in content.items():
        expect(isinstance(annotators, dict), path, f"video {video}",
               "expected {annotator: [narrations]}")
    all_tracks = []
    for video, annotators in content.items():
        for annotator, rows in annotators.items():
            narrations = published_rows(rows, path, f"video {video}, annotator {annotator}")
            all_tracks.append(make_track(video, annotator, narrations, notes))
    return all_tracks


def ego4d_raw(root: Path, split: str, notes: Notes) -> list[Track]:
    """narration.json: a video has two annotation passes, and each becomes a track.
    all_narrations_redacted.json: each annotator becomes a track."""
    path = find_annotations(root, *RAW_FILES["ego4d"])
    if path is None:
        raise what_to_download("ego4d", root, split)
    content = read_json(path)
    expect(isinstance(content, dict), path, "top level", "expected an object")
    videos = content["videos"] if isinstance(content.get("videos"), dict) else content

    def narration_list(source, video: str) -> list:
        rows = source.get("narrations", []) if isinstance(source, dict) else []
        expect(isinstance(rows, list), path, f"video {video}", '"narrations" must be a list')
        return rows

    all_tracks = []
    for video in ego4d_split(root, split, videos):
        entry = videos[video]
        expect(isinstance(entry, dict), path, f"video {video}", "expected an object")
        # (pass, row, key of the time, key of the text); where there are no passes: None
        rows = [(None, row, "time", "text") for row in narration_list(entry, video)]
        for key, value in entry.items():
            if key.startswith("narration_pass"):
                rows += [(key, row, "timestamp_sec", "narration_text")
                         for row in narration_list(value, video)]

        narrations = defaultdict(list)         # annotator -> [(seconds, text)]
        for i, (annotation_pass, row, time_key, text_key) in enumerate(rows):
            place = f"video {video}, narration {i}"
            has_text = isinstance(row, dict) and isinstance(row.get(text_key), str)
            expect(has_text, path, place, f"has no {text_key}")
            time = to_seconds(row.get(time_key), path, place)
            text = clean(row[text_key])
            if len(text.split()) == 1:
                notes.add("narrations of one word left out")
                continue
            annotator = annotation_pass or str(row.get("_annotation_uid"))
            narrations[annotator].append((time, text))
        for annotator, annotator_rows in narrations.items():
            all_tracks.append(make_track(video, annotator, annotator_rows, notes))
    return all_tracks


def ego4d_split(root: Path, split: str, videos: Iterable[str]) -> list[str]:
    """The videos of a split.

    val     in the validation set of a benchmark
    test    in the test set of a benchmark, and in no validation set
    train   all others
    A file narration_stream_video_uids_SPLIT.json, if it is there, lists them instead.
    """
    list_path = find_annotations(root, f"narration_stream_video_uids_{split}.json")
    if list_path is not None:
        listed = read_json(list_path)
        expect(isinstance(listed, list), list_path, "top level", "expected a list of videos")
        listed = set(map(str, listed))
        return [video for video in videos if video in listed]

    held_out = {"val": set(), "test": set()}
    missing = []
    for held_out_split, suffix in (("val", "val"), ("test", "test_unannotated")):
        for benchmark, key in BENCHMARKS.items():
            path = find_annotations(root, f"{benchmark}_{suffix}.json")
            if path is None:
                missing.append(f"{benchmark}_{suffix}.json")
                continue
            content = read_json(path)
            has_list = isinstance(content, dict) and isinstance(content.get(key), list)
            expect(has_list, path, "top level", f'expected a list "{key}"')
            for row in content[key]:
                if isinstance(row, dict) and isinstance(row.get("video_uid"), str):
                    held_out[held_out_split].add(row["video_uid"])
    if missing:
        names = ", ".join(missing[:3])
        if len(missing) > 3:
            names += " ..."
        raise BadData(f"{root}: the split of Ego4D's raw narrations is made of its benchmarks' "
                      f"files, and {len(missing)} are missing: {names}; put them into "
                      f"{root}/annotations")
    held_out["test"] -= held_out["val"]
    if split == "train":
        return [video for video in videos if video not in held_out["val"] | held_out["test"]]
    return [video for video in videos if video in held_out[split]]


def egoexo4d(content: dict, path: Path, notes: Notes) -> list[Track]:
    """Published: {take: [{"descriptions": [{"timestamp", "text", "ego_visible"}]}, ...]}"""
    all_tracks = []
    for take, annotators in content.items():
        expect(isinstance(annotators, list), path, f"take {take}", "expected a list of annotators")
        for number, annotator in enumerate(annotators):
            entry = f"take {take}, annotator {number}"
            fields = annotator if isinstance(annotator, dict) else {}
            if fields.get("rejected"):
                notes.add("rejected annotators left out")
                continue
            rows = fields.get("descriptions")
            expect(isinstance(rows, list), path, entry, 'expected {"descriptions": [...]}')
            seen = []
            unseen = []
            for i, row in enumerate(rows):
                place = f"{entry}, description {i}"
                has_text = isinstance(row, dict) and isinstance(row.get("text"), str)
                expect(has_text, path, place, "has no text")
                time = to_seconds(row.get("timestamp"), path, place)
                if row.get("ego_visible") is False:
                    unseen.append((time, row["text"].strip()))
                else:
                    seen.append((time, row["text"].strip()))
            track = make_track(take, str(number), seen, notes)
            track.unseen = make_track(take, str(number), unseen, notes).narrations
            all_tracks.append(track)
    return all_tracks


def egoexo4d_raw(root: Path, split: str, notes: Notes) -> list[Track]:
    """{"annotations": {take: as in the published files}}"""
    path = find_annotations(root, RAW_FILES["egoexo4d"][0].format(split=split))
    if path is None:
        raise what_to_download("egoexo4d", root, split)
    content = read_json(path)
    has_annotations = isinstance(content, dict) and isinstance(content.get("annotations"), dict)
    expect(has_annotations, path, "top level", 'expected {"annotations": {take: [...]}}')
    return egoexo4d(content["annotations"], path, notes)


def take_names(root: Path) -> dict[str, str]:
    """EgoExo4D: {take_uid: take_name} from takes.json; {} without it."""
    path = find_annotations(root, "takes.json")
    if path is None:
        return {}
    content = read_json(path)
    expect(isinstance(content, list), path, "top level", "expected a list of takes")
    names = {}
    for take in content:
        if isinstance(take, dict) and "take_uid" in take and "take_name" in take:
            names[str(take["take_uid"])] = str(take["take_name"])
    return names


def ek100(content: dict, path: Path, notes: Notes) -> list[Track]:
    """Published: {video: [{"time", "text"}]}; one annotator, "0"."""
    all_tracks = []
    for video, rows in content.items():
        narrations = published_rows(rows, path, f"video {video}")
        all_tracks.append(make_track(video, "0", narrations, notes))
    return all_tracks


def epic_split(split: str) -> str:
    """The name of a split in EPIC's file names."""
    return "validation" if split == "val" else split


def ek100_raw(root: Path, split: str, notes: Notes) -> list[Track]:
    """A .csv file whose rows are not in order of time. A narration without a timestamp is put at
    the start of its action."""
    path = find_annotations(root, RAW_FILES["ek100"][0].format(split=epic_split(split)))
    if path is None:
        raise what_to_download("ek100", root, split)
    text = read_text(path)
    if "\0" in text:
        raise BadData(f"{path}: has zero bytes; damaged? get it again")
    narrations = defaultdict(list)             # video -> [(seconds, sentence)]
    reader = csv.DictReader(StringIO(text), strict=True)
    required = {"video_id", "narration", "start_timestamp"}
    try:
        expect(required <= set(reader.fieldnames or ()), path, "first line",
               f"expected the columns {', '.join(sorted(required))}")
        for row in reader:
            entry = f"line {reader.line_num}"
            # csv stores surplus cells under the key None, and None in place of missing cells
            complete = None not in row and None not in row.values()
            expect(complete, path, entry, "does not have as many columns as the first line")
            timestamp = (row.get("narration_timestamp") or "").strip()
            if timestamp in ("", "nan", "NaN"):
                notes.add("narrations without a timestamp, put at the start of their action")
                timestamp = row["start_timestamp"].strip()
            time = parse_time(timestamp, path, entry)
            verb = row.get("verb") or ""
            narrations[row["video_id"]].append((time, sentence(row["narration"], verb)))
    except csv.Error as error:
        raise BadData(f"{path}, line {reader.line_num}: is not CSV ({error})") from None
    return [make_track(video, "0", rows, notes) for video, rows in narrations.items()]


def parse_time(text: str, path: Path, entry: str) -> float:
    """"00:01:02.5" -> 62.5"""
    numbers = text.split(":")
    well_formed = len(numbers) == 3 and all(re.fullmatch(r"\d{1,9}(\.\d*)?", number)
                                            for number in numbers)
    expect(well_formed, path, entry, f"the time must be HH:MM:SS.sss, not {text!r}")
    hours, minutes, rest = map(float, numbers)
    return to_seconds(hours * 3600 + minutes * 60 + rest, path, entry)


READERS = {"ego4d": ego4d, "egoexo4d": egoexo4d, "ek100": ek100}
RAW_READERS = {"ego4d": ego4d_raw, "egoexo4d": egoexo4d_raw, "ek100": ek100_raw}


# ------------------------------------------------------------------- intervals, for evaluation


def intervals(name: str, root: Path, split: str, notes: Notes) -> list[Interval]:
    """The intervals that evaluation streams.

    Ego4D's val split: the summarised intervals, if segment_summaries.json is there. Otherwise each
    video from its first to its last narration, EgoExo4D's unseen descriptions included. As
    published, the first segment begins with the interval in Ego4D, and at 0 s in the others.
    """
    if name == "ego4d" and split == "val":
        summaries = find_annotations(root, "segment_summaries.json")
        if summaries is not None:
            return summarised(summaries, notes)

    tracks_of = defaultdict(list)              # video -> its tracks
    for track in every_track(name, root, split, notes):
        rows = sorted(track.narrations + track.unseen, key=lambda narration: narration[0])
        if rows:
            tracks_of[track.video].append(Track(track.video, track.annotator, rows))
        else:
            notes.add("annotators without narrations")

    all_intervals = []
    for video, video_tracks in tracks_of.items():
        start = min(track.narrations[0][0] for track in video_tracks)
        end = max(track.narrations[-1][0] for track in video_tracks)
        origin = start if name == "ego4d" else 0.0
        all_intervals.append(Interval(video, start, end, video_tracks, origin))
    return all_intervals


def summarised(path: Path, notes: Notes) -> list[Interval]:
    """The intervals of Ego4D's segment_summaries.json:

    {video: {"start, end": {annotator: {"narration": [{"time", "text"}], "summary": str}}}}
    An annotator's summary may be missing.
    """
    all_intervals = []
    content = read_json(path)
    expect(isinstance(content, dict), path, "top level",
           "expected an object with one entry per video")
    for video, entries in content.items():
        expect(isinstance(entries, dict), path, f"video {video}",
               'expected {"start, end": {annotator: {...}}}')
        for key, annotators in entries.items():
            place = f"video {video}, interval {key!r}"
            match = re.fullmatch(r"\s*(\d+\.?\d*)\s*,\s*(\d+\.?\d*)\s*", key)
            expect(match is not None and isinstance(annotators, dict), path, place,
                   'expected "start, end": {annotator: {...}}')
            start = to_seconds(float(match[1]), path, place)
            end = to_seconds(float(match[2]), path, place)
            interval = Interval(video, start, end, [], start)
            for annotator, entry in annotators.items():
                annotator_place = f"{place}, annotator {annotator}"
                fields = entry if isinstance(entry, dict) else {}
                rows = published_rows(fields.get("narration"), path, annotator_place)
                track = make_track(video, annotator, rows, notes)
                if track.narrations:
                    interval.tracks.append(track)
                text = fields.get("summary") or ""
                expect(isinstance(text, str), path, annotator_place, '"summary" must be text')
                summary = clean_summary(text)
                if summary:
                    interval.summaries.append(summary)
            all_intervals.append(interval)
    return all_intervals
