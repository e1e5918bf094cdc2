"""Narrations spoken while a stream goes on (stream.py --speak, not in the paper)."""
from __future__ import annotations

import shutil
import subprocess
import sys

from support.common.errors import BadData, say_once
from support.common.text import one_line

VOICES = ("espeak-ng", "say")           # programs that speak their argument; `say` is macOS's


def find_voice() -> str:
    """The program that speaks. Raises BadData if there is none; prints a line if it complains."""
    for program in VOICES:
        if shutil.which(program):
            # without a sound device, espeak-ng is silent, and ends as if nothing were wrong
            trial = subprocess.run([program, " "], capture_output=True, errors="replace")
            if trial.stderr:
                complaint = one_line(trial.stderr)[-100:]
                say_once(f"--speak: {program} may stay silent; is there a sound device? "
                         f"(... {complaint})")
            return program
    raise BadData("--speak: there is no voice; apt install espeak-ng "
                  "(macOS: brew install espeak-ng)")


class Speaker:
    """Speaks sentences. The stream does not wait for it: a sentence that comes while another one is
    spoken is left out. As a context manager, it speaks to the end.
    """

    def __init__(self, voice: str):
        self.voice = voice
        self.process: subprocess.Popen | None = None
        self.left_out = 0

    def say(self, text: str) -> None:
        if self.process is not None and self.process.poll() is None:
            self.left_out += 1
            return
        # the blank: a text that begins with "-" is no option
        self.process = subprocess.Popen([self.voice, f" {text}"], stdin=subprocess.DEVNULL,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def __enter__(self) -> Speaker:
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is None and self.process is not None:
            self.process.wait()
        if self.left_out:
            print(f"--speak: {self.left_out} sentences were left out, because others were being "
                  f"spoken; a recording comes as it plays with --pace 1", file=sys.stderr)
