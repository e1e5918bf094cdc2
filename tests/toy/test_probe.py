"""What a linear probe reads from memory tokens, in words."""
import shutil

import pytest
import torch

from helpers import TOY
from support.common.errors import BadData
from toy.probe import PLACES, Probe, in_words, load_probe, recalled


def test_in_words():
    """The surest place first, and no mere guess."""
    probe = Probe(4).requires_grad_(False)
    bias = torch.zeros(PLACES, 7 + 7 + 1)
    bias[0, 2] = 9.0                           # place 0: type 2
    bias[0, 7 + 1] = 9.0                       # colour 1
    bias[0, 14] = 3.0                          # 2 ** 3 seconds
    bias[1, 3] = bias[1, 7 + 2] = 2.5          # place 1, less sure
    bias[3, 3] = bias[3, 7 + 2] = 0.5          # a guess
    bias[2, 0] = bias[2, 7] = 9.0              # sure that there was nothing
    probe.linear.weight.zero_()
    probe.linear.bias.copy_(bias.flatten())
    memory = torch.randn(2, 2)
    assert in_words(probe, memory) == ["shelf: red bowl (1.00, 8 s)", "rack: green pan (0.45, 1 s)"]
    each = recalled(probe, memory)
    assert len(each) == PLACES
    assert each[0] == ("red bowl", 1.0, 8.0)
    assert each[2][:2] == ("", 1.0)
    probe.linear.bias.zero_()
    assert in_words(probe, memory) == []


def test_a_damaged_one_is_refused(tmp_path):
    (tmp_path / "probe.safetensors").write_bytes(b"cut")
    with pytest.raises(BadData, match="probe.safetensors is damaged"):
        load_probe(str(tmp_path))
    assert len(load_probe(str(TOY)).mean) == 10 * 128


def test_one_of_other_weights_is_refused(tmp_path):
    """A narrator that was trained anew in the same folder has other memory tokens."""
    shutil.copy(TOY / "probe.safetensors", tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"others")
    with pytest.raises(BadData, match="made with narrator = .*delete it"):
        load_probe(str(tmp_path))
