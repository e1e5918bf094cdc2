"""Raw narrations rewritten as sentences by a language model (paper §4.1): what FlowNar-Data holds ready-made.

    python data.py rewrite --data ek100 --llm ID      EPIC's "open fridge" -> "You open the fridge."

Sentences are kept in a .jsonl beside the result as they come, one ["MODEL: narration", sentence] a line; repeat it to
resume. Those of another model, and those of files that do not name one, are not used.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from support.common.disk import check_writable, naming, write_json
from support.common.errors import BadData
from support.common.progress import progress
from support.engine.checkpoint import load_llm
from support.files.annotations import PUBLISHED_FILES, every_track, find_annotations
from support.files.tracks import Notes, Track

TEMPLATE = ("Rewrite the note about what the camera wearer does as one short English sentence in the second person and "
          "the present tense, with articles and a full stop. Add nothing. Answer with the sentence alone.\n"
          "Note: open fridge\nSentence: You open the fridge.\n"
          "Note: C puts the knife on the table\nSentence: You put the knife on the table.\n"
          "Note: {note}\nSentence:")


@torch.no_grad()
def rewrite(name: str, root: Path, split: str, limit: int | None, llm: str, device: str, dtype: torch.dtype) -> None:
    """Write a data set's annotations in the published layout, with sentences rewritten by the language model `llm`.

    limit: at most so many tracks. Raises BadData if the file exists, or if the raw annotations do not.
    """
    target = root / "annotations" / PUBLISHED_FILES[name].format(split=split)
    if there := find_annotations(root, target.name):
        raise BadData(f"{there} exists: move it away to write it again")
    tracks = every_track(name, root, split, Notes())[:limit]
    check_writable(target)
    texts = sorted({text for track in tracks for _, text in track.narrations + track.unseen})
    kept = target.with_suffix(".jsonl")
    known = resume(kept, f'["{llm}: narration", sentence]')
    sentences = {text: known[f"{llm}: {text}"] for text in texts if f"{llm}: {text}" in known}
    if others := sum(not key.startswith(f"{llm}: ") for key in known):
        print(f"{kept}: {others} sentences are of another model than {llm}, or of none that is named; they are not "
              f"used", file=sys.stderr)
    model, tokenizer = load_llm(llm, dtype)
    model.to(device).eval()
    kept.parent.mkdir(parents=True, exist_ok=True)
    with naming(kept), kept.open("a", encoding="utf-8") as file:
        for text in progress([text for text in texts if text not in sentences], "rewriting",
                             unit="sentence"):
            ids = tokenizer(TEMPLATE.format(note=text.strip(".")), return_tensors="pt")["input_ids"].to(device)
            written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False,
                                     pad_token_id=tokenizer.eos_token_id)[0, ids.shape[1]:]
            lines = tokenizer.decode(written, skip_special_tokens=True).strip().splitlines()
            sentences[text] = lines[0].strip() if lines and lines[0].strip() else text
            file.write(json.dumps([f"{llm}: {text}", sentences[text]]) + "\n")
            file.flush()
    write_json(target, published(name, tracks, sentences))
    print(f"{target}: {len(texts)} sentences, {len(tracks)} annotators")


def resume(path: Path, form: str) -> dict[str, str]:
    """The sentences of earlier runs, by the model and what it made them of; an incomplete last line, left by a kill, is
    cut off the file. form: what a line should be, for the error."""
    if not path.exists():
        return {}
    content = path.read_bytes()
    whole = content[:content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    found = {}
    for n, line in enumerate(whole.splitlines(), 1):
        try:
            text, sentence = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            text = sentence = None
        if not isinstance(text, str) or not isinstance(sentence, str):
            raise BadData(f"{path}, line {n}: must be {form}; delete the line")
        found[text] = sentence
    return found


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
            described = [(time, text, True) for time, text in track.narrations]
            described += [(time, text, False) for time, text in track.unseen]
            content.setdefault(track.video, []).append({"descriptions": [
                {"timestamp": time, "text": sentences[text], "ego_visible": seen} for time, text, seen in described]})
    return content
