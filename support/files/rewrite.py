"""Raw narrations rewritten as sentences by a language model (paper §4.1). FlowNar-Data holds them
ready-made.

    python data.py rewrite --data ek100 --llm ID      EPIC's "open fridge" -> "You open the fridge."

Sentences are kept as they come, in a .jsonl beside the result, one ["MODEL: narration", sentence] a
line. To resume, repeat the command. Sentences of another model, or without the name of a model, are
not used.
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
from support.files.answers import read_answers
from support.files.tracks import Notes, Track

TEMPLATE = ("Rewrite the note about what the camera wearer does as one short English sentence in "
          "the second person and the present tense, with articles and a full stop. Add nothing. "
          "Answer with the sentence alone.\n"
          "Note: open fridge\nSentence: You open the fridge.\n"
          "Note: C puts the knife on the table\nSentence: You put the knife on the table.\n"
          "Note: {note}\nSentence:")


@torch.no_grad()
def rewrite(name: str, root: Path, split: str, limit: int | None, llm: str, device: str,
            dtype: torch.dtype) -> None:
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
    all_texts = set()
    for track in tracks:
        all_texts.update(text for _, text in track.narrations + track.unseen)
    texts = sorted(all_texts)

    kept = target.with_suffix(".jsonl")
    known = read_answers(kept, f'["{llm}: narration", sentence]')
    sentences = {text: known[f"{llm}: {text}"] for text in texts if f"{llm}: {text}" in known}
    unused = sum(not key.startswith(f"{llm}: ") for key in known)
    if unused:
        print(f"{kept}: {unused} sentences are of another model than {llm}, "
              f"or of none that is named; they are not used", file=sys.stderr)

    model, tokenizer = load_llm(llm, dtype)
    model.to(device).eval()
    to_do = [text for text in texts if text not in sentences]
    kept.parent.mkdir(parents=True, exist_ok=True)
    with naming(kept), kept.open("a", encoding="utf-8") as file:
        for text in progress(to_do, "rewriting", unit="sentence"):
            prompt = TEMPLATE.format(note=text.strip("."))
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(device)       # [1, L]
            output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40,
                                    do_sample=False, pad_token_id=tokenizer.eos_token_id)
            answer = tokenizer.decode(output[0, ids.shape[1]:], skip_special_tokens=True)
            # the first line, because some models go on with another note
            lines = answer.strip().splitlines()
            sentence = lines[0].strip() if lines else ""
            sentences[text] = sentence or text
            file.write(json.dumps([f"{llm}: {text}", sentences[text]]) + "\n")
            file.flush()
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
