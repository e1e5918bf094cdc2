#!/usr/bin/env bash
# Expected: in TTML a time counts from the start of the element around it: a sentence from 10 to 12 s in a part that
# begins at 100 s is shown from 110 to 112 s.
# ttconv reckons the end of a part that does not state it from the times within, without adding the part's own start:
# a part that begins at 1 s cuts the sentence to one second, one that begins at 100 s loses it, without a warning; of
# three words that appear one by one in a paragraph at 5 s, one is left, for one second. With a stated end all is right.
# pycaption leaves the start of the part out: the sentence comes at 10 s in all. pysubs2 reads them as expected.
# Versions: ttconv 1.2.3, pycaption 2.3.14, pysubs2 1.8.1.
# Who meets it: whoever converts TTML or IMSC whose chapters, clips or words have starts of their own.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet ttconv==1.2.3 pysubs2==1.8.1 pycaption==2.3.14 beautifulsoup4==4.15.0 \
  lxml==6.1.3
"$place/venv/bin/python" -W ignore - <<'PYTHON'
import io
from importlib.metadata import version
from xml.etree import ElementTree

import pycaption
import pysubs2
import ttconv.imsc.reader
import ttconv.srt.writer


def by_ttconv(text):
    document = ttconv.imsc.reader.to_model(ElementTree.parse(io.StringIO(text)))
    return by_pysubs2(ttconv.srt.writer.from_model(document), "srt")


def by_pycaption(text):
    cues = pycaption.DFXPReader().read(text).get_captions("en")
    return [(cue.start // 1000, cue.end // 1000, cue.get_text()) for cue in cues]


def by_pysubs2(text, kind="ttml"):
    return [(cue.start, cue.end, cue.text) for cue in pysubs2.SSAFile.from_string(text, kind)]


tt = '<tt xmlns="http://www.w3.org/ns/ttml" xml:lang="en"><body><div{}>{}</div></body></tt>'
sentence = '<p begin="10s" end="12s">cuts an onion</p>'
word = '<span begin="{}s" end="{}s">{}</span>'
words = word.format(0, 2, "cuts") + word.format(2, 4, "an") + word.format(4, 6, "onion")
readers = {"ttconv": by_ttconv, "pycaption": by_pycaption, "pysubs2": by_pysubs2}
print(", ".join(f"{name} {version(name)}" for name in readers))
found = []
for start in (' begin="1s"', ' begin="100s"', ' begin="100s" end="200s"'):
    for name, read in readers.items():
        found.append(read(tt.format(start, sentence)))
        print(f"<div{start}>, {name}:", *found[-1])
for start in ('begin="5s"', 'begin="5s" end="11s"'):
    found.append(by_ttconv(tt.format("", f"<p {start}>{words}</p>")))
    print(f"<p {start}>, word by word, ttconv:", *found[-1])
at = {start: (start * 1000, start * 1000 + 2000, "cuts an onion") for start in (10, 11, 110)}
before = [[(11000, 12000, "cuts an onion")], [at[10]], [at[11]], [], [at[10]], [at[110]], [at[110]], [at[10]], [at[110]]]
before += [[(5000, 6000, "cuts")], [(5000, 7000, "cuts"), (7000, 9000, "an"), (9000, 11000, "onion")]]
if found != before:
    raise SystemExit(f"changed: {found}; {before} before")
PYTHON
