#!/usr/bin/env bash
# Expected: a TextGrid that Praat has saved as text, short text or binary has the same sentences and times in all three.
# praat-textgrids ends a sentence of the text form at " = ": "writes a = b, then stops" is "writes a". Quotation marks, which
# Praat doubles, stay doubled, and those at the end of a sentence are lost: "says ""stop", short too. A grid that was binary
# begins where its last interval begins, at 20 s for 0 s, and Praat reads it so from the text that is then written, with an
# interval from 0 s; where the last tier has points, start and end are eight raw bytes each. In what is written quotation
# marks are not doubled: Praat refuses the file.
# Versions: praat-textgrids 1.4.0; Praat as in praat-parselmouth 0.4.7.
# Who meets it: whoever learns from sentences that were annotated in Praat, or moves them between tools.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet praat-textgrids==1.4.0 praat-parselmouth==0.4.7
cd "$place"
venv/bin/python - <<'PYTHON'
from importlib.metadata import version
import parselmouth
from parselmouth.praat import call
import textgrids

print(*(f"{name} {version(name)}" for name in ("praat-textgrids", "praat-parselmouth")))
sentences = ["writes a = b, then stops", "says \"stop\"", "washes it"]
forms = {"text": "Save as text file", "short text": "Save as short text file", "binary": "Save as binary file"}


def made(tiers, points):
    grid = call("Create TextGrid", 0, 30, tiers, points)
    for number, sentence in enumerate(sentences, 1):
        if number > 1:
            call(grid, "Insert boundary", 1, 10.0 * (number - 1))
        call(grid, "Set interval text", 1, number, sentence)
    if points:
        call(grid, "Insert point", 2, 5.0, "cut")
    return grid


def by_praat(name):
    grid = parselmouth.read(name)
    return grid.xmin, grid.xmax, [call(grid, "Get label of interval", 1, number) for number in (1, 2, 3)]


found = {}
for form, command in forms.items():
    call(made("words", ""), command, "grid")
    grid = textgrids.TextGrid("grid")
    found[form] = grid.xmin, grid.xmax, [str(interval.text) for interval in grid["words"]]
    times = [(interval.xmin, interval.xmax) for interval in grid["words"]]
    print(f"{form}: Praat {by_praat('grid')}\n  praat-textgrids {found[form]}")
    if by_praat("grid") != (0, 30, sentences) or times != [(0, 10), (10, 20), (20, 30)]:
        raise SystemExit("changed: Praat reads what it wrote, and the intervals have their times")
grid.write("again")
try:
    found["binary, written as text, read by Praat"] = by_praat("again")
except parselmouth.PraatError as error:
    found["binary, written as text, read by Praat"] = "undoubled quote" in str(error)
    print("binary, written as text, read by Praat:", str(error).splitlines()[0])
grid["words"][1].text = "stops"
grid.write("again")
found["the same with another word"] = by_praat("again")
call(made("words marks", "marks"), forms["binary"], "grid")
grid = textgrids.TextGrid("grid")
found["binary with points"] = grid.xmin, grid.xmax
for name in list(found)[4:]:
    print(f"{name}: {found[name]}")
cut = ["writes a", "says \"\"stop", "washes it"]
before = {"text": (0.0, 30.0, cut), "short text": (0.0, 30.0, [sentences[0], *cut[1:]]), "binary": (20.0, 30.0, sentences),
          "binary, written as text, read by Praat": True,
          "the same with another word": (20.0, 30.0, [sentences[0], "stops", sentences[2]]),
          "binary with points": (bytes(8), b"@>" + bytes(6))}
if found != before:
    raise SystemExit(f"changed: {before} before")
PYTHON
