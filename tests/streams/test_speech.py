"""streams/speech.py: sentences are spoken by a program, and the stream never waits for it."""
import sys
import time

import pytest

from commands import stream as stream_command
from helpers import ROOT
from streams import speech
from streams.speech import Speaker, find_voice
from support.common.errors import BadData
from test_commands import call

# logs when a sentence begins and ends
VOICE = """#!{python}
import sys, time
print("no such sound\\n device", file=sys.stderr)
text = sys.argv[1].strip()
if text:
    with open({log!r}, "a") as log:
        print("begin", text, file=log, flush=True)
        time.sleep({seconds})
        print("end", file=log)
"""


@pytest.fixture
def voice(tmp_path):
    """Two functions: one makes a voice that takes some seconds; the other reads its log."""
    program = tmp_path / "voice"
    log = tmp_path / "log"

    def make(seconds):
        program.write_text(VOICE.format(python=sys.executable, log=str(log), seconds=seconds))
        program.chmod(0o755)
        return str(program)

    return make, lambda: log.read_text().splitlines() if log.exists() else []


def test_the_stream_does_not_wait(voice):
    """A sentence that comes while one is spoken is left out."""
    make, log = voice
    speaker = Speaker(make(1))
    began = time.monotonic()
    for text in ("-a", "b", "c"):
        speaker.say(text)
    assert time.monotonic() - began < 0.9
    speaker.process.wait()
    speaker.say("d")
    speaker.process.wait()
    assert log() == ["begin -a", "end", "begin d", "end"]


def test_without_a_voice_there_is_one_line(monkeypatch):
    monkeypatch.setattr(speech, "VOICES", ("nowhere",))
    with pytest.raises(BadData, match="apt install espeak-ng"):
        find_voice()


def test_the_command_speaks_what_it_prints(voice, monkeypatch):
    """A voice that complains, as espeak-ng does without a sound device, gets one line."""
    make, log = voice
    monkeypatch.setattr(speech, "VOICES", ("nowhere", make(0.5)))
    words = [str(ROOT / "toy" / "kitchen.mp4"), "--device", "cpu", "--speak"]
    code, errors = call(stream_command, words)
    assert code == 0, errors
    assert log()[0] == "begin You look around the kitchen."
    assert errors.count("is there a sound device? (... no such sound device)\n") == 1
