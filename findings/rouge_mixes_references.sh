#!/usr/bin/env bash
# Expected: with several references, ROUGE-L is that of the reference which fits best.
# The COCO scorer takes the best precision of one reference and the best recall of another, and joins the two.
# So a sentence that equals neither reference gets a full 1.0; each reference alone gives it 0.56 or less.
# Versions: pycocoevalcap 1.2 with numpy 2.4.6.
# Who meets it: whoever scores narrations against two annotators, one wordy and one terse.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --no-deps pycocoevalcap==1.2 numpy==2.4.6
"$place/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version
from pycocoevalcap.rouge.rouge import Rouge


def rouge(references):
    score, _ = Rouge().compute_score({0: references}, {0: [candidate]})
    return round(float(score), 3)


print("pycocoevalcap", version("pycocoevalcap"))
candidate = "cuts the onion"
wordy = "cuts the onion and stirs the soup"
terse = "onion"
print("candidate:", candidate)
print(rouge([wordy]), "against:", wordy)
print(rouge([terse]), "against:", terse)
print(rouge([wordy, terse]), "against both")

if (rouge([wordy]), rouge([terse]), rouge([wordy, terse])) != (0.56, 0.55, 1.0):
    raise SystemExit("changed: these are other scores than before")
PYTHON
