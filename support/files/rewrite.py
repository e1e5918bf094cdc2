"""Raw narrations rewritten as sentences by a language model (paper §4.1). FlowNar-Data holds them
ready-made.

    python data.py rewrite --data ek100 --llm ID      EPIC's "open fridge" -> "You open the fridge."

Answers are kept as they come, in a .jsonl beside the result. To resume, repeat the command.
"""
from __future__ import annotations

from pathlib import Path

from support.common.disk import check_writable, write_json
from support.common.errors import BadData
from support.common.progress import progress
from support.files.annotations import PUBLISHED_FILES, every_track, find_annotations
from support.files.answers import Answers
from support.files.tracks import Notes, Track

TEMPLATE = ("Rewrite the note about what the camera wearer does as one short English sentence in "
          "the second person and the present tense, with articles and a full stop. Add nothing. "
          "Answer with the sentence alone.\n"
          "Note: open fridge\nSentence: You open the fridge.\n"
          "Note: C puts the knife on the table\nSentence: You put the knife on the table.\n"
          "Note: {note}\nSentence:")


def rewrite(name: str, root: Path, split: str, limit: int | None, llm: str,
            device: str = "auto") -> None:
    """Write a data set's annotations in the published layout, with sentences rewritten by the
    language model `llm`.

    limit: at most so many tracks. Raises BadData if the file exists, or if the raw annotations do
    not.
    """
    target = root / "annotations" / PUBLISHED_FILES[name].format(split=split)
    existing = find_annotations(root, target.name)
    if existing:
        raise BadData(f"{existing} exists: move it away to write it again")
    tracks = every_track(name, root, split, Notes())[:limit]
    check_writable(target)
    answers = Answers(llm, target.with_suffix(".jsonl"), device)
    texts = {text for track in tracks for _, text in track.narrations + track.unseen}
    sentences = {}
    for text in progress(sorted(texts), "rewriting", unit="sentence"):
        answer = answers.ask(TEMPLATE.format(note=text.strip(".")), 40)
        # the first line, because some models go on with another note
        first_line, _, _ = answer.partition("\n")
        sentences[text] = first_line.strip() or text
    write_json(target, published(name, tracks, sentences))
    print(f"{target}: {len(texts)} sentences, {len(tracks)} annotators")


def published(name: str, tracks: list[Track], sentences: dict[str, str]) -> dict:
    """The content of a data set's published annotation file."""
    content: dict = {}
    for track in tracks:
        rows = [{"time": time, "text": sentences[text]} for time, text in track.narrations]
        if name == "ek100":
            content[track.video] = rows
        elif name == "ego4d":
            content.setdefault(track.video, {})[track.annotator] = rows
        else:
            descriptions = []
            for narrations, visible in ((track.narrations, True), (track.unseen, False)):
                for time, text in narrations:
                    descriptions.append({"timestamp": time, "text": sentences[text],
                                         "ego_visible": visible})
            content.setdefault(track.video, []).append({"descriptions": descriptions})
    return content
