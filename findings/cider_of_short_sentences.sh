#!/usr/bin/env bash
# Expected: CIDEr gives its full 10 to every sentence that equals its reference.
# It averages over phrases of 1, 2, 3 and 4 words; a shorter sentence has no phrase of some length, which counts as 0.
# So perfect sentences of 1, 2 and 3 words get 2.5, 5 and 7.5, and a corpus of a single pair gets 0 (no word is rare in it).
# Versions: pycocoevalcap 1.2 with numpy 2.4.6.
# Who meets it: whoever scores terse narrations ("opens drawer"), or a single clip as a first try.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --no-deps pycocoevalcap==1.2 numpy==2.4.6
"$place/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version
from pycocoevalcap.cider.cider import Cider

print("pycocoevalcap", version("pycocoevalcap"))
sentences = ["chops", "opens drawer", "takes knife out", "he cuts the onion", "she washes the big pan"]
expected = [2.5, 5.0, 7.5, 10.0, 10.0]
corpus = {number: [sentence] for number, sentence in enumerate(sentences)}
_, scores = Cider().compute_score(corpus, corpus)
for sentence, score in zip(sentences, scores):
    print(f"{score:5.2f}  {sentence!r} against itself, among five")

pair = {0: ["he cuts the onion"]}
alone, _ = Cider().compute_score(pair, pair)
print(f"{alone:5.2f}  'he cuts the onion' against itself, alone")

if [round(float(score), 6) for score in scores] != expected or alone != 0:
    raise SystemExit("changed: these are other scores than before")
PYTHON
