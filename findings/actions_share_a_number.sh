#!/usr/bin/env bash
# Expected: "cuts a knife" (verb 3, noun 5) and verb 5 with noun 3 are two actions, and a score is the same if asked twice.
# actionformer's ANETdetection adds an action's parts up: with label_offset=300, (3, 5), (5, 3) and (8, 0) are all 309, so
# wrong actions at the right times get a mAP of 1.0. Classes are numbered anew from 0, in the caller's own table: asked
# again, the same detections of the classes 2, 5 and 7 get average precisions of 0.5, 1.0 and 0.0 for 1.0 each.
# Versions: actionformer 1.5.0, pandas 3.1.1, NumPy 2.4.6.
# Who meets it: whoever scores found actions of EPIC-KITCHENS, or of a part of any set, by mean average precision.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet numpy==2.4.6 pandas==3.1.1 joblib==1.6.0 setuptools==80.9.0
"$place/venv/bin/pip" install --quiet --no-deps actionformer==1.5.0
"$place/venv/bin/python" - "$place" <<'PYTHON'
import importlib.util
import json
import sys
from importlib.metadata import distribution, version
from pathlib import Path

import pandas

# the package's other parts need PyTorch, its scores do not
source = distribution("actionformer").locate_file("actionformer/utils/metrics.py")
spec = importlib.util.spec_from_file_location("metrics", source)
metrics = importlib.util.module_from_spec(spec)
spec.loader.exec_module(metrics)
place = Path(sys.argv[1])


def table(name, labels, scored):
    events = [{"segment": [10.0 * i, 10.0 * i + 5], "label_id": one} for i, one in enumerate(labels)]
    events = [dict(one, scores=1 - i / 10) for i, one in enumerate(events)] if scored else events
    (place / name).write_text(json.dumps({"database": {"film": events if scored else {"annotations": events}}}))
    return str(place / name)


def truth(labels, offset=0):
    return metrics.ANETdetection(table("truth.json", labels, False), label_offset=offset, num_workers=1, top_k=(1,))


print("actionformer", version("actionformer"), "pandas", pandas.__version__)
found = []
for actions in ([[3, 5], [1, 2]], [[5, 3], [2, 1]], [[8, 0], [0, 3]], [[3, 6], [1, 2]]):
    judge = truth([[3, 5], [1, 2]], 300)
    detections = metrics.load_pred_seg_from_json(table("found.json", actions, True), label_offset=300)
    numbers = detections["label"].tolist()
    found.append(round(float(judge.evaluate(detections, verbose=False)[1]), 2))
    print("actions", actions, "where [3, 5], [1, 2] are right: numbers", numbers, "mAP", found[-1])
judge = truth([2, 5, 7])
rows = [("film", 10.0 * i, 10.0 * i + 5, one, 0.9) for i, one in enumerate((2, 5, 7))]
detections = pandas.DataFrame(rows, columns=["video-id", "t-start", "t-end", "label", "score"])
for asked in ("once", "again"):
    judge.evaluate(detections, verbose=False)
    found.append([round(float(one), 2) for one in judge.ap[0]])
    print("classes 2, 5, 7, all right, asked", asked, "average precisions", found[-1])
before = [1.0, 1.0, 1.0, 0.5, [1.0, 1.0, 1.0], [0.5, 1.0, 0.0]]
if found != before:
    raise SystemExit(f"changed: {found}; {before} before")
PYTHON
