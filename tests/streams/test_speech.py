"""Subtitles and speech: what is in the .mp4, when each sentence begins, which sentences are left
out, and what is spoken live."""
import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from fractions import Fraction
from functools import partial

import av
import numpy as np
import pytest

from commands import stream as stream_command
from helpers import ROOT
from streams import speech
from streams.subtitles import read_narrations
from support.common.errors import BadData
from support.files.video import write_video
from test_evaluate import command

add_speech = partial(command, main=speech.main)
KITCHEN = ROOT / "toy" / "kitchen.mp4"
# a second of tone for every ten characters; "fail" fails, "text" writes no WAV, "none" no samples
VOICE = """
import io, math, struct, sys, wave
text = sys.stdin.read().strip()
if "fail" in text:
    sys.exit("no such\\n model")
if "text" in text:
    sys.exit(print("RIFF?"))
n = 0 if "none" in text else len(text) * 1600
file = io.BytesIO()
with wave.open(file, "wb") as out:
    out.setparams((1, 2, 16000, n, "NONE", None))
    out.writeframes(b"".join(struct.pack("<h", int(9000 * math.sin(i / 5 + 1))) for i in range(n)))
sys.stdout.buffer.write(file.getvalue())
"""
PLAYER = """#!{python}
import sys, time, wave
with open({log!r}, "a") as log:
    print("begin", wave.open(sys.argv[-1]).getnframes() // 4800, file=log, flush=True)
    time.sleep({seconds})
    print("end", file=log)
sys.exit({code})
"""


@pytest.fixture
def voice(tmp_path):
    (tmp_path / "voice.py").write_text(VOICE)
    return [sys.executable, str(tmp_path / "voice.py")]


def row(start, end, text="x" * 10, **more):
    return {"n": 0, "start": start, "end": end, "text": text} | more


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def black_video(path):
    """4 seconds of black pictures."""
    write_video(path, np.zeros((8, 16, 16, 3), np.uint8), 2)
    return path


def packets(path):
    """(bytes, pts, dts) of all packets of the pictures; times in seconds from their start."""
    rows = []
    with av.open(path) as container:
        pictures = container.streams.video[0]
        start = pictures.start_time * pictures.time_base
        for packet in container.demux(pictures):
            if packet.size:
                pts = packet.pts * packet.time_base - start
                dts = None if packet.dts is None else packet.dts * packet.time_base - start
                rows.append((bytes(packet), pts, dts))
    return rows


def cues(path):
    """(start, end, text) of each subtitle, in seconds."""
    rows = []
    with av.open(path) as container:
        track = container.streams.subtitles[0]
        for packet in container.demux(track):
            if packet.size > 2:                          # two bytes are the text's length
                start = packet.pts * packet.time_base
                end = (packet.pts + packet.duration) * packet.time_base
                rows.append((float(start), float(end), bytes(packet)[2:].decode()))
    return rows


def sound(path) -> np.ndarray:
    """The left channel of a file's sound [n]."""
    frames = [frame.to_ndarray() for frame in speech.listen(str(path), "stereo")]
    return np.concatenate(frames, 1)[0]


def onset(samples, begin: float, earliest: float) -> float:
    """The second at which sound begins, within half a second of `begin`, not before `earliest`."""
    first = round(max(earliest, begin - 0.5) * speech.RATE)
    last = round((begin + 0.5) * speech.RATE)
    heard = np.flatnonzero(abs(samples[first:last]) > 0.02)
    return (first + heard[0]) / speech.RATE


def level(samples, second: float) -> float:
    """Root mean square of half a second of sound."""
    half = samples[round(second * 48000):][:24000]
    return float((half ** 2).mean() ** 0.5)


# ---------------------------------------------------------------------- the file

@pytest.fixture(scope="module")
def kitchen(tmp_path_factory):
    """`stream.py toy/kitchen.mp4 --speak`: its JSONL, what it printed, and what the Speaker got."""
    path = tmp_path_factory.mktemp("kitchen") / "k.jsonl"
    sentences = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speech, "PLAYERS", ("true",))
        patch.setattr(speech.Speaker, "say", lambda self, text: sentences.append(text))
        options = "--jsonl", path, "--device", "cpu", "--voice-command", "true"
        printed = command(KITCHEN, *options, main=stream_command.main)
    return path, printed, sentences


def test_a_stream_is_spoken(kitchen):
    """Each sentence that it prints."""
    _, printed, sentences = kitchen
    assert sentences == [line.split("] ")[1] for line in printed.splitlines()]
    assert len(sentences) == 43


@pytest.mark.skipif(not shutil.which("espeak-ng"), reason="needs espeak-ng: apt install espeak-ng")
def test_the_kitchen_is_spoken(kitchen, tmp_path, monkeypatch):
    """Cues at the times of the JSONL, pictures as they were, each sentence at its time or after the
    one before."""
    lengths = []
    original = speech.speak

    def speak(*arguments):
        samples = original(*arguments)
        lengths.append(len(samples))
        return samples

    monkeypatch.setattr(speech, "speak", speak)
    add_speech(KITCHEN, kitchen[0], "--mp4", tmp_path / "k.mp4", "--speak")
    rows = [json.loads(line) for line in kitchen[0].read_text().splitlines()]
    assert len(rows) == len(lengths) == 43
    for (start, end, text), narration in zip(cues(tmp_path / "k.mp4"), rows, strict=True):
        assert abs(start - narration["start"]) < 1e-3 and abs(end - narration["end"]) < 1e-3
        assert text == narration["text"]
    assert packets(tmp_path / "k.mp4") == packets(KITCHEN)
    heard = sound(tmp_path / "k.mp4")
    free = 0.0                                                   # end of the sentence before
    waited = 0
    for narration, length in zip(rows, lengths):
        begin = max(narration["end"], free)
        assert abs(onset(heard, begin, free) - begin) < 0.05
        if begin > narration["end"]:
            waited += 1
        free = begin + length / speech.RATE
    assert waited > 0


def film(path, form, pictures, tone=None, late=0.0, seconds=4):
    """A video of a box that moves, with a tone of amplitude 0.5.

    The tone begins `late` seconds after the picture; below 0: before it.
    """
    with av.open(str(path), "w", format=form) as file:
        video = file.add_stream(pictures, rate=10)
        video.width = video.height = 64
        video.pix_fmt = "yuv420p"
        audio = tone and file.add_stream(tone, rate=48000, layout="stereo")
        for i in range(10 * seconds):
            picture = np.zeros((64, 64, 3), np.uint8)
            picture[i:i + 20, i:i + 20] = 200
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = i + round(10 * max(0.0, -late)), Fraction(1, 10)
            file.mux(video.encode(frame))
            if tone and i >= 10 * late:
                wave_form = 0.5 * np.sin(np.arange(4800 * i, 4800 * (i + 1), dtype=np.float32) / 10)
                if audio.format.is_planar:
                    samples = np.stack([wave_form] * 2)          # [2, n]
                else:
                    samples = np.repeat(wave_form, 2)[None]      # [1, 2 n]
                if not audio.format.name.startswith("flt"):
                    samples = (32767 * samples).astype(np.int16)
                frame = av.AudioFrame.from_ndarray(samples, audio.format.name, "stereo")
                frame.sample_rate = 48000
                frame.pts = 4800 * i
                frame.time_base = Fraction(1, 48000)
                file.mux(audio.encode(frame))
        for track in filter(None, (video, audio)):
            file.mux(track.encode())
    return path


def sound_packet_sizes(path) -> list[int]:
    with av.open(path) as container:
        return [packet.size for packet in container.demux(audio=0) if packet.size]


@pytest.mark.parametrize("form, pictures, tone, kept", [
    ("mp4", "libx264", "aac", True),
    ("matroska", "libx264", "libopus", True),
    ("mpegts", "libx264", "aac", True),
    ("matroska", "mpeg4", "pcm_s16le", False),
])
def test_own_sound_is_kept_or_quieter(form, pictures, tone, kept, tmp_path, voice):
    """Without speech, packets of sound are copied where .mp4 can hold them; under speech, the sound
    is 12 dB quieter. Pictures keep their times: Matroska leaves some of them out, MPEG-TS begins at
    1.4 s and has other marks between its packets."""
    source = film(tmp_path / "a.film", form, pictures, tone, late=1.0)
    said = jsonl(tmp_path / "a.jsonl", row(0, 2.5), row(2.5, 4))
    add_speech(source, said, "--mp4", tmp_path / "plain.mp4")
    add_speech(source, said, "--mp4", tmp_path / "said.mp4", "--voice-command", shlex.join(voice))
    for name in ("plain.mp4", "said.mp4"):
        before = packets(source)
        after = packets(tmp_path / name)
        assert len(before) == len(after) == 40
        for (data, pts, dts), (copy, copy_pts, copy_dts) in zip(before, after):
            assert form == "mpegts" or data == copy
            assert abs(pts - copy_pts) < 1e-3
            assert dts is None or abs(dts - copy_dts) < 1e-3
    if form != "mpegts":
        same = sound_packet_sizes(tmp_path / "plain.mp4") == sound_packet_sizes(source)
        assert same == kept
    plain, mixed = sound(tmp_path / "plain.mp4"), sound(tmp_path / "said.mp4")
    assert abs(onset(mixed, 1.0, 0.0) - 1.0) < 0.06
    assert abs(level(plain, 1.5) / 0.5 - 0.5 ** 0.5) < 0.02
    assert abs(20 * np.log10(level(mixed, 1.5) / level(plain, 1.5)) + 12) < 0.3
    assert level(mixed, 2.6) > 2 * level(mixed, 1.5)             # speech over it
    assert abs(len(mixed) / 48000 - 5) < 0.1                     # the last sentence to its end


def test_sound_that_begins_before_the_picture(tmp_path):
    """A film whose picture begins at 0.5 s: the sound before is left out."""
    source = film(tmp_path / "a.mkv", "matroska", "mpeg4", "pcm_s16le", late=-0.5)
    add_speech(source, jsonl(tmp_path / "a.jsonl", row(0, 2.5)), "--mp4", tmp_path / "b.mp4")
    assert abs(len(sound(tmp_path / "b.mp4")) / 48000 - 3.5) < 0.2       # 0.1 s is not corrected


def test_sound_that_begins_late_in_a_long_video(tmp_path):
    """A gap is silence, if it is no longer than the video; else its clock is damaged."""
    source = film(tmp_path / "a.mkv", "matroska", "mpeg4", "pcm_s16le", late=2.0)
    for longest_gap, seconds in ((3.0, 4.0), (1.0, 2.0)):
        pieces = list(speech.sound_of_video(str(source), 0.0, longest_gap))
        samples = sum(piece.shape[1] for piece in pieces)
        assert abs(samples / speech.RATE - seconds) < 0.15


def test_a_clock_of_sound_that_jumps(monkeypatch):
    """An hour of silence comes in seconds. A clock that begins anew takes nothing away."""
    def frame(second):
        return argparse.Namespace(pts=second, time_base=Fraction(1),
                                  to_ndarray=lambda: np.ones((2, speech.RATE), np.float32))

    for seconds, expected in (([0, 3000, 3001], 3002), ([0, 1, 2, 200, 0, 1], 203)):
        monkeypatch.setattr(speech, "listen", lambda *_: map(frame, seconds))
        pieces = list(speech.sound_of_video("a.mkv", 0.0, 3600.0))
        assert max(piece.shape[1] for piece in pieces) == speech.RATE
        assert sum(piece.shape[1] for piece in pieces) == expected * speech.RATE


def test_cues(tmp_path):
    """In the order of their times, one at a time, to the millisecond; marks and other scripts are
    text."""
    source = black_video(tmp_path / "a.mp4")
    marks = "<b>{\\i1}\\N --> & \u4f60\u597d"
    said = [row(1.0, 2.5, marks), row(0, 0.333, "One\nline."), row(2, 3.1234, "x" * 70_000)]
    add_speech(source, jsonl(tmp_path / "a.jsonl", *said), "--mp4", tmp_path / "b.mp4")
    assert cues(tmp_path / "b.mp4") == [(0, 0.333, "One line."), (1, 2, marks),
                                        (2, 3.123, "x" * 65_535)]
    with av.open(tmp_path / "b.mp4") as file:
        assert [track.type for track in file.streams] == ["video", "subtitle"]
    add_speech(source, jsonl(tmp_path / "none.jsonl"), "--mp4", tmp_path / "c.mp4")
    assert cues(tmp_path / "c.mp4") == []
    assert packets(tmp_path / "c.mp4") == packets(source)


def test_late_sentences_are_faster_or_left_out(voice, monkeypatch):
    """More than 3 s behind: 1.5 times faster; more than 6 s: left out. Repeats take no time."""
    asked = []

    def speak(words, text, tempo):
        """A tenth of a second for each character."""
        asked.append((text[0], tempo))
        return np.ones(round(len(text) * 4800 / tempo), np.float32)

    monkeypatch.setattr(speech, "speak", speak)
    rows = [row(0, 1, "x" * 45), row(1, 2, "repeated", repeat=True), row(1, 2, "y" * 60),
            row(2, 3, "z" * 30), row(3, 3.4, "w" * 30), row(4, 20, "v")]
    count = Counter()
    times = []                                                   # (begin, length) in seconds
    for begin, samples in speech.utterances(rows, voice, count):
        times.append((begin / speech.RATE, len(samples) / speech.RATE))
    assert asked == [("x", 1.0), ("y", 1.5), ("v", 1.0)]
    assert times == [(1, 4.5), (5.5, 4), (20, 0.1)]
    assert count == {"faster": 1, "left out": 2}


def test_silence_between_utterances():
    utterances = [(48000, np.ones(9)), (200_000, np.ones(5))]
    track = np.concatenate(list(speech.speech(utterances)), 1)
    assert track.shape == (1, 200_005)
    heard = np.flatnonzero(track[0]).tolist()
    assert heard == [*range(48000, 48009), *range(200_000, 200_005)]


def test_a_sentence_in_two_tempi(voice):
    plain = speech.speak(voice, "x" * 10)
    fast = speech.speak(voice, "x" * 10, 1.5)
    assert abs(len(plain) - 48000) < 100 and abs(len(fast) - 32000) < 2000
    assert len(speech.speak(voice, "none")) == 0
    crossings = [(np.diff(np.sign(samples)) != 0).mean() for samples in (plain, fast)]
    assert abs(crossings[0] / crossings[1] - 1) < 0.05           # the same pitch


# ---------------------------------------------------------------------- what is refused

def test_without_a_voice_there_are_subtitles(tmp_path, monkeypatch):
    """One line with the install command; subtitles work without."""
    target = tmp_path / "b.mp4"
    arguments = [black_video(tmp_path / "a.mp4"), jsonl(tmp_path / "a.jsonl", row(0, 1)),
                 "--mp4", target]
    monkeypatch.setattr(speech.shutil, "which", lambda name: None)
    error = add_speech(*arguments, "--speak", ok=False)
    assert "apt install espeak-ng" in error and not target.exists()
    error = add_speech(*arguments, "--voice-command", "piper -f -", ok=False)
    assert "there is no program piper" in error
    add_speech(*arguments)
    assert len(cues(target)) == 1
    with pytest.raises(BadData, match="apt install espeak-ng"):
        speech.Speaker(argparse.Namespace(speak=True, voice_command=None))


def test_the_second_voice_is_that_of_macos(tmp_path, monkeypatch):
    """With a program that takes the options of `say` and writes the WAV to its file."""
    to_file = VOICE.replace("sys.stdout.buffer.write(",
                            "assert sys.argv[-2:] == ['-f', '-']\n"
                            "open(sys.argv[sys.argv.index('-o') + 1], 'wb').write(")
    (tmp_path / "say").write_text(f"#!{sys.executable}\nimport sys, os\n{to_file}")
    (tmp_path / "say").chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    which = shutil.which

    def which_without_espeak(name):
        return None if name == "espeak-ng" else which(name, path=path)

    monkeypatch.setattr(speech.shutil, "which", which_without_espeak)
    monkeypatch.setenv("PATH", path)
    words = speech.find_voice(argparse.Namespace(speak=True, voice_command=None))
    assert abs(len(speech.speak(words, "x" * 5)) - 24000) < 100


@pytest.mark.parametrize("text, says", [("fail", "no such model"), ("text", "wrote no WAV")])
def test_a_voice_that_fails_gets_one_line(text, says, tmp_path, voice):
    source = black_video(tmp_path / "a.mp4")
    rows = jsonl(tmp_path / "a.jsonl", row(0, 1), row(1, 2, text))
    options = "--mp4", tmp_path / "b.mp4", "--voice-command", shlex.join(voice)
    assert says in add_speech(source, rows, *options, ok=False)
    assert list(tmp_path.glob("*.mp4")) == [source]
    assert not list(tmp_path.glob(".*"))


def test_a_voice_that_hangs_gets_one_line(monkeypatch):
    monkeypatch.setattr(speech, "LONGEST_WAIT", 0.1)
    with pytest.raises(BadData, match="took more than 0.1 s"):
        speech.speak(["sleep", "5"], "x")


@pytest.mark.parametrize("line", [
    {"start": 0, "text": "x"},
    {"start": 2, "end": 1, "text": "x"},
    {"start": -1, "end": 1, "text": "x"},
    {"start": 0, "end": 1, "text": 3},
], ids=str)
def test_lines_that_are_no_narrations(line, tmp_path):
    with pytest.raises(BadData, match="line 2: expected"):
        read_narrations(jsonl(tmp_path / "a.jsonl", row(0, 1), line))


def test_videos_that_do_not_fit(tmp_path):
    rows = jsonl(tmp_path / "a.jsonl", row(0, 1))
    webm = film(tmp_path / "a.webm", "webm", "libvpx", seconds=1)
    missing = tmp_path / "x.mp4"
    target = tmp_path / "b.mp4"
    for source, path, message in [(webm, target, "cannot be copied into an .mp4"),
                                  (KITCHEN, KITCHEN, "is given twice"),
                                  (missing, target, "no such file")]:
        assert message in add_speech(source, rows, "--mp4", path, ok=False)
    assert not target.exists()


# ---------------------------------------------------------------------- live

@pytest.fixture
def speaker(tmp_path, monkeypatch, voice):
    """Two functions: one makes a Speaker whose player logs when a sentence begins and ends; the
    other reads the log."""
    def make(seconds=0.1, code=0):
        program = tmp_path / "player"
        log = str(tmp_path / "log")
        program.write_text(PLAYER.format(python=sys.executable, log=log, seconds=seconds,
                                         code=code))
        program.chmod(0o755)
        monkeypatch.setattr(speech, "PLAYERS", ("nowhere", str(program)))
        return speech.Speaker(argparse.Namespace(speak=False, voice_command=shlex.join(voice)))

    return make, lambda: (tmp_path / "log").read_text().split("\n")[:-1]


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_live_speech_is_at_most_one_sentence_behind(speaker, tmp_path):
    """A sentence that comes while one is spoken replaces the one that waits; no two processes at
    once. Sentence i has i characters."""
    make, log = speaker
    with make(0.3) as talk:
        talk.say("x")
        wait_for((tmp_path / "log").exists)
        for i in range(2, 8):
            talk.say("x" * i)
        wait_for(lambda: "begin 7" in log())
        talk.say("x" * 8)
    # the end of the `with` waits for the last one
    assert log() == ["begin 1", "end", "begin 7", "end", "begin 8", "end"]
    assert not talk.thread.is_alive()


def test_an_interruption_ends_after_the_sentence(speaker, tmp_path):
    make, log = speaker
    with pytest.raises(KeyboardInterrupt):
        with make() as talk:
            talk.say("x")
            wait_for((tmp_path / "log").exists)
            talk.say("xx")
            raise KeyboardInterrupt
    assert log() == ["begin 1", "end"] and not talk.thread.is_alive()


@pytest.mark.parametrize("code, text, says", [
    (1, "x", "player fails"),
    (0, "fail", "no such model"),
])
def test_speech_that_fails_leaves_the_stream_alone(code, text, says, speaker, capsys):
    make, _ = speaker
    with make(0, code) as talk:
        talk.say(text)
        talk.thread.join(20)
        talk.say("x")
    messages = capsys.readouterr().err
    assert messages.count("speech ends here") == 1 and says in messages


def test_without_a_player_there_is_one_line(monkeypatch, voice):
    monkeypatch.setattr(speech, "PLAYERS", ("nowhere",))
    with pytest.raises(BadData, match="no program to play sound: apt install alsa-utils"):
        speech.Speaker(argparse.Namespace(speak=True, voice_command=shlex.join(voice)))


def test_the_command_runs(tmp_path):
    source = black_video(tmp_path / "a.mp4")
    rows = jsonl(tmp_path / "a.jsonl", row(0, 1))
    target = tmp_path / "b.mp4"
    line = sys.executable, "-m", "streams.speech", source, rows, "--mp4", target
    process = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (0, "")
    assert process.stderr == f"written: {target}\n"
    assert len(cues(target)) == 1


def test_an_mp4_of_another_program_is_not_replaced(tmp_path):
    """What this program writes has a track of subtitles."""
    video = tmp_path / "holiday.mp4"
    shutil.copy(KITCHEN, video)
    text = tmp_path / "text.mp4"
    text.write_text("no video")
    for path in (video, text):
        with pytest.raises(BadData, match="this program has not written it"):
            speech.check_ours(str(path))
    speech.check_ours(str(tmp_path / "new.mp4"))
    speech.write_mp4(KITCHEN, [{"start": 0.0, "end": 1.0, "text": "You look."}], video)
    speech.check_ours(str(video))
