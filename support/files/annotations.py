"""Ego4D, EgoExo4D and EPIC-Kitchens-100: annotation files as narrations in time (§4.1, App. B.4).

published   sentences that a language model has rewritten (FlowNar-Data). The paper's models were
            trained on them.
raw         the files of the owners of Ego4D and EgoExo4D, which will do as well. Tags are removed.
            EPIC-Kitchens' own files have labels ("open fridge"), and no sentences.

Glossary
track       one annotator's narrations of one video: [(seconds, sentence)], sorted by time
unseen      EgoExo4D's descriptions of things outside the camera wearer's view. They are left out of
            training, but they are part of the streamed interval
interval    the part of a video that is streamed in evaluation, with all tracks in it
notes       counts of all corrections made while reading. Nothing is dropped silently
"""
import re
from collections import defaultdict
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

from support.common.disk import expecting, read_json
from support.common.errors import BadData, NotDownloaded
from support.files.narrations import to_sentences
from support.files.sentences import NarratedVideo, Notes, Sentence


FPS = 2                                        # frames a second of the three data sets (§4.1)


# ------------------------------------------------------------------------------------------- files

SPLITS_OF = {
    "ego4d": ("train", "val", "test"),
    "egoexo4d": ("train", "val"),
    "ek100": ("train", "val"),
}
# the published file of each data set; and its raw one, where that will do
FILES_OF = {
    "ego4d": ("refined_narration_stream_{split}.json", "all_narrations_redacted.json"),
    "egoexo4d": ("refined_egocentric_atomic_descriptions_gpt_{split}.json",
                 "atomic_descriptions_{split}.json"),
    "ek100": ("refined_{split}_narrations.json",),
}
# where the raw files are had, and what else they need, for errors
OWNERS = {
    "ego4d": "ego4d-data.org, with the benchmarks' files of the same release "
             "(they say which video is for validation)",
    "egoexo4d": "ego-exo4d-data.org, with takes.json",
}
# what a file of a data set is expected to hold, for errors
AS_PUBLISHED = "what its owners put there; damaged? get it again"
# Ego4D has no split for narrations: a video is for validation if a benchmark's val file lists it.
# benchmark -> the key of the list in its files
BENCHMARKS = {"goalstep": "videos", "fho_lta": "clips", "nlq": "videos", "moments": "videos",
              "av": "videos", "fho_oscc-pnr": "clips", "fho_sta": "annotations", "vq": "videos"}


def files_of(name: str, split: str) -> list[str]:
    """The published file of a data set, and its raw one, if that will do."""
    return [file.format(split=split) for file in FILES_OF[name]]


def find_annotations(root: Path, *names: str) -> Path | None:
    """The first of the named files that exists in root/annotations, root or root/v2/annotations."""
    for name in names:
        for folder in (root / "annotations", root, root / "v2" / "annotations"):
            if (folder / name).is_file():
                return folder / name
    return None


def what_to_download(name: str, root: Path, split: str) -> NotDownloaded:
    """The error if a data set has no annotations: the files to get, and the place to put them."""
    published, *others = files_of(name, split)
    raw = ""
    if others:
        raw = f",\n               or {others[0]} from {OWNERS[name]}"
    features = root / "features_metadata.json"
    if features.is_file():
        needed = f"{features} is there"
    else:
        needed = (
            f"{features} and the files it names under {root}/features,\n"
            f"               from FlowNar-Data (parts of a .tar are joined by cat; its egoexo is our\n"
            f"               egoexo4d), or by python data.py encode VIDEO... --output {root}/features")
    return NotDownloaded(
        f"{name} has no annotations in {root} (--root FOLDER looks elsewhere). It needs two things:\n"
        f"  annotations  {root}/annotations/{published}"
        f"  from huggingface.co/datasets/zeyun-zhong/FlowNar-Data{raw}\n"
        f"  features     {needed}\n"
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


# ----------------------------------------------------------------------------- layouts of the files

# Each function brings a layout into one form, {video: {annotator: [row, ...]}}. A row has a time
# and a text (narrations.py: to_sentences), and EgoExo4D's "ego_visible".
Rows = dict[str, dict[str, list[dict]]]


def ego4d_raw(content: dict, notes: Notes) -> Rows:
    """{video: {"narrations": [{"time", "text", "_annotation_uid"}]}}; each annotator is a track"""
    rows_of = {}
    for video, entry in content.items():
        rows_of[video] = defaultdict(list)
        for row in entry.get("narrations", []):
            text = clean(row["text"])
            if len(text.split()) == 1:
                notes.add("narrations of one word left out")
                continue
            rows_of[video][row["_annotation_uid"]].append(row | {"text": text})
    return rows_of


def egoexo4d(content: dict, notes: Notes) -> Rows:
    """{take: [{"rejected", "descriptions": [{"timestamp", "text", "ego_visible"}]}, ...]}"""
    rows_of = defaultdict(dict)
    for take, annotators in content.items():
        for number, annotator in enumerate(annotators):
            if flag(annotator, "rejected"):
                notes.add("rejected annotators left out")
                continue
            rows_of[take][str(number)] = [
                row | {"time": row["timestamp"], "text": row["text"].strip()}
                for row in annotator["descriptions"]
            ]
    return rows_of


def flag(row: dict, name: str) -> bool | None:
    """EgoExo4D's true, false, or null, which may be left out; ValueError for what is none of them."""
    value = row.get(name)
    if not isinstance(value, bool | None):
        raise ValueError(f"{name} is {value!r}; true, false and null are read: {row!r:.200}")
    return value


def take_names(root: Path) -> dict[str, str]:
    """EgoExo4D: {take_uid: take_name} from takes.json; {} without it."""
    path = find_annotations(root, "takes.json")
    if path is None:
        return {}
    with expecting(path, AS_PUBLISHED):
        return {take["take_uid"]: take["take_name"] for take in read_json(path)}


def ego4d_split(root: Path, split: str, content: dict) -> dict:
    """The entries of the videos of a split.

    val     in the validation set of a benchmark
    test    in the test set of a benchmark, and in no validation set
    train   all others
    """
    split_of = {}
    for listed_split, suffix in (("test", "test_unannotated"), ("val", "val")):
        for benchmark, key in BENCHMARKS.items():
            path = find_annotations(root, f"{benchmark}_{suffix}.json")
            if path is None:
                raise BadData(f"{root}: {benchmark}_{suffix}.json is missing; the split of Ego4D's "
                              f"raw narrations is made of its benchmarks' files, *_val.json and "
                              f"*_test_unannotated.json of {', '.join(BENCHMARKS)}; put them into "
                              f"{root}/annotations")
            with expecting(path, AS_PUBLISHED):
                for row in read_json(path)[key]:
                    split_of[row["video_uid"]] = listed_split
    return {video: entry for video, entry in content.items()
            if split_of.get(video, "train") == split}


# ------------------------------------------------------------------------ tracks of a data set


def in_time(rows: list[dict], place: str, notes: Notes) -> list[Sentence]:
    """Rows as sentences: sorted, no time below 0, no sentence without words."""
    sentences = []
    for sentence in to_sentences(rows, place):
        if not sentence.text.strip(" .\n"):
            notes.add("narrations without words left out")
            continue
        if sentence.time < 0:
            notes.add("narrations moved from before the start of their video to 0 s")
            sentence = Sentence(0.0, sentence.text)
        sentences.append(sentence)
    return sentences


def tracks(name: str, root: Path, split: str, notes: Notes) -> list[NarratedVideo]:
    """One annotator of one video each, for training and teacher-forced evaluation.

    Raises NotDownloaded if there are no annotations, BadData naming the file if it is damaged.
    """
    kept = []
    for video, annotator, seen, unseen in every_annotator(name, root, split, notes):
        notes.add("descriptions of what the camera wearer cannot see left out", len(unseen))
        if seen:
            kept.append(NarratedVideo([seen], name=f"{video}/{annotator}", video=video))
        else:
            notes.add("annotators without narrations")
    return kept


def every_annotator(name: str, root: Path, split: str, notes: Notes) -> Iterator[tuple]:
    """(video, annotator, sentences of what the camera wearer sees, and of what not) of all
    annotators of a split, also of those without sentences. Only EgoExo4D says what is not seen. The
    authors' files are read if they are there, else the raw ones.

    Raises as `tracks` does.
    """
    if split not in SPLITS_OF[name]:
        raise BadData(f"{name} has no split {split!r}; choose one of {', '.join(SPLITS_OF[name])}")
    files = files_of(name, split)
    path = find_annotations(root, *files)
    if path is None:
        raise what_to_download(name, root, split)

    with expecting(path, AS_PUBLISHED):
        content = read_json(path)
        if name == "ek100":                    # {video: [{"time", "text"}]}
            rows_of = {video: {"0": rows} for video, rows in content.items()}
        elif name == "egoexo4d":               # the raw file has more beside the annotations
            rows_of = egoexo4d(content.get("annotations", content), notes)
        elif path.name == files[0]:            # {video: {annotator: [{"time", "text"}]}}
            rows_of = content
        else:
            of_split = ego4d_split(root, split, content.get("videos", content))
            rows_of = ego4d_raw(of_split, notes)
        for video in list(rows_of):
            rows_of_video = rows_of.pop(video)  # so that half of millions of rows are in memory
            for annotator, rows in rows_of_video.items():
                place = f"{path}, video {video}, annotator {annotator}"
                seen = []
                unseen = []
                for row in rows:
                    visible = flag(row, "ego_visible")      # EgoExo4D alone says so
                    (unseen if visible is False else seen).append(row)
                yield video, annotator, in_time(seen, place, notes), in_time(unseen, place, notes)


# ------------------------------------------------------------------- intervals, for evaluation


def intervals(name: str, root: Path, split: str, notes: Notes) -> list[NarratedVideo]:
    """The intervals that evaluation streams, with all annotators.

    Ego4D's val split: the summarised intervals, if segment_summaries.json is there. Otherwise each
    video from its first to its last narration, EgoExo4D's unseen descriptions included. As in the
    authors' code, the first segment begins with the interval in Ego4D, and at 0 s in the others.
    """
    if name == "ego4d" and split == "val":
        path = find_annotations(root, "segment_summaries.json")
        if path is not None:
            return summarised(path, notes)

    annotators_of = defaultdict(list)          # video -> the sentences of its annotators
    for video, _, seen, unseen in every_annotator(name, root, split, notes):
        if seen or unseen:
            annotators_of[video].append(sorted(seen + unseen, key=attrgetter("time")))
        else:
            notes.add("annotators without narrations")

    all_intervals = []
    for video, annotators in annotators_of.items():
        times = [sentence.time for sentences in annotators for sentence in sentences]
        origin = min(times) if name == "ego4d" else 0.0
        all_intervals.append(NarratedVideo(annotators, origin, video=video, start=min(times),
                                           end=max(times)))
    return on_frames(all_intervals)


def on_frames(all_intervals: list[NarratedVideo]) -> list[NarratedVideo]:
    """Intervals with their frames and their names, as in the authors' code: the first frame is
    rounded down (for training, up), the last one is included, and a name is made of the video and
    both. Where these are the same, names differ by a "+", so that no interval is lost.
    """
    names = set()
    for interval in all_intervals:
        interval.first = int(interval.start * FPS)
        interval.stop = int(interval.end * FPS) + 1
        if not 0 <= interval.first < interval.stop:
            raise ValueError(f"an interval from {interval.start} to {interval.end} s")
        interval.name = f"{interval.video}_{interval.first}_{interval.stop}"
        while interval.name in names:
            interval.name += "+"
        names.add(interval.name)
    return all_intervals


def summarised(path: Path, notes: Notes) -> list[NarratedVideo]:
    """The intervals of Ego4D's segment_summaries.json:

    {video: {"start, end": {annotator: {"narration": [{"time", "text"}], "summary": str}}}}
    An annotator's summary may be missing.
    """
    all_intervals = []
    with expecting(path, AS_PUBLISHED):
        for video, entries in read_json(path).items():
            for key, annotators in entries.items():
                start, end = map(float, key.split(","))
                interval = NarratedVideo([], start, video=video, start=start, end=end)
                for annotator, entry in annotators.items():
                    place = f"{path}, video {video}, annotator {annotator}"
                    sentences = in_time(entry["narration"], place, notes)
                    if sentences:
                        interval.annotators.append(sentences)
                    interval.summaries.append((entry.get("summary") or "").strip())
                all_intervals.append(interval)
        return on_frames(all_intervals)
