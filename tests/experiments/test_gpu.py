"""The command for a GPU (experiments/gpu.py), where there is none."""
import json
from argparse import ArgumentParser
from importlib import import_module

import pytest

from experiments import gpu


def call(monkeypatch, *options: str) -> None:
    monkeypatch.setattr("sys.argv", ["gpu", *options])
    with pytest.raises(SystemExit) as end:
        gpu.main()
    assert end.value.code == 0


class Understood(Exception):
    pass


@pytest.mark.parametrize("small", [True, False])
def test_the_commands_are_understood(small, monkeypatch):
    parse_args = ArgumentParser.parse_args

    def parse_and_stop(parser):
        parse_args(parser)
        raise Understood

    monkeypatch.setattr(ArgumentParser, "parse_args", parse_and_stop)
    for name, (module, *options) in gpu.parts(small).items():
        if name == "tests":
            assert module == "pytest"
            continue
        monkeypatch.setattr("sys.argv", [module, *options])
        with pytest.raises(Understood):
            import_module(module).main()


def test_large_parts_run_on_the_gpu():
    """An experiment whose default is the processor is told so."""
    commands = gpu.parts(small=False).values()
    from_pixels = [command for command in commands if command[0] == "experiments.full_size"]
    assert from_pixels
    for command in from_pixels:
        assert command[command.index("--device") + 1] == "cuda"


def test_without_a_gpu_every_part_is_skipped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    file = tmp_path / "gpu.json"
    call(monkeypatch, "--json", str(file))
    report = json.loads(file.read_text())
    assert report["parts"].keys() == gpu.parts(small=False).keys()
    assert {part["skipped"] for part in report["parts"].values()} == {"needs a GPU"}
    printed = capsys.readouterr().out.splitlines()
    assert printed == [f"{name}: skipped, needs a GPU" for name in report["parts"]]


def test_how_parts_end(tmp_path):
    numbers = tmp_path / "numbers.json"
    numbers.write_text('{"a": 1}')
    done = gpu.run_part(["json.tool", "--compact", str(numbers)], 60)
    assert done["numbers"] == {"a": 1}
    assert gpu.outcome(done).startswith("done in ")

    failed = gpu.run_part(["json.tool", str(tmp_path / "nowhere")], 60)
    assert failed["exit_code"] != 0
    assert "nowhere" in gpu.outcome(failed)

    stopped = gpu.run_part(["timeit", "-n", "1", "import time; time.sleep(60)"], 0.5)
    assert stopped["exit_code"] is None
    assert gpu.outcome(stopped) == "stopped after 0 s"


def test_a_part_without_time_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "run_part", lambda command, seconds: pytest.fail("there is no time"))
    monkeypatch.setattr(gpu.time, "perf_counter", iter([0.0, *[600.0] * 100]).__next__)
    file = tmp_path / "gpu.json"
    call(monkeypatch, "--json", str(file), "--small", "--minutes", "9")
    parts = json.loads(file.read_text())["parts"]
    assert {part["skipped"] for part in parts.values()} == {"no time was left"}
