"""Memory that a model takes, by a process that really runs."""
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT
from support.engine.cpu import multiplies_bf16

PACKS = """
import re
from pathlib import Path
import torch
from torch import nn
from support.engine import cpu

def resident():
    return 1024 * int(re.search(r"VmRSS:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

cpu.LARGE = 1
# glibc now keeps what is smaller, as after a model has been loaded
torch.ones(30 * 2 ** 20, dtype=torch.uint8)
before = resident()
sizes = 12 * [(1024, 1024), (1024, 1024), (1024, 4096), (4096, 1024)]
model = nn.Sequential(*[nn.Linear(*size, dtype=torch.bfloat16) for size in sizes])
weights = sum(layer.weight.nbytes for layer in model)
cpu.speed_up(model)
print((resident() - before) / weights)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux")
@pytest.mark.skipif(not multiplies_bf16(), reason="this processor does not multiply bf16")
def test_packed_weights_are_held_once():
    """What the weights before them took is given back to the system. (240 MB)"""
    done = subprocess.run([sys.executable, "-c", PACKS], cwd=ROOT, capture_output=True, text=True,
                          timeout=200)
    assert done.returncode == 0, done.stderr
    assert 0.9 < float(done.stdout) < 1.1
