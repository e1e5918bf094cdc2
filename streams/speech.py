"""Narrations spoken while a stream goes on (stream.py --speak, not in the paper)."""
from __future__ import annotations

import shutil
import subprocess

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
    spoken is left out. (With --pace 1, a recording comes as it plays.)
    """

    def __init__(self, voice: str):
        self.voice = voice
        self.process: subprocess.Popen | None = None

    def say(self, text: str) -> None:
        if self.process is None or self.process.poll() is not None:
            # the blank: a text that begins with "-" is no option
            self.process = subprocess.Popen([self.voice, f" {text}"], stdin=subprocess.DEVNULL,
                                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
