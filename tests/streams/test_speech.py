"""streams/speech.py: sentences are spoken by a program, and the stream never waits for it."""
import sys
import time

import pytest

from streams import speech
from streams.speech import Speaker, find_voice
from support.common.errors import BadData
from commands import stream as stream_command
from helpers import ROOT
from test_commands import call

# logs when a sentence begins and ends; "fail" fails
VOICE = """#!{python}
import sys, time
text = sys.stdin.read().strip()
if text == "fail":
    sys.exit("no such sound\\ndevice")
with open({log!r}, "a") as log:
    print("begin", len(text), file=log, flush=True)
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


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_the_stream_does_not_wait(voice, capsys):
    """A sentence that comes while one is spoken replaces the one that waits. Sentence i has i
    characters."""
    make, log = voice
    with Speaker(make(0.3)) as speaker:
        speaker.say("x")
        wait_for(log)
        began = time.monotonic()
        for i in range(2, 8):
            speaker.say("x" * i)
        assert time.monotonic() - began < 0.2
        wait_for(lambda: "begin 7" in log())
        speaker.say("x" * 8)
    # the end of the `with` waits for the last one
    assert log() == ["begin 1", "end", "begin 7", "end", "begin 8", "end"]
    assert "5 sentences were left out" in capsys.readouterr().err


def test_a_voice_that_fails_leaves_the_stream_alone(voice, capsys):
    """After an interruption, nothing more is spoken."""
    make, log = voice
    with pytest.raises(KeyboardInterrupt), Speaker(make(1)) as speaker:
        speaker.say("fail")
        wait_for(lambda: speaker.waiting.empty())
        speaker.say("x")
        wait_for(log)
        speaker.say("xx")
        raise KeyboardInterrupt
    assert log() == ["begin 1"]
    assert capsys.readouterr().err.count("voice fails: no such sound device\n") == 1


def test_without_a_voice_there_is_one_line(monkeypatch):
    monkeypatch.setattr(speech, "VOICES", ("nowhere",))
    with pytest.raises(BadData, match="apt install espeak-ng"):
        find_voice()


def test_the_command_speaks_what_it_prints(voice, monkeypatch, capsys):
    make, log = voice
    monkeypatch.setattr(speech, "VOICES", ("nowhere", make(0.5)))
    words = [str(ROOT / "toy" / "kitchen.mp4"), "--device", "cpu", "--speak"]
    code, errors = call(stream_command, words)
    assert code == 0, errors
    assert log()[0] == "begin 28"                      # letters of the first sentence
    assert "sentences were left out" in errors
