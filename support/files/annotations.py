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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

from support.common.disk import is_number, read_json, read_text
from support.common.errors import BadData, NotDownloaded, first_line
from support.files.tracks import Interval, Notes, Track


# ------------------------------------------------------------------------------------------- files

SPLITS_OF = {
    "ego4d": ("train", "val", "test"),
    "egoexo4d": ("train", "val"),
    "ek100": ("train", "val"),
}
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
# where the raw files are had, and what else they need
OWNERS = {
    "ego4d": "ego4d-data.org, with the benchmarks' files of the same release "
             "(they say which video is for validation)",
    "egoexo4d": "ego-exo4d-data.org, with takes.json",
    "ek100": "epic-kitchens.github.io",
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


def raw_files(name: str, split: str) -> list[str]:
    """The names of the owners' files, of which one is enough."""
    if name == "ek100" and split == "val":
        split = "validation"
    return [file.format(split=split) for file in RAW_FILES[name]]


def what_to_download(name: str, root: Path, split: str) -> NotDownloaded:
    """The error if a data set has no annotations: the files to get, and the place to put them."""
    published = PUBLISHED_FILES[name].format(split=split)
    raw = " or ".join(raw_files(name, split))
    return NotDownloaded(
        f"{name} is not in {root} (--root FOLDER looks elsewhere). It needs two things:\n"
        f"  annotations  {root}/annotations/{published}"
        f"  from huggingface.co/datasets/zeyun-zhong/FlowNar-Data,\n"
        f"               or {raw} from {OWNERS[name]}\n"
        f"  features     {root}/features_metadata.json and the files it names"
        f" under {root}/features,\n"
        f"               from FlowNar-Data, or by python data.py encode VIDEO..."
        f" --output {root}/features\n"
        f"To try training at once, without any data: --data toy")


@contextmanager
def as_published(path: Path) -> Iterator[None]:
    """Within it, a file is read as its owners publish it. BadData names it if it is different."""
    try:
        yield
    except BadData:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError,
            csv.Error) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise BadData(f"{path}: does not hold what its owners put there ({reason}); "
                      f"damaged? get it again") from error


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


def to_narrations(rows: list[dict], place: str, time_key: str = "time",
                  text_key: str = "text") -> list[tuple[float, str]]:
    """[{"time": seconds, "text": str}, ...] -> [(seconds, text)]"""
    narrations = []
    for number, row in enumerate(rows):
        time = row.get(time_key)
        text = row.get(text_key)
        if not is_number(time) or not isinstance(text, str):
            raise BadData(f"{place}, narration {number}: expected a {time_key}, a number of "
                          f"seconds, and a {text_key}, not {str(row)[:60]}")
        narrations.append((float(time), text))
    return narrations


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


# ------------------------------------------------------------------------ tracks of a data set


def tracks(name: str, root: Path, split: str, notes: Notes) -> list[Track]:
    """All tracks of a split with narrations, for training and teacher-forced evaluation.

    Raises NotDownloaded if there are no annotations, BadData naming the file if it is damaged.
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
    if split not in SPLITS_OF[name]:
        raise BadData(f"{name} has no split {split!r}; choose one of {', '.join(SPLITS_OF[name])}")
    path = find_annotations(root, PUBLISHED_FILES[name].format(split=split))
    if path is not None:
        read = {"ego4d": ego4d, "egoexo4d": egoexo4d, "ek100": ek100}[name]
        with as_published(path):
            return read(read_json(path), path, notes)

    path = find_annotations(root, *raw_files(name, split))
    if path is None:
        raise what_to_download(name, root, split)
    with as_published(path):
        if name == "ek100":
            return ek100_raw(path, notes)
        content = read_json(path)
        if name == "egoexo4d":
            return egoexo4d(content["annotations"], path, notes)
        videos = content.get("videos", content)
        videos = {video: videos[video] for video in ego4d_split(root, split, videos)}
        return ego4d_raw(videos, path, notes)


def ego4d(content: dict, path: Path, notes: Notes) -> list[Track]:
    """Published: {video: {annotator: [{"time", "text"}]}}"""
    all_tracks = []
    for video, annotators in content.items():
        for annotator, rows in annotators.items():
            narrations = to_narrations(rows, f"{path}, video {video}, annotator {annotator}")
            all_tracks.append(make_track(video, annotator, narrations, notes))
    return all_tracks


def ego4d_raw(videos: dict, path: Path, notes: Notes) -> list[Track]:
    """In all_narrations_redacted.json, each annotator becomes a track:
        {video: {"narrations": [{"time", "text", "_annotation_uid"}]}}
    In narration.json, each of the two passes becomes a track:
        {video: {"narration_pass_1": {"narrations": [{"timestamp_sec", "narration_text"}]}, ...}}
    """
    all_tracks = []
    for video, entry in videos.items():
        place = f"{path}, video {video}"
        narrations_of = defaultdict(list)      # annotator -> [(seconds, text)]
        for row in entry.get("narrations", []):
            narrations_of[str(row.get("_annotation_uid"))] += to_narrations([row], place)
        for key, annotation_pass in entry.items():
            if key.startswith("narration_pass"):
                rows = annotation_pass.get("narrations", [])
                narrations_of[key] += to_narrations(rows, place, "timestamp_sec", "narration_text")

        for annotator, narrations in narrations_of.items():
            cleaned = [(time, clean(text)) for time, text in narrations]
            longer = [(time, text) for time, text in cleaned if len(text.split()) != 1]
            notes.add("narrations of one word left out", len(cleaned) - len(longer))
            all_tracks.append(make_track(video, annotator, longer, notes))
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
        with as_published(list_path):
            listed = set(read_json(list_path))
        return [video for video in videos if video in listed]

    missing = []

    def listed_by_benchmarks(suffix: str) -> set[str]:
        listed = set()
        for benchmark, key in BENCHMARKS.items():
            file = f"{benchmark}_{suffix}.json"
            path = find_annotations(root, file)
            if path is None:
                missing.append(file)
                continue
            with as_published(path):
                listed |= {row.get("video_uid") for row in read_json(path)[key]}
        return listed

    val = listed_by_benchmarks("val")
    test = listed_by_benchmarks("test_unannotated") - val
    if missing:
        raise BadData(f"{root}: the split of Ego4D's raw narrations is made of its benchmarks' "
                      f"files, and {len(missing)} are missing: {', '.join(missing)}; put them into "
                      f"{root}/annotations")
    if split == "train":
        return [video for video in videos if video not in val | test]
    chosen = val if split == "val" else test
    return [video for video in videos if video in chosen]


def egoexo4d(content: dict, path: Path, notes: Notes) -> list[Track]:
    """{take: [{"rejected", "descriptions": [{"timestamp", "text", "ego_visible"}]}, ...]}"""
    all_tracks = []
    for take, annotators in content.items():
        for number, annotator in enumerate(annotators):
            if annotator.get("rejected"):
                notes.add("rejected annotators left out")
                continue
            seen = []
            unseen = []
            place = f"{path}, take {take}, annotator {number}"
            for row in annotator["descriptions"]:
                (time, text), = to_narrations([row], place, "timestamp")
                if row.get("ego_visible") is False:
                    unseen.append((time, text.strip()))
                else:
                    seen.append((time, text.strip()))
            track = make_track(take, str(number), seen, notes)
            hidden = make_track(take, str(number), unseen, notes)
            track.unseen = hidden.narrations
            all_tracks.append(track)
    return all_tracks


def take_names(root: Path) -> dict[str, str]:
    """EgoExo4D: {take_uid: take_name} from takes.json; {} without it."""
    path = find_annotations(root, "takes.json")
    if path is None:
        return {}
    with as_published(path):
        return {take["take_uid"]: take["take_name"] for take in read_json(path)}


def ek100(content: dict, path: Path, notes: Notes) -> list[Track]:
    """Published: {video: [{"time", "text"}]}; one annotator, "0"."""
    return [make_track(video, "0", to_narrations(rows, f"{path}, video {video}"), notes)
            for video, rows in content.items()]


def ek100_raw(path: Path, notes: Notes) -> list[Track]:
    """A .csv file whose rows are not in order of time. A narration without a timestamp is put at
    the start of its action.
    """
    narrations_of = defaultdict(list)          # video -> [(seconds, sentence)]
    # strict: a quote without its end is an error, and does not take in all lines after it
    reader = csv.DictReader(StringIO(read_text(path)), strict=True)
    for row in reader:
        place = f"{path}, line {reader.line_num}"
        # csv stores surplus cells under the key None, and None in place of missing cells
        if None in row or None in row.values():
            raise BadData(f"{place}: does not have as many columns as the first line")
        timestamp = row["narration_timestamp"]
        if timestamp in ("", "nan", "NaN"):
            notes.add("narrations without a timestamp, put at the start of their action")
            timestamp = row["start_timestamp"]
        text = sentence(row["narration"], row["verb"])
        narrations_of[row["video_id"]].append((parse_time(timestamp, place), text))
    return [make_track(video, "0", rows, notes) for video, rows in narrations_of.items()]


def parse_time(text: str, place: str) -> float:
    """"00:01:02.5" -> 62.5"""
    match = re.fullmatch(r"(\d{1,4}):(\d\d?):(\d\d?(?:\.\d*)?)", text.strip())
    if match is None:
        raise BadData(f"{place}: the time must be HH:MM:SS.sss, not {text[:60]!r}")
    hours, minutes, seconds = map(float, match.groups())
    return hours * 3600 + minutes * 60 + seconds


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
        narrations = sorted(track.narrations + track.unseen, key=lambda narration: narration[0])
        if narrations:
            tracks_of[track.video].append(Track(track.video, track.annotator, narrations))
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
    with as_published(path):
        for video, entries in read_json(path).items():
            for key, annotators in entries.items():
                start, end = map(float, key.split(","))
                if not (is_number(end) and 0 <= start <= end):
                    raise ValueError(f'"start, end" cannot be {key}')
                interval = Interval(video, start, end, [], start)
                for annotator, entry in annotators.items():
                    place = f"{path}, video {video}, interval {key}, annotator {annotator}"
                    narrations = to_narrations(entry["narration"], place)
                    track = make_track(video, annotator, narrations, notes)
                    if track.narrations:
                        interval.tracks.append(track)
                    summary = clean_summary(entry.get("summary") or "")
                    if summary:
                        interval.summaries.append(summary)
                all_intervals.append(interval)
    return all_intervals
