"""docs/walk.py: short cells that begin with words and assert what they say; and it runs."""
import re
import subprocess
import sys

import pytest

from helpers import ROOT

WALK = ROOT / "docs" / "walk.py"
NUMBERS = "1 2 3 4 5 5b 6 6b 7 8 9 10 10b".split()
# cell 0 (what the cells share) with what is before it; the others
SHARED, *CELLS = re.split(r"^(?=# %% [1-9])", WALK.read_text(encoding="utf-8"), flags=re.M)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_cell_is_short_and_says_what_to_expect(number):
    title, *lines = CELLS[NUMBERS.index(number)].splitlines()
    assert re.match(rf"# %% {number}\. .* \(.*\)$", title)              # where it is in the paper
    assert lines[0].startswith("# ")
    code = [line for line in lines if line and not line.startswith(("#", "import ", "from "))]
    assert len(code) <= 16
    assert any(line.startswith("assert ") for line in code)


def test_there_are_no_other_cells():
    assert len(CELLS) == len(NUMBERS)


def test_the_first_cells_run(capsys):
    """One segment by hand, and training is streaming."""
    exec(compile(SHARED + "".join(CELLS[:3]), WALK, "exec"), {"__file__": str(WALK)})
    assert "after line 18" in capsys.readouterr().out


@pytest.mark.slow
def test_it_runs_to_its_end():
    run = subprocess.run([sys.executable, "docs/walk.py"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "training:" not in run.stderr                    # no progress bar in a file
    for number in NUMBERS:
        assert f"\n{number}. " in f"\n{run.stdout}"
