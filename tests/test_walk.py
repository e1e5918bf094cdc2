"""docs/walk.py runs, and asserts what it says."""
import re
import subprocess
import sys

import pytest

from helpers import ROOT

WALK = ROOT / "docs" / "walk.py"
# cell 0 (what the cells share) with what is before it; the others
SHARED, *CELLS = re.split(r"^(?=# %% [1-9])", WALK.read_text(encoding="utf-8"), flags=re.M)


def test_the_first_cells_run(capsys):
    """One segment by hand, and training is streaming."""
    assert all("\nassert " in cell for cell in CELLS)
    exec(compile(SHARED + "".join(CELLS[:3]), WALK, "exec"), {"__file__": str(WALK)})
    assert "after line 18" in capsys.readouterr().out


@pytest.mark.slow
def test_it_runs_to_its_end():
    run = subprocess.run([sys.executable, "docs/walk.py"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "training:" not in run.stderr                    # no progress bar in a file
    for cell in CELLS:
        number = re.match(r"# %% (\w+)\. ", cell)[1]
        assert f"\n{number}. " in f"\n{run.stdout}"
