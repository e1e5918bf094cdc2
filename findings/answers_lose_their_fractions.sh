#!/usr/bin/env bash
# Expected: "12.6s - 19.9s" is the same answer as "12.6 - 19.9 seconds", and is scored alike.
# TimeLens' reader wants the end of a word behind a number: with an "s" behind it, it goes back to the point, 12.0 to 19.0,
# and does not see 12s at all. Charades-STA's reader takes one number of a sentence (12.6 of "starts at 12.6 seconds and
# ends at 19.9 seconds", so no span), and reads 00:12.6 - 00:19.9 as 0 to 12.6. So a model is scored by how it writes its
# seconds: what was not understood counts as a wrong time, though both readers mean to take more forms than the asked one.
# Versions: lmms-eval 0.7.3 (the files of its tasks timelens and charades_sta), PyYAML 6.0.3, loguru 0.7.3.
# Who meets it: whoever compares video models by how well they find events in time.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --no-deps lmms-eval==0.7.3 pyyaml==6.0.3 loguru==0.7.3
cd "$place"
"$place/venv/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import distribution, version
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

from loguru import logger

logger.remove()
root = distribution("lmms-eval").locate_file("lmms_eval")
for name in ("lmms_eval", "lmms_eval.tasks", "lmms_eval.tasks._task_utils"):  # without what else the package needs
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__path__ = [str(root.joinpath(*name.split(".")[1:]))]


def task(name):
    spec = spec_from_file_location(name, root / "tasks" / name / "utils.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


timelens, charades = task("timelens"), task("charades_sta")
before = {
    "The event happens in 12.6 - 19.9 seconds.": (100.0, 100.0),
    "The event happens in 12.6s - 19.9s.": (81.0, 100.0),
    "The event happens in 12.6 seconds - 19.9 seconds.": (100.0, 0.0),
    "The event happens in 00:12.6 - 00:19.9.": (100.0, 0.0),
    "The event starts at 12.6 seconds and ends at 19.9 seconds.": (100.0, 0.0),
    "Start time: 12.6s\nEnd time: 19.9s": (81.0, 81.0),
    "The event happens in 13s - 20s.": (0.0, 93.2),
}
print("lmms-eval", version("lmms-eval"), "mIoU with 12.6 to 19.9 s by timelens, by charades_sta")
found = {}
for answer in before:
    scores = (
        timelens.timelens_aggregate_miou([{"a.mp4>>>cuts>>>[[12.6, 19.9]]": answer}], None),
        charades.temporal_grounding_aggregate_miou([{"a.mp4>>>cuts>>>[12.6, 19.9]": answer}], None),
    )
    found[answer] = tuple(round(score, 1) for score in scores)
    print(f"{answer!r}: {found[answer]}; read as", *(module.extract_time(answer) for module in (timelens, charades)))
if found != before:
    raise SystemExit(f"changed: {before} before")
PYTHON
