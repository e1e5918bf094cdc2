"""A narrator of the published size (experiments/full_size.py), here of a very small one."""
import json

import pytest

from experiments import full_size

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_makes_a_narrator_and_measures_it(tmp_path, monkeypatch, capsys, dtype):
    """The folder has the published format; a second run finds it."""
    llama = full_size.LLAMA | SMALL | {"vocab_size": 600, "num_key_value_heads": 1, "head_dim": 32}
    siglip = full_size.SIGLIP | SMALL
    monkeypatch.setattr(full_size, "LLAMA", llama)
    monkeypatch.setattr(full_size, "SIGLIP", siglip)
    monkeypatch.setattr(full_size, "PICTURE", {"image_size": 48, "patch_size": 16})
    full_size.make_narrator(tmp_path, 1, llama, siglip, rank=4)
    assert not (tmp_path / "narrator.json").exists()

    monkeypatch.setattr("sys.argv", ["full_size", "--dtype", dtype, "--frames", "10", "--json",
                                     "--folder", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        full_size.main()
    assert end.value.code == 0
    costs = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert costs["frames"] == 10
    for clock in ("wall", "processor"):
        assert set(costs[clock]) == {"load s", "encoder s a frame", "ms a frame", "ms a word",
                                     "frames/s"}
        assert all(0 < value < 1000 for value in costs[clock].values())
    assert 0 < costs["held"] <= costs["load peak"] <= costs["peak"]
