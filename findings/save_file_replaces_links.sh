#!/usr/bin/env bash
# Expected: save_file writes into the file of that name: through a link, and with the permissions that it has.
# 0.8.0 puts a new file in its place: a link becomes a file of its own, and what it led to keeps the old weights.
# Every file it writes is readable by its owner alone (600), whatever the umask says; 0.7.0 wrote in place, with 644.
# Versions: safetensors 0.7.0 and 0.8.0 with numpy 2.4.6.
# Who meets it: whoever saves a training to a link latest.safetensors, or narrates under another account than trains.
set -euo pipefail
umask 022
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
for number in 0.7.0 0.8.0; do
  "$place/venv/bin/pip" install --quiet --no-deps numpy==2.4.6 safetensors==$number
  mkdir "$place/$number"
  "$place/venv/bin/python" - "$place/$number" <<'PYTHON'
import sys
from importlib.metadata import version
from pathlib import Path
import numpy
from safetensors.numpy import load_file, save_file

disk, latest = (Path(sys.argv[1]) / name for name in ("disk.safetensors", "latest.safetensors"))
save_file({"weight": numpy.zeros(3)}, disk)
permissions = oct(disk.stat().st_mode & 0o777)
latest.symlink_to(disk)
save_file({"weight": numpy.ones(3)}, latest)
found = permissions, latest.is_symlink(), float(load_file(disk)["weight"][0])

expected = {"0.7.0": ("0o644", True, 1.0), "0.8.0": ("0o600", False, 0.0)}
print("safetensors", version("safetensors"))
print("  permissions of a new file:", found[0])
print("  still a link after saving 1 through it:", found[1])
print("  the file that the link led to holds:", found[2])
if found != expected[version("safetensors")]:
    raise SystemExit("changed: it behaves otherwise than before")
PYTHON
done
