"""Narrations spoken while a stream goes on (stream.py --speak, not in the paper)."""
from __future__ import annotations

import shutil
import subprocess
import sys
from queue import Empty, Queue
from threading import Thread

from tqdm import tqdm

from support.common.errors import BadData
from support.common.text import one_line

VOICES = ("espeak-ng", "say")           # programs that speak what they read; `say` is macOS's


def find_voice() -> str:
    """Raises BadData if there is no voice."""
    for program in VOICES:
        if shutil.which(program):
            return program
    raise BadData("--speak: there is no voice; apt install espeak-ng "
                  "(macOS: brew install espeak-ng)")


class Speaker:
    """Speaks sentences one after the other, in a thread. The stream does not wait for it: while one
    sentence is spoken, only the newest of the others waits, and the rest are left out.

    As a context manager, it speaks to the end of what waits.
    """

    def __init__(self, voice: str):
        self.voice = voice
        self.waiting = Queue(1)
        self.left_out = 0
        self.thread = Thread(target=self.run, daemon=True)

    def say(self, text: str) -> None:
        if self.waiting.full():
            try:
                self.waiting.get_nowait()
                self.left_out += 1
            except Empty:                       # its turn has just come
                pass
        self.waiting.put(text)

    def run(self) -> None:
        for text in iter(self.waiting.get, None):
            voice = subprocess.run([self.voice], input=f"{text}\n".encode(errors="replace"),
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            if voice.returncode:
                said = one_line(voice.stderr.decode(errors="replace"))
                tqdm.write(f"--speak: {self.voice} fails: {said[-200:]}",
                           file=sys.stderr)

    def __enter__(self) -> Speaker:
        self.thread.start()
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is not None:                    # Ctrl-C: nothing more is spoken
            return
        self.waiting.put(None)
        self.thread.join()
        if self.left_out:
            print(f"--speak: {self.left_out} sentences were left out, because others were being "
                  f"spoken; a recording comes as it plays with --pace 1", file=sys.stderr)
