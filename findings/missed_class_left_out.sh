#!/usr/bin/env bash
# Expected: a macro F-score over kinds of events counts a kind that is never found with 0.
# psds_eval divides a kind's hits by their share to know how many events it has: 0 / 0, and its F-score is NaN. The mean
# leaves NaN out: of two kinds one found and one missed is 1.0. sed_eval leaves out a kind of which nothing is said at
# all; psds_eval also one of which all that is said is wrong.
# In psds_eval a second row of the same event covers it once more: 3 of 6 seconds, given twice, meet a criterion of 0.7.
# Other rows of one kind that overlap are refused.
# Versions: psds_eval 0.5.3, sed_eval 0.2.1, pandas 3.1.1.
# Who meets it: whoever scores events of several kinds of which one is rare or hard, or joins lists of detections.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet psds_eval==0.5.3 sed_eval==0.2.1 pandas==3.1.1
"$place/venv/bin/python" - <<'PYTHON'
import warnings
from importlib.metadata import version

import pandas
import sed_eval
from psds_eval import PSDSEval

warnings.simplefilter("ignore")
print(*(f"{name} {version(name)}" for name in ("psds_eval", "sed_eval", "pandas")))
film = pandas.DataFrame({"filename": ["film"], "duration": [60.0]})


def table(events):
    return pandas.DataFrame([("film", *event) for event in events], columns=["filename", "onset", "offset", "event_label"])


def by_intersection(truth, found):
    scores = PSDSEval(dtc_threshold=0.7, gtc_threshold=0.7, ground_truth=table(truth), metadata=film)
    mean, of_kinds = scores.compute_macro_f_score(table(found))
    return f"{mean:.3f}", {kind: f"{score:.3f}" for kind, score in of_kinds.items()}


def by_onset(truth, found):
    rows = [[dict(filename="film", onset=on, offset=off, event_label=kind) for on, off, kind in events]
            for events in (truth, found)]
    scores = sed_eval.sound_event.EventBasedMetrics(["cut", "pour"], t_collar=0.5)
    scores.evaluate(*rows)
    return f"{scores.results_class_wise_average_metrics()['f_measure']['f_measure']:.3f}"


truth = (0, 6, "cut"), (10, 16, "cut"), (20, 26, "pour"), (30, 36, "pour")
seen = []
for found in (truth[:2], truth[:1], (*truth[:1], (40, 46, "pour"))):
    mean, of_kinds = by_intersection(truth, found)
    seen += [mean, of_kinds["pour"], by_onset(truth, found)]
    print(f"found {found}: psds_eval {mean} {of_kinds}, sed_eval {seen[-1]}")
part = (0, 3, "cut")
for found in ([part], [part, part]):
    _, of_kinds = by_intersection([(0, 6, "cut")], found)
    seen.append(of_kinds["cut"])
    print(f"found {found}: psds_eval {of_kinds}")
before = ["1.000", "nan", "1.000", "0.667", "nan", "0.667", "0.667", "nan", "0.333", "nan", "1.000"]
if seen != before:
    print(f"changed: {seen}; {before} before")
    raise SystemExit(1)
PYTHON
