#!/usr/bin/env bash
# Expected: ROUGE counts every word, so a sentence that says the same thing three times has a precision of a third.
# The package "rouge" keeps phrases and lengths as sets unless told otherwise: a word that comes again is not counted.
# So a narration that got stuck and says its reference three times gets a ROUGE-L of 1.0; the COCO scorer gives it 0.55.
# Versions: rouge 1.0.1 with six 1.17.0; pycocoevalcap 1.2 with numpy 2.4.6 beside it.
# Who meets it: whoever scores a small language model, whose commonest fault is to repeat itself.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --no-deps rouge==1.0.1 six==1.17.0 pycocoevalcap==1.2 numpy==2.4.6
"$place/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

from pycocoevalcap.rouge.rouge import Rouge as Coco
from rouge import Rouge

print("rouge", version("rouge"), "pycocoevalcap", version("pycocoevalcap"))
reference = "opens the drawer"
expected = {
    "opens the drawer": (1.0, 1.0, 1.0),
    "opens the drawer opens the drawer opens the drawer": (1.0, 0.5, 0.55),
    "opens opens opens the the drawer": (1.0, 0.667, 0.709),
    "the drawer opens": (0.667, 0.667, 0.667),
}
for sentence, before in expected.items():
    plain = Rouge().get_scores(sentence, reference)[0]["rouge-l"]["f"]
    counted = Rouge(exclusive=False).get_scores(sentence, reference)[0]["rouge-l"]["f"]
    coco, _ = Coco().compute_score({0: [reference]}, {0: [sentence]})
    found = tuple(round(float(score), 3) for score in (plain, counted, coco))
    print(f"rouge {found[0]}, with exclusive=False {found[1]}, pycocoevalcap {found[2]}: {sentence}")
    if found != before:
        raise SystemExit(f"changed: {before} before")
PYTHON
