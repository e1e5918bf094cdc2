#!/usr/bin/env bash
# Expected: a word lights up when it is said, and a line of at most 2 s is on screen for at most 2 s.
# stable-ts adds up the lengths of the words alone. In its .ass, by default and with karaoke=True, each word lights up
# earlier by all pauses before it: with three pauses of 2 s the last of five words is 6 s early. Its .vtt, and its .ass
# with tag=-1, have the words' times. split_by_duration(2, even_split=False) leaves a line of 6 s. Without pauses all
# is well.
# Versions: stable-ts-whisperless 2.19.1 (stable-ts without openai-whisper) with torch 2.13.0.
# Who meets it: whoever burns captions with lit words into a film, or cuts lines to a length, where speech has pauses.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 tqdm==4.70.1
"$place/venv/bin/pip" install --quiet --no-deps torchaudio==2.11.1 stable-ts-whisperless==2.19.1
rm -r "$place"/venv/lib/python3*/site-packages/torchaudio/lib # wants CUDA; nothing here uses it
cd "$place"
"$place/venv/bin/python" - <<'PYTHON'
import re
from importlib.metadata import version

from stable_whisper import WhisperResult


def seconds(clock):
    hours, minutes, rest = clock.split(":")
    return round(int(hours) * 3600 + int(minutes) * 60 + float(rest), 2)


def result(pause):
    words, time = [], 0.0
    for i, word in enumerate(("The", "cook", "cuts", "an", "onion.")):
        words.append(dict(word=f" {word}", start=time, end=time + 0.5, probability=1.0))
        time += 0.5 + pause * (i > 0)
    segment = dict(start=0.0, end=words[-1]["end"], text="".join(word["word"] for word in words), words=words)
    return WhisperResult(dict(language="en", segments=[segment]))


def lengths(ass):
    line = ass.splitlines()[-1]
    start, times = seconds(line.split(",")[1]), [0]
    for length in re.findall(r"\\kf?(\d+)", line):
        times.append(times[-1] + int(length))
    return [start + time / 100 for time in times[:-1]]


def tags(ass):
    return [seconds(line.split(",")[1]) for line in ass.splitlines() if line.startswith("Dialogue") and r"{\1c" in line]


def vtt(text):
    first, line = text.splitlines()[2:4]
    marks = re.findall(r"<([\d:.]+)>(?! <)", line)
    return [seconds(time) for time in (first.split()[0], *marks)]


print("stable-ts-whisperless", version("stable-ts-whisperless"))
found = {}
for pause in (0, 2):
    said = result(pause)
    found[f"pauses of {pause} s: words begin"] = [round(word.start, 2) for word in said.all_words()]
    found[f"pauses of {pause} s: .vtt"] = vtt(said.to_srt_vtt(vtt=True))
    found[f"pauses of {pause} s: .ass, tag=-1"] = tags(said.to_ass(tag=-1))
    found[f"pauses of {pause} s: .ass"] = lengths(said.to_ass())
    found[f"pauses of {pause} s: .ass, karaoke=True"] = lengths(said.to_ass(karaoke=True))
    pieces = said.split_by_duration(2, even_split=False).segments
    found[f"pauses of {pause} s: lengths by split_by_duration(2)"] = [round(piece.end - piece.start, 2) for piece in pieces]
for name, times in found.items():
    print(name, times)
print(result(2).to_ass().splitlines()[-1])
close, wide = [0.0, 0.5, 1.0, 1.5, 2.0], [0.0, 0.5, 3.0, 5.5, 8.0]
before = [close] * 5 + [[2.0, 0.5]] + [wide] * 3 + [close] * 2 + [[6.0, 0.5]]
if list(found.values()) != before:
    print(f"changed: {before} before")
    raise SystemExit(1)
PYTHON
