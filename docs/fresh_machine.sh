#!/usr/bin/env bash
# What a newcomer types: the README's first and its last block, word for word, in a fresh clone of what is
# committed, with an empty home, for each Python that is named:
#
#     docs/fresh_machine.sh python3.11 python3.13
#
# TORCH_INDEX  in the place of PyTorch's index of CPU builds, where that cannot be reached; empty: pip's own
# TESTS        arguments added to pytest, such as "-x tests/test_stream.py"; else all tests run
set -euo pipefail
repository=$(cd "$(dirname "$0")/.." && pwd)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
block() {                   # the lines of a bash block of the README
  awk -v wanted="$1" '/^```bash$/ { number++; inside = 1; next }
                      /^```$/ { inside = 0 }
                      inside && number == wanted' "$repository/README.md"
}
first=$(block 1)
if [[ -v TORCH_INDEX ]]; then
  first=$(sed "s# --index-url [^ ]*#${TORCH_INDEX:+ --index-url $TORCH_INDEX}#" <<< "$first")
fi
last=$(block "$(grep -c '^```bash$' "$repository/README.md")")

for python in "$@"; do
  python=$("$python" -c "import sys; print(sys.executable)")
  echo "== $("$python" --version)"
  rm -rf "${place:?}"/*
  mkdir "$place/home" "$place/bin"
  ln -s "$python" "$place/bin/python3"
  git clone -q "$repository" "$place/clone"
  cd "$place/clone"
  HOME="$place/home" PATH="$place/bin:/usr/bin:/bin" PYTHONPATH="" bash -euxc "$first
$last ${TESTS:-}"
done
