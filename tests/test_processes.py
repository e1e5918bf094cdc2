"""Several processes of one command: really run, with the variables that torchrun sets."""
import os
import re
import socket
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from beyond.commands import evaluate_command, train_command
from forks import Forked
from helpers import (
    ROOT, TOY, ranks, run_together, save_features, saved_features, start_together, tiny,
)
from support.common import devices
from support.common.disk import read_jsonl
from support.common.errors import BadData
from support.common.locks import Locked, locked
from train import order
from support.files.encoding import encode_videos
from support.files.predictions import Predictions
from support.files.video import Video, write_video
from test_commands import call
from test_train import arguments, epic


def of_torchrun(**others) -> dict[str, str]:
    return {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1"} | others


@pytest.mark.parametrize("environment, name", [
    ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "SLURM_NTASKS"),
    ({"RANK": "1", "WORLD_SIZE": "4", "SLURM_NTASKS": "4"}, "WORLD_SIZE"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "1"}, "WORLD_SIZE"),
    (of_torchrun(RANK="3"), "WORLD_SIZE"),
    (of_torchrun(MASTER_PORT="http"), "WORLD_SIZE"),
    ({"RANK": "", "WORLD_SIZE": ""}, None),
    ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
], ids=str)
def test_only_torchrun_makes_several_processes(environment, name, monkeypatch):
    """What another launcher starts is refused with the command to type; one process is one."""
    for variable in (*devices.SIZES, *devices.OF_TORCHRUN):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(sys, "argv", ["train.py", "--data", "my videos"])
    assert devices.rank() == (0, 1)
    if name is None:
        devices.check_launcher()
        return
    with pytest.raises(BadData, match=f"^{name}=.*torchrun --nproc-per-node [24] train.py --data "
                                      f"'my videos'.* unset [A-Z_ ]*$") as refused:
        devices.check_launcher()
    unset = str(refused.value).split(" unset ")[1].split()
    for variable in unset:                     # all at once, not one after the other
        monkeypatch.delenv(variable)
    devices.check_launcher()


@pytest.mark.parametrize("command", ["train.py --data toy", "data.py encode a.mp4 --output x"])
def test_commands_that_share_work_refuse_other_launchers(command, tmp_path):
    name, *options = command.split()
    several = os.environ | {"SLURM_NTASKS": "2"}
    code, errors = Forked([ROOT / name, *options], tmp_path, several).end()
    assert code == 1 and len(errors) == 1 and "torchrun --nproc-per-node 2" in errors[0]
    assert list(tmp_path.iterdir()) == []


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = [ROOT / "train.py", "--data", "ek100"]
        code, errors = Forked(line, ROOT, os.environ | of_torchrun(MASTER_PORT=port)).end()
    assert code == 1 and len(errors) == 1 and f"do not meet at 127.0.0.1:{port}" in errors[0]


ENDS = """
import os, sys, time
from support.common.devices import rank
from support.common.errors import command_line
from support.common.processes import KnownToAll, in_shares, process_group
process, _ = rank()
def work():
    if process == 1 and sys.argv[2] == "killed":
        os.kill(os.getpid(), 9)
def main():
    with process_group():
        in_shares(work)
        if process == 0:
            time.sleep(1)                      # it prints the results
            print("results", file=sys.stderr, flush=True)
        raise KnownToAll("a video is damaged")
command_line(main)
"""


def test_no_process_leaves_before_the_first_one_has_printed():
    """torchrun would end it."""
    first, second = start_together(["-c", ENDS, "whole"], ["-c", ENDS, "whole"])
    second.process.join(100)
    assert "results" in Path(first.file).read_text()
    for process in (first, second):
        code, errors = process.end()
        assert (code, errors[-1]) == (1, "error: a video is damaged")


def test_shares_of_a_process_that_is_killed_are_not_waited_for():
    first, second = run_together(["-c", ENDS, "killed"], ["-c", ENDS, "killed"])
    code, (line,) = first
    assert code == 1 and re.fullmatch(
        r"error: another process of this run has ended; its own message says why \(.+\)", line)
    assert second == (-9, [])


def test_processes_meet_again_after_a_restart():
    """torchrun --max-restarts: the store still has the addresses of those that have ended."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for restarts in ("0", "1"):
        others = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port),
                  "TORCHELASTIC_RESTART_COUNT": restarts, "LOCAL_WORLD_SIZE": "2"}
        running = [Forked(["-c", ENDS, "whole"], ROOT, environment | others)
                   for environment in ranks(2)]
        for process in running:
            _, errors = process.end()
            assert errors[-1] == "error: a video is damaged"


LAUNCHER = """
import os, signal, sys, time
from support.common.processes import end_with_launcher
come, go = os.pipe()
if os.fork() == 0:
    end_with_launcher()
    signal.signal(signal.SIGTERM, lambda *_: (os.write(2, b"saved"), os._exit(0)))
    os.write(go, b"ready")
    time.sleep(60)
    os._exit(1)
os.read(come, 5)
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_a_process_ends_with_its_launcher():
    launcher = Forked(["-c", LAUNCHER], ROOT, os.environ)
    launcher.process.join(100)
    while "saved" not in Path(launcher.file).read_text():      # else this test hangs, and fails
        time.sleep(0.01)
    launcher.end()


def test_a_lock_is_of_one_run_at_a_time(tmp_path):
    folder = tmp_path / "a" / "b"
    with locked(folder):
        with pytest.raises(Locked, match="another run is writing into it; wait for it, or choose"):
            with locked(folder):
                pass
        with locked(folder, "v0"):             # a file of the folder
            pass
    assert list(tmp_path.iterdir()) == []
    with locked(folder):
        (folder / "result").touch()
    assert [file.name for file in folder.iterdir()] == ["result"]


def test_a_run_that_died_leaves_no_lock(tmp_path):
    code = ("import os\n"
            "from support.common.locks import locked\n"
            f"with locked({str(tmp_path)!r}):\n"
            "    os.kill(os.getpid(), 9)\n")
    assert Forked(["-c", code], ROOT, os.environ).end() == (-9, [])
    with locked(tmp_path):
        pass


def test_two_evaluations_in_one_folder_do_not_meet(tmp_path):
    kept = Predictions(tmp_path, {})

    def make():
        with pytest.raises(Locked, match="another run is writing v 0"):
            Predictions(tmp_path, {}).keep("v 0", "print", list)
        assert Predictions(tmp_path, {}).keep("v 1", "print", list) == []
        return [{"text": "You look."}]

    assert kept.keep("v 0", "print", make) == [{"text": "You look."}]
    assert sorted(os.listdir(tmp_path / "predictions")) == ["v 0.jsonl", "v 1.jsonl"]


def test_rows_of_a_changed_video_are_not_those_of_the_first_one(tmp_path, monkeypatch):
    """The video has changed, its rows are made anew, and before they are marked, all is over."""
    kept = Predictions(tmp_path, {}, renew=True)
    kept.keep("v", "first", list)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("support.files.predictions.write_json", Mock(side_effect=KeyboardInterrupt))
        kept.keep("v", "second", lambda: [{"text": "You look."}])
    assert kept.keep("v", "first", list) == []


@pytest.fixture
def videos(tmp_path):
    import numpy as np
    paths = [tmp_path / f"v{n}.mp4" for n in range(4)]
    for n, path in enumerate(paths):
        write_video(path, [np.full((48, 48, 3), 60 * n, np.uint8)] * 4, 2)
    paths[0].write_bytes(paths[0].read_bytes()[:200])
    return paths


def test_a_bad_video_costs_no_other_one(videos, tmp_path):
    """The only video that the first process has still to do is damaged: the second one goes on."""
    line = ["data.py", "encode", *videos, "--vision", TOY / "vision", "--device", "cpu",
            "--output", tmp_path / "features"]
    for code, errors in run_together(line, line):
        assert code == 1
        assert errors[-1] == ("error: 1 of 4 videos could not be encoded (named above); the others "
                              "are done")
        assert len(errors) <= 2                # and the video's name
    made = sorted(file.name for file in (tmp_path / "features").iterdir())
    assert made == ["v1.safetensors", "v2.safetensors", "v3.safetensors"]


def test_processes_encode_the_same_videos(videos, tmp_path):
    """Shells on two machines sort otherwise: some videos would be encoded twice, others never."""
    line = ["data.py", "encode", "--vision", TOY / "vision", "--output", tmp_path / "features"]
    for code, errors in run_together([*line, *videos[1:3]], [*line, *videos[2:]]):
        assert code == 1 and len(errors) == 1 and "process 1 has videos 2 of hash" in errors[0]
    assert not (tmp_path / "features").exists()


def test_decoding_overlaps_encoding(monkeypatch, tmp_path):
    decoded = []
    meanwhile = []
    iterate = Video.__iter__
    monkeypatch.setattr(Video, "__iter__",
                        lambda video: (decoded.append(1) or picture for picture in iterate(video)))

    class Encoder:
        image_size = 48

        def __call__(self, pictures):
            before = len(decoded)
            time.sleep(0.1)
            meanwhile.append(len(decoded) - before)
            return torch.zeros(len(pictures), 10, 8)

    settings = {"vision_mark": "0a", "fps": "2.0", "grid": "3"}
    encode_videos([str(ROOT / "toy" / "kitchen.mp4")], tmp_path, Encoder, settings, "v", batch=16)
    assert sum(meanwhile) > 100


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The data set in root/, and in out/ what one process makes of it, in six steps."""
    folder = tmp_path_factory.mktemp("whole")
    epic(folder / "root", videos=12)
    assert call(train_command, with_dropout(arguments(folder))[1:])[0] == 0
    assert not list((folder / "out").glob("*-state.safetensors"))
    return folder


def with_dropout(words: list[str]) -> list[str]:
    return [word.replace("dropout=0", "dropout=0.1") for word in words]


def training(whole, **given):
    words = with_dropout(arguments(whole, **given))
    return [ROOT / words[0], *words[1:]]


def assert_as_in_one_process(whole, output):
    log = read_jsonl(output / "narrator-log.jsonl")
    expected = read_jsonl(whole / "out" / "narrator-log.jsonl")
    assert len(log) == len(expected) == 6
    for row, expected_row in zip(log, expected):
        assert row == pytest.approx(expected_row, abs=1e-6)
    assert [row["step"] for row in log if "val_loss" in row] == [2, 5]         # after each epoch
    weights = load_file(output / "adapter_model.safetensors")
    for name, weight in load_file(whole / "out" / "adapter_model.safetensors").items():
        assert torch.allclose(weight, weights[name], rtol=0, atol=1e-6), name


FAILING_DISK = """
import sys
sys.path.insert(0, "{root}")
from beyond.commands import train_command
from support.files.features import Features
read = Features.read
def fails(features, start, stop):
    if features.path.stem == "{video}" and stop - start > 1:
        raise OSError("the disk fails")
    return read(features, start, stop)
Features.read = fails
train_command.main()
"""


def test_a_damaged_file_costs_no_steps(whole, tmp_path):
    """On two machines that share no disk, one disk fails: the other process saves the steps. Both
    go on from there, but not where the state is on the machine that has become the second one.
    """
    machines = [tmp_path / "0", tmp_path / "1"]
    features = saved_features(whole / "root")
    of_second_process = f"train_{order(12, 4, 2, 0)[1]}"                      # at step 2
    fails = tmp_path / "fails.py"
    fails.write_text(FAILING_DISK.format(root=ROOT, video=of_second_process))
    lines = []
    for machine in machines:
        epic(machine / "root", videos=12)
        save_features(machine / "root", features)
        lines.append(training(whole, root=machine / "root", output="out", save_every=50))
    failing = [fails, *lines[1][1:]]
    (first, said), (second, said_by_second) = run_together(lines[0], failing, folders=machines)
    assert (first, second) == (1, 1)
    assert "the disk fails" in said_by_second[-1]
    assert said[-2:] == [
        "narrator: 2 of 6 steps are saved; the same command with --resume goes on from there",
        "error: another process of this run cannot go on; its own message says why"]
    assert len(said_by_second) == 1

    for line in lines:
        line.append("--resume")
    for code, errors in run_together(*lines, folders=machines[::-1]):
        assert code == 1
        assert "process 1 has a state of 2 steps, and process 0 one of 0" in errors[-1]
    for code, errors in run_together(*lines, folders=machines):
        assert code == 0, errors
    assert_as_in_one_process(whole, machines[0] / "out")
    assert not (machines[1] / "out").exists()


def test_any_number_of_processes_is_one(whole, tmp_path):
    """Four processes for batches of four, until one is killed; then three, until all are told to
    end; then one. What the first one has to say of a death is one line.
    """
    line = training(whole, output=tmp_path, save_every=50)
    log = tmp_path / "narrator-log.jsonl"
    for processes, steps, message in [
        (4, 2, "error: another process of this run has ended; its own message says why"),
        (3, 4, "interrupted"),
    ]:
        first, second, *others = start_together(*[line] * processes)
        while first.is_running() and not (log.exists() and len(read_jsonl(log)) >= steps):
            time.sleep(0.005)
        if processes == 4:
            second.process.kill()
        else:
            for process in (first, second, *others):
                process.process.terminate()
        for process in (second, *others):
            process.end()
        _, said = first.end()
        assert "of 6 steps are saved" in said[-2]
        assert said[-1].startswith(message)
        assert "Traceback" not in "".join(said)
        assert not (tmp_path / "adapter_model.safetensors").exists()
        if processes == 4:
            line = [*line, "--resume"]
    assert Forked(line, ROOT, os.environ).end()[0] == 0
    assert_as_in_one_process(whole, tmp_path)


OTHER = """
import sys, torch
torch.__version__ = "2.0"
sys.argv[:] = sys.argv[2:]
from beyond.commands.train_command import main
main()
"""


@pytest.mark.parametrize("change, named", [
    ({"batch": 3}, "process 1 has batch 3, and process 0 has 4"),
    ({"--resume": True}, "process 1 has resume True, and process 0 has False"),
    ({"dtype": "bfloat16"}, "process 1 has --dtype torch.bfloat16, and process 0 has torch.float32"),
    ({"root": "other sentences"}, "process 1 has the training videos 12 of hash"),
    ({"root": "other features"}, "process 1 has the features "),
    ({"torch": "2.0"}, "process 1 has PyTorch 2.0, and process 0"),
])
def test_what_processes_do_not_have_in_common_is_named(whole, tmp_path, change, named):
    if "root" in change:
        root = tmp_path / "root"
        epic(root, videos=12)
        if change["root"] == "other sentences":
            sentences = root / "annotations" / "refined_train_narrations.json"
            sentences.write_text(sentences.read_text().replace("knife", "fork"))
        else:
            save_features(root, {name: 2 * x for name, x in saved_features(root).items()})
        change = {"root": root}
    first = training(whole, output=tmp_path / "out")
    if "--resume" in change:
        second = [*first, "--resume"]
    elif "torch" in change:
        second = ["-c", OTHER, *first]
    else:
        second = training(whole, output=tmp_path / "out", **change)
    for code, errors in run_together(first, second):
        assert code == 1 and "Traceback" not in "".join(errors)
        assert errors[-1].startswith("error: at the start, ") and named in errors[-1]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["stream", "teacher"])
def test_processes_evaluate_alike(whole, tmp_path, command):
    """Else half of the figures would be of other options, or videos would be missing."""
    line = [ROOT / "evaluate.py", command, "--data", "ek100", "--model", whole / "out", "--device",
            "cpu", "--root", whole / "root"]
    options = ["--limit", "2", "--output", tmp_path / "out"]
    for code, errors in run_together(line, [*line, *options]):
        assert code == 1 and "process 1 has the videos 2 of hash" in errors[-1]
    assert not (tmp_path / "out").exists()


def test_an_evaluation_in_two_processes(whole, tmp_path, no_java):
    tiny(width=16, max_new_tokens=5).save(tmp_path / "model")
    line = ["stream", "--data", "ek100", "--root", whole / "root", "--limit", "3", "--device", "cpu",
            "--model", tmp_path / "model", "--output"]
    lines = [["evaluate.py", *line, tmp_path, "--per-video", tmp_path / f"{process}.json"]
             for process in (0, 1)]
    assert [code for code, _ in run_together(*lines)] == [0, 0]
    assert len(list((tmp_path / "predictions").iterdir())) == 3
    alone = [*line, tmp_path / "alone", "--per-video", tmp_path / "alone.json"]
    assert call(evaluate_command, [*map(str, alone)])[0] == 0
    assert (tmp_path / "0.json").read_text() == (tmp_path / "alone.json").read_text()
    assert not (tmp_path / "1.json").exists()  # the first process has the scores of all


WEIGHTS = """
import torch
from support.common.devices import rank
from support.common.processes import process_group
from beyond.training.run import weights_from_first
process, _ = rank()
weights = {"a": torch.arange(3.) + process, "b": torch.ones(2, dtype=torch.bfloat16) - process}
with process_group():
    weights_from_first(weights)
assert weights["a"].tolist() == [0, 1, 2] and weights["b"].tolist() == [1, 1]
"""


def test_weights_that_drift_apart_become_those_of_the_first_process():
    for code, errors in run_together(["-c", WEIGHTS], ["-c", WEIGHTS]):
        assert (code, errors) == (0, [])
