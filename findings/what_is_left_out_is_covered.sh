#!/usr/bin/env bash
# Expected: coverage is, for each segment of the reference, the part of its length that one segment of the answer shares with
# it, weighted by length: the reference of pyannote.metrics says so. Who answers for 1 s of 30 s has a coverage of 1/30.
# SegmentationCoverage divides by what both have instead, not by the reference: an answer that ends after the first of three
# segments, one that has the last alone, 1 s alone or nothing at all have coverage, purity and F-measure 1.0. So has one
# without the second segment: the gap in the answer is taken for a segment. What SegmentationPrecision and SegmentationRecall
# compare are ends alone: segments that begin 9 s late get 1.0 twice.
# Versions: pyannote.metrics 4.2.0, pyannote.core 6.1.0.
# Who meets it: whoever scores where a stream is cut into events; what stops early, or never answers, is perfect.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet pyannote.metrics==4.2.0 pyannote.core==6.1.0
"$place/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version
from pyannote.core import Annotation, Segment, Timeline
from pyannote.metrics.segmentation import (SegmentationCoverage, SegmentationPrecision, SegmentationPurity,
                                           SegmentationPurityCoverageFMeasure, SegmentationRecall)

print(*(f"{name} {version(name)}" for name in ("pyannote.metrics", "pyannote.core")))
events = [(0, 10), (10, 20), (20, 30)]
reference = Annotation()
for event, words in zip(events, ("takes a knife", "cuts an onion", "washes it")):
    reference[Segment(*event)] = words
answers = {"all": events, "none": [], "first": events[:1], "last": events[2:], "1 s": [(9, 10)],
           "first and last": [events[0], events[2]], "one of 30 s": [(0, 30)]}


def defined(answer):
    shared = [max((min(end, stop) - max(begin, start) for start, stop in answer), default=0) for begin, end in events]
    return round(sum(max(0, length) for length in shared) / 30, 3)


found = {}
for name, answer in answers.items():
    timeline = Timeline([Segment(*event) for event in answer])
    found[name] = defined(answer), *(round(float(metric()(reference, timeline)), 3) for metric in (
        SegmentationCoverage, SegmentationPurity, SegmentationPurityCoverageFMeasure))
    print(f"{name}: coverage by its definition {found[name][0]}; coverage, purity, F-measure:", *found[name][1:])
late = Timeline([Segment(end - 1, end) for _, end in events])
found["9 s late"] = tuple(metric(tolerance=0.5)(reference, late) for metric in (SegmentationPrecision, SegmentationRecall))
print("each begins 9 s late: precision and recall", *found["9 s late"])
perfect = (1.0, 1.0, 1.0)
before = {"all": (1.0, *perfect), "none": (0.0, *perfect), "first": (0.333, *perfect), "last": (0.333, *perfect),
          "1 s": (0.033, *perfect), "first and last": (0.667, *perfect), "one of 30 s": (1.0, 1.0, 0.333, 0.5),
          "9 s late": (1.0, 1.0)}
if found != before:
    raise SystemExit(f"changed: {before} before")
PYTHON
