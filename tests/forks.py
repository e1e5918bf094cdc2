"""Processes of the program that start at once: each is forked from a server that has imported it,
which takes seconds. (The server has one thread; no test forks itself.)"""
import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([
    "beyond.commands.train_command", "beyond.commands.evaluate_command", "beyond.commands.data_command",
    "matplotlib.pyplot", "transformers.models.llama.modeling_llama",
])


class Forked:
    """A running `python LINE`; -c CODE is possible. Its stdout is dropped."""

    def __init__(self, line: list, folder: Path, environment: dict[str, str]):
        number, self.file = tempfile.mkstemp()
        os.close(number)
        arguments = (list(map(str, line)), folder, dict(environment), self.file)
        self.process = SERVER.Process(target=run, args=arguments)
        self.process.start()

    def is_running(self) -> bool:
        return self.process.is_alive()

    def end(self, longest: float = 100) -> tuple[int, list[str]]:
        """Wait for its end -> exit code, lines on stderr."""
        self.process.join(longest)
        code = self.process.exitcode
        self.process.kill()
        lines = Path(self.file).read_text().splitlines()
        os.unlink(self.file)
        assert code is not None, ["it hangs", *lines]
        return code, lines


def run(line: list[str], folder: Path, environment: dict[str, str], errors: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, file in ((1, os.devnull), (2, errors)):
        os.dup2(os.open(file, os.O_WRONLY), number)
    sys.argv = line
    if line[0] == "-c":
        exec(line[1], {"__name__": "__main__"})
    else:
        runpy.run_path(line[0], run_name="__main__")
