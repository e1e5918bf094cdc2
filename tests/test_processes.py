"""Several processes of one command: really run, with the variables that torchrun sets."""
import os
import subprocess
import sys

import pytest

from helpers import ROOT, TOY, run_together
from support.common import devices
from support.common.errors import BadData
from support.common.locks import Locked, locked
from support.files.video import write_video

# ------------------------------------------------------------------ launchers


@pytest.mark.parametrize("environment, name", [
    ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "SLURM_NTASKS"),
    ({"SLURM_PROCID": "3"}, "SLURM_PROCID"),
    ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE"),
    ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "PMI_SIZE"),
    ({"PALS_RANKID": "1"}, "PALS_RANKID"),
    ({"MPI_LOCALNRANKS": "2"}, "MPI_LOCALNRANKS"),
    ({"RANK": "1", "WORLD_SIZE": "4"}, "WORLD_SIZE"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "1"}, "WORLD_SIZE"),
    ({"RANK": "", "WORLD_SIZE": ""}, None),
    ({"RANK": "0", "WORLD_SIZE": "1"}, None),
    ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "PMI_SIZE": "1"}, None),
], ids=str)
def test_only_torchrun_makes_several_processes(environment, name, monkeypatch):
    """What another launcher starts is refused with the command to type; one process is one."""
    for variable in (*devices.SIZES, *devices.NUMBERS, *devices.OF_TORCHRUN):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(sys, "argv", ["train.py", "--data", "my videos"])
    assert devices.rank() == (0, 1)
    if name is None:
        devices.check_launcher()
        return
    with pytest.raises(BadData, match=f"^{name}=.*torchrun --nproc-per-node [234] train.py --data "
                                      f"'my videos'.* unset {name}$"):
        devices.check_launcher()


@pytest.mark.parametrize("command", [
    ["train.py", "--data", "toy"],
    ["data.py", "encode", "a.mp4", "--output", "features"],
], ids=" ".join)
def test_commands_that_share_work_refuse_other_launchers(command, tmp_path):
    environment = os.environ | {"SLURM_NTASKS": "2", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, ROOT / command[0], *command[1:]], cwd=tmp_path,
                          env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "torchrun --nproc-per-node 2" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ locks


def test_a_lock_is_of_one_run_at_a_time(tmp_path):
    """Another run is refused; afterwards nothing is left of a lock, nor of an empty folder."""
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
    code = ("import os, sys\n"
            "from support.common.locks import locked\n"
            "with locked(sys.argv[1]):\n"
            "    os.kill(os.getpid(), 9)\n")
    dead = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT)
    assert dead.returncode == -9
    with locked(tmp_path):
        pass


# ------------------------------------------------------------------ data.py encode


@pytest.fixture
def videos(tmp_path):
    """Four short videos, of which the first is damaged."""
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
    for code, errors in run_together(line):
        assert code == 1
        assert "Traceback" not in errors
        assert errors.splitlines()[-1] == ("error: 1 of 4 videos could not be encoded (named "
                                           "above); the others are done")
    made = sorted(file.name for file in (tmp_path / "features").iterdir())
    assert made == ["v1.safetensors", "v2.safetensors", "v3.safetensors"]
