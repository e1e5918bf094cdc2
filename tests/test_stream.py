"""Streaming (§3.4): the cache, a long stream, the command line."""
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from functools import cache
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import stream
import train
from beyond.baselines import context_class
from narrator import load
from beyond.commands import stream_command
from beyond.commands.data_command import write_toy
from beyond.commands.stream_command import AUTHORS, default_model
from helpers import ROOT, TOY, kitchen_tokens, record, tiny, video
from beyond.training.late import Past, memory_after
from beyond.streams.inputs import FORMS, Input
from beyond.streams.live import paced
from beyond.streams.subtitles import Writers, srt_cue, timestamp, vtt_cue
from support.common.disk import read_json, read_jsonl as rows_of
from support.engine.folders import fetched
from support.common.errors import BadData
from support.common.locks import lock_opened, locked
from support.common.options import DEFAULT_MODEL
from support.common.text import one_line
from support.files.sources import source_of
from support.files.video import write_video
from test_commands import call, outcome
from test_equalities import assert_same, constant
from test_live import until


@pytest.mark.parametrize("variant", [{"last_k": 2}, {"last_k": 0, "narration_memory": 6}], ids=str)
def test_the_middle_of_a_long_stream(variant):
    """The parallel forward with a Past is a stream that continues, far beyond the prompt."""
    model = tiny(**variant)
    x, narrations = video(model)
    state = memory_after(model, [train.Example(*video(model, 30, (0, 8, 20), seed=5))])

    class Late(context_class(model)):
        jump = 5000

        def feed(self, tokens, x=None):
            logits = super().feed(tokens, x)
            self.position += self.jump
            self.jump = 0
            return logits

    context = Late(model)
    other_pasts = [Past(None, 0)]
    if hasattr(model, "narration_memory"):
        context.state, context.history_state = state
        other_pasts.append(Past((state[0], None), 5000))
    else:
        context.state = state
    logits = record(model)
    list(stream.narrate(model, x[:16], given=dict(narrations), context=context))
    del model.run

    with torch.no_grad():
        parallel = model.logits(Past(state, 5000).hidden(model, x, narrations))
        for past in other_pasts:
            other = model.logits(past.hidden(model, x, narrations))
            assert (other - parallel).abs().max() > 1e-2
    assert_same(model, narrations, torch.stack(logits), parallel)


@pytest.mark.parametrize("keep_newline", [False, True])
def test_published_weights_run_in_constant_memory(keep_newline, tmp_path):
    """Without narrator.json; keep_newline reproduces the leak, one token a narration."""
    tiny(memory_target=False, memory_heads=8).save(tmp_path)
    (tmp_path / "narrator.json").unlink()
    options = {"keep_newline": True} if keep_newline else {}
    model = load(str(tmp_path), last_k=2, **options)
    assert (model.config.readout, model.config.keep_newline) == ("cls", keep_newline)
    x, _ = video(model, frames=10)
    every_frame = {t: [5, 6, 7] for t in range(10)}
    text = [step.text_tokens for step in stream.narrate(model, x, given=every_frame)]
    assert {later - now for now, later in zip(text[3:], text[4:])} == {int(keep_newline)}


def test_two_thresholds_wait_static_does_not():
    model = constant(theta=0.7, theta_low=0.5)
    x, _ = video(model, frames=21)
    # after the refractory 8 frames, and the last frame
    for static, frames in ((False, [0, 9, 18, 20]), (True, list(range(21)))):
        steps = stream.narrate(model, x, static)
        assert [step.frame for step in steps if step.narration] == frames


def test_narration_without_end_is_closed():
    model = constant(theta=0.7, last_k=1)
    x, _ = video(model, frames=21)
    context = stream.Context(model)
    steps = list(stream.narrate(model, x, context=context))
    said = [(step.frame, step.narration.tokens) for step in steps if step.narration]
    assert [len(words) for _, words in said] == [3, 3, 3, 3]
    assert context.position == len(model.layout.sequence(said)) - 1


def features(path, frames):
    if isinstance(frames, int):
        frames = torch.randn(frames, 10, 128, generator=torch.Generator().manual_seed(frames))
    save_file({"x": frames}, path)
    return str(path)


@cache
def narrated_kitchen(tmp_of_all: Path) -> tuple[str, str, Path]:
    """stream.py on toy/kitchen.mp4, once for all tests: what it printed, its lines on stderr, and the
    folder of its outputs, with what --serve shows at the end (served, served frame.jpg)."""
    folder = tmp_of_all / "narrated_kitchen"
    folder.mkdir()
    sleep = time.sleep

    def ask_and_interrupt(seconds):
        if seconds < 3600:
            return sleep(seconds)
        url = re.search("page: (.*)", sys.stderr.getvalue())[1]
        for name in ("", "frame.jpg"):
            with urlopen(url + name) as answer:
                (folder / f"served {name}").write_bytes(answer.read())
        raise KeyboardInterrupt

    outputs = [f"--{form}={folder / form}" for form in FORMS if form != "state"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", ask_and_interrupt)
        code, stdout, errors = outcome(
            stream_command, [str(ROOT / "toy" / "kitchen.mp4"), "--serve", "0", *outputs])
    assert code == 130, errors
    return stdout, errors, folder


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory):
    return narrated_kitchen(tmp_path_factory.getbasetemp())


def test_narrates_the_kitchen(kitchen):
    stdout, errors, folder = kitchen
    truth = json.loads((ROOT / "toy" / "kitchen.json").read_text())["narrations"]
    rows = rows_of(folder / "jsonl")
    printed = [f"[{timestamp(row['end'])}] {row['text']}" for row in rows]
    assert stdout.splitlines() == printed
    assert abs(len(rows) - len(truth)) <= 0.1 * len(truth)
    true_texts = {narration["text"] for narration in truth}
    assert len(true_texts & {row["text"] for row in rows}) >= 0.94 * len(true_texts)
    # what the README says of the sentences that need the memory
    told = Counter(row["text"] for row in rows)
    needing = Counter(narration["text"] for narration in truth if narration.get("memory"))
    assert (needing.total(), (needing - told).total()) == (21, 3)
    assert "frames/s" in errors and "cache" in errors
    assert f"narrator: {TOY}\n" in errors               # which nobody has named


def test_output_formats(kitchen):
    _, _, folder = kitchen
    rows = rows_of(folder / "jsonl")
    assert list(rows[0]) == ["n", "frame", "start", "end", "text", "p_skip", "tokens"]
    assert [row["n"] for row in rows] == list(range(len(rows)))
    assert all(row["end"] == (row["frame"] + 1) / 2 for row in rows)
    assert all(row["end"] == later["start"] for row, later in zip(rows, rows[1:]))

    # the last frame is decided twice, and its last row counts
    trace = list({row["frame"]: row for row in rows_of(folder / "trace")}.values())
    assert list(trace[1]) == ["frame", "p_skip", "theta", "narrate", "position", "text_tokens",
                              "visual_tokens", "forced", "kept"]
    assert [row["frame"] for row in trace] == [*range(304)]
    narrated = [row["frame"] for row in trace if row["narrate"]]
    assert narrated == [row["frame"] for row in rows]
    assert [row["frame"] for row in trace if row["forced"]] == [0, 303]     # the first and the last
    kept = [row["kept"] for row in trace if row["narrate"]]                 # of ten, in the cache
    assert kept == [[max(0, n - 9), n] for n in range(len(rows))]

    vtt = (folder / "vtt").read_text()
    srt = (folder / "srt").read_text()
    assert vtt.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:00.500\n")
    assert srt.startswith("1\n00:00:00,000 --> 00:00:00,500\n")
    assert srt.count(" --> ") == vtt.count(" --> ") == len(rows)


def test_the_plain_context_narrates_the_kitchen(kitchen):
    """Algorithm 2 as it stands gives the sentences of the command, with all that makes it fast."""
    _, _, folder = kitchen
    steps = stream.narrate(load(str(TOY)).merge(), kitchen_tokens(130))
    plain = [(step.frame, step.narration.text) for step in steps if step.narration]
    rows = rows_of(folder / "jsonl")
    assert len(rows) == 43 and len(plain) > 15
    # the last frame always narrates
    assert plain[:-1] == [(row["frame"], row["text"]) for row in rows[:len(plain) - 1]]


def test_explain(tmp_path):
    """After each narration, the memory mostly holds what the next sentence takes from it."""
    source = features(tmp_path / "kitchen.safetensors", kitchen_tokens(130))
    code, stdout, _ = outcome(stream_command, [source, "--explain"])
    assert code == 0
    joined = stdout.replace("\n  narration", ": narration").replace("\n        ", " ")
    lines = [line for line in joined.splitlines() if line.startswith("frame ")]
    assert len(lines) == 131                            # the last frame is decided twice
    assert "the first frame always narrates" in lines[0]
    assert "[SKIP] x*10; p 1.000 > 0.5 low; l 98; cache 52 + 34" in lines[2]
    memories = [line for line in joined.splitlines() if line.startswith("memory: ")]
    assert f"narration {len(memories) - 1}:" in lines[-1]
    assert re.fullmatch(r"memory: (\w+: \w+ \w+ \(\d\.\d\d, \d+ s\)(; )?)+", memories[10])
    sentences = [line for line in stdout.splitlines() if line.startswith("[")]
    from_memory = []
    for memory, sentence in zip(memories, sentences[1:]):
        needs = re.search(r"the (\w+) (?:hiding|after) the (\w+ \w+)\.", sentence)
        if needs:
            from_memory.append("{}: {} (".format(*needs.groups()) in memory)
    assert len(from_memory) > 5 and sum(from_memory) > len(from_memory) / 2


@pytest.mark.parametrize("cached", [True, False])
def test_other_videos_are_narrated_by_the_published_narrator(cached, tmp_path, monkeypatch):
    write_video(tmp_path / "a.mp4", [np.full((96, 96, 3), 9 * k, np.uint8) for k in range(4)], 2)
    if cached:
        folder = tmp_path / "hub" / "models--zeyun-zhong--flownar-1B-ego4d"
        shutil.copytree(TOY, folder / "snapshots" / "0123")
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    fetched.cache_clear()
    code, stdout, errors = outcome(stream_command, [str(tmp_path / "a.mp4")])
    if cached:
        assert code == 0 and stdout.startswith("[00:00:00.5] You"), errors
    else:
        assert code == 1 and len(errors.splitlines()) == 1, errors
        for says in ("zeyun-zhong/flownar-1B-ego4d", "licence", "--model toy/checkpoint"):
            assert says in errors


def test_the_toy_is_known_by_what_its_files_say(tmp_path):
    toy, bundled = tmp_path / "a.mp4", tmp_path / "b.mp4"
    write_toy(1, 0.1, toy)
    shutil.copy(ROOT / "toy" / "kitchen.mp4", bundled)
    for path in (toy, bundled):
        assert default_model([source_of(str(path))]) == DEFAULT_MODEL
    header = {"vision": "other", "grid": "3", "fps": "2", "duration": "1"}
    known = read_json(TOY / "narrator.json")["vision_mark"]
    for says, width, model in (({"vision_mark": known}, 128, DEFAULT_MODEL),
                               ({"vision_mark": "another"}, 128, AUTHORS),
                               ({}, 128, DEFAULT_MODEL), ({}, 1024, AUTHORS)):
        save_file({"x": torch.zeros(2, 10, width)}, tmp_path / "x.safetensors", header | says)
        assert default_model([source_of(str(tmp_path / "x.safetensors"))]) == model


def test_several_inputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows_alone = {}
    for name, frames in (("a", 3), ("b", 5)):
        features(f"{name}.safetensors", frames)
        assert call(stream_command, [f"{name}.safetensors", f"--jsonl={name}.jsonl"])[0] == 0
        rows_alone[name] = rows_of(tmp_path / f"{name}.jsonl")

    (tmp_path / "broken.mp4").write_text("no video")
    inputs = ["a.safetensors", "missing.safetensors", "broken.mp4", "b.safetensors"]
    code, stdout, errors = outcome(stream_command, [*inputs, "--jsonl", "out", "--srt", "out"])
    assert code == 1 and "2 of 4 inputs" in errors
    assert errors.count("missing: missing.safetensors") == errors.count("broken.mp4") == 1
    lines = stdout.splitlines()
    assert not any("missing" in line or "broken" in line for line in lines)
    for name, rows in rows_alone.items():
        rows_beside = rows_of(tmp_path / "out" / f"{name}.jsonl")
        assert [row["text"] for row in rows_beside] == [row["text"] for row in rows]
        printed = [line for line in lines if line.startswith(f"[{name} ")]
        assert printed == [f"[{name} {timestamp(row['end'])}] {row['text']}" for row in rows]
        srt = (tmp_path / "out" / f"{name}.srt").read_text()
        assert srt.count(" --> ") == len(rows)


def test_narrations_of_ones_own_are_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("b.MP4").touch()                      # a video that is not narrated now
    torch.save(torch.zeros(1, 10, 64), "c.pt")
    x = features("x.safetensors", 2)
    for source, option, file in (
        (x, "--srt", "x.srt"), (x, "--vtt", "./x.vtt"), (x, "--jsonl", "x.json"),
        (x, "--srt", "b.srt"), ("c.pt", "--srt", "c.srt"),
    ):
        Path(file).write_text("my own")
        line = [source, f"{option}={file}"]
        assert_refused(line, "beside a video narrations of its name are taken for your own")
        assert Path(file).read_text() == "my own"


def test_no_two_runs_write_one_file(tmp_path, monkeypatch):
    """One of them would cut what the other one has written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").write_text("of the first")
    (tmp_path / "link").symlink_to("x")
    (tmp_path / "hard").hardlink_to("x")
    with locked(tmp_path, "x"), open("x") as file:
        lock_opened(file)
        for output in ("--state=x", "--jsonl=link", "--jsonl=hard"):
            given = [features("x.safetensors", 2), f"--model={TOY}", output]
            assert_refused(given, "another run is writing")
    assert (tmp_path / "x").read_text() == "of the first"


def test_outputs_of_a_command_that_is_given_again(tmp_path, monkeypatch):
    """Folders are made. Its own outputs are replaced, but for narrations beside the video."""
    monkeypatch.chdir(tmp_path)
    source = features("x.safetensors", 2)
    names = ["x.jsonl", "new/out/x.srt", "new/x.vtt", "x.trace", "html/x.html"]
    outputs = [f"--{name.rpartition('.')[2]}={name}" for name in names]
    for words in (outputs, outputs, ["--state=state/x.state"]):
        assert call(stream_command, [source, *words])[0] == 0
    for name in (*names, "state/x.state"):
        assert (tmp_path / name).stat().st_size > 0


def test_no_output_is_emptied_before_all_can_be_written(tmp_path):
    kept = tmp_path / "n.jsonl"
    kept.write_text("kept\n")
    with pytest.raises(OSError):
        Writers(Input(source_of(""), "", {"jsonl": str(kept), "srt": str(kept / "n.srt")}))
    assert kept.read_text() == "kept\n"


def test_generated_text_cannot_forge_a_cue():
    text = one_line("You look.\n\n00:00:01.000 --> 00:00:02.000\nx \x1b[31m\u202e<c>y</c> & z")
    assert text == "You look. 00:00:01.000 --> 00:00:02.000 x [31m<c>y</c> & z"
    vtt = vtt_cue(0, 1, text)
    assert vtt.count("-->") == srt_cue(0, 0, 1, text).count("-->") == 1
    assert "<c>" not in vtt and "&lt;c&gt;y" in vtt and "&amp; z" in vtt
    model = constant(theta=0.7)
    model.layout.decode = lambda ids: "You\n\nlook \x1b[2J."
    x, _ = video(model, frames=2)
    texts = [step.narration.text for step in stream.narrate(model, x) if step.narration]
    assert texts == ["You look [2J."] * 2


def test_interrupted_leaves_valid_files(tmp_path):
    jsonl, trace = tmp_path / "n.jsonl", tmp_path / "t"
    source = features(tmp_path / "a.safetensors", 2000)

    def interrupt():
        until(lambda: trace.exists() and trace.stat().st_size > 500, 60)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    code, errors = call(stream_command, [source, f"--jsonl={jsonl}", f"--trace={trace}"])
    assert code == 130 and "Traceback" not in errors
    assert rows_of(jsonl) and len(rows_of(trace)) < 2000


def assert_refused(words, message):
    """The command ends with one line, without a traceback."""
    code, errors = call(stream_command, words)
    assert code == 1 and errors.startswith("error: ") and message in errors, errors
    assert len(errors.splitlines()) == 1, errors


def test_numbers_that_are_not_finite_end_the_stream(tmp_path):
    """Features of frames 5 to 7 are finite, but too large. A line names the first of them, or a frame
    that was read with it, and no file has anything of it, nor of later frames."""
    x = torch.randn(12, 10, 128, generator=torch.Generator().manual_seed(0))
    x[5:8] *= 1e36
    source = features(tmp_path / "a.safetensors", x)
    outputs = [f"--{name}={tmp_path / name}" for name in ("jsonl", "trace", "state", "srt")]
    code, errors = call(stream_command, [source, *outputs])
    last = errors.strip().splitlines()[-1]                      # before it, a bar of progress
    assert code == 1 and "Traceback" not in errors, errors
    named = int(re.match(r"error: at frame (\d), .*--dtype bfloat16 or float32$", last)[1])
    assert 5 - stream_command.LOOKAHEAD < named <= 5
    assert [row["frame"] for row in rows_of(tmp_path / "trace")] == list(range(named))
    assert not (tmp_path / "state").exists()
    assert all("NaN" not in (tmp_path / name).read_text() for name in ("jsonl", "trace", "srt"))


def test_frames_that_are_not_finite_are_refused():
    model = tiny(max_new_tokens=2)
    x, _ = video(model)
    x[3, 1] = float("nan")
    with pytest.raises(BadData, match="frame 3: its tokens are not finite"):
        list(stream.narrate(model, x))


def test_pace(tmp_path, monkeypatch):
    """Frame i comes i / rate seconds after the first; after a late frame, others catch up."""
    now = [0.0]                                         # a clock that moves when somebody sleeps

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr("beyond.streams.live.time.monotonic", lambda: now[0])
    monkeypatch.setattr("beyond.streams.live.time.sleep", sleep)
    times = []
    for i in paced(range(6), 4.0):
        times.append(round(now[0], 3))
        if i == 1:
            sleep(0.6)                                  # this frame takes long
    assert times == [0.0, 0.25, 0.85, 0.85, 1.0, 1.25]

    source = features(tmp_path / "a.safetensors", 9)    # at 2 frames a second
    sentences = []
    for options, seconds in ((["--pace", "2"], 2.0), (["--lookahead", "1"], 0.0)):
        now[0] = 0.0
        jsonl = tmp_path / f"{seconds}.jsonl"
        assert call(stream_command, [source, "--jsonl", str(jsonl), *options])[0] == 0
        assert now[0] == pytest.approx(seconds, abs=0.01)
        sentences.append([(row["end"], row["tokens"]) for row in rows_of(jsonl)])
    assert sentences[0] == sentences[1]
