#!/usr/bin/env bash
# Expected: subtitles hold each sentence; one that could not be aligned to the sound keeps its own time.
# whisperx's aligner says "resorting to original" of such a sentence and leaves it with its time, its text and an empty
# list of words. The writers of .srt and .vtt go by the words and lose it without a warning, though a result without any
# words is written whole; .txt and .tsv keep it. SubtitlesProcessor loses it, too, and with advanced_splitting=False
# it writes an empty file and returns the number of subtitles that it should have written.
# Versions: whisperx 3.8.6.
# Who meets it: whoever aligns a transcript or narrations and publishes the subtitles: short pieces, much text at once.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --no-deps whisperx==3.8.6
cd "$place"
"$place/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

from whisperx.SubtitlesProcessor import SubtitlesProcessor
from whisperx.utils import WriteSRT, WriteTSV, WriteTXT, WriteVTT

aligner = Path(find_spec("whisperx").origin).with_name("alignment.py").read_text()
failed = aligner.count("resorting to original"), aligner.count('"words": [],')
print(f"whisperx {version('whisperx')}; in alignment.py: 'resorting to original' {failed[0]} times,", end=" ")
print(f"segments that begin with an empty list of words: {failed[1]}")
said = (0.0, 2.0, "Cuts an onion."), (3.0, 3.3, "Puts it into the hot pan."), (4.0, 6.0, "Fries it.")


def aligned(*known):
    parts = [dict(start=start, end=end, text=text) for start, end, text in said]
    for part, is_known in zip(parts, known):
        words = part["text"].split()
        step = (part["end"] - part["start"]) / len(words)
        part["words"] = [
            dict(word=word, start=part["start"] + i * step, end=part["start"] + (i + 1) * step)
            for i, word in enumerate(words)
            if is_known
        ]
    return parts


def written(writer, parts):
    text = StringIO()
    options = dict(max_line_width=None, max_line_count=None, highlight_words=False)
    writer(".").write_result(dict(segments=parts, language="en"), text, options)
    return text.getvalue()


def processed(parts, **how):
    count = SubtitlesProcessor(parts, "en").save("found.srt", **how)
    return count, Path("found.srt").read_text()


plain = [dict(start=start, end=end, text=text) for start, end, text in said]
cases = dict(all_aligned=aligned(True, True, True), one_not_aligned=aligned(True, False, True), none_has_words=plain)
found = []
for name, parts in cases.items():
    texts = [written(writer, parts) for writer in (WriteTXT, WriteTSV, WriteSRT, WriteVTT)]
    found.append([sum(text in whole for _, _, text in said) for whole in texts])
    print(f"{name}: of 3 sentences, .txt, .tsv, .srt and .vtt have {found[-1]}")
print(written(WriteSRT, cases["one_not_aligned"]).rstrip())
for name, how in ("one_not_aligned", {}), ("all_aligned", {}), ("all_aligned", dict(advanced_splitting=False)):
    count, whole = processed(cases[name], **how)
    found.append([count, sum(text in whole for _, _, text in said)])
    print(f"SubtitlesProcessor, {name}, {how}: says {count}, has {found[-1][1]}")
before = [[3, 3, 3, 3], [3, 3, 2, 2], [3, 3, 3, 3], [2, 2], [3, 3], [3, 0]]
if found != before or failed != (2, 1):
    print(f"changed: {found}, {failed}; {before}, (2, 1) before")
    raise SystemExit(1)
PYTHON
