"""Streaming (§3.4): training = streaming, the cache, the trigger, the command line."""
import argparse
import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, nullcontext, redirect_stdout

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import narrator as nar
import stream
import train
from baselines.narration_memory import HistoryContext
from baselines.variants import load_narrator
from commands import stream as stream_command
from commands.narrator import spell
from helpers import GOLDEN, ROOT, TOY, grouped, record_plain, tiny, video
from streams.camera import paced
from streams.fast import open_stream
from streams.subtitles import Writers, srt_cue, timestamp, vtt_cue
from streams.together import DirectPasses
from support.common.disk import one_line
from support.common.errors import BadData
from support.engine.slots import EMPTY
from support.files.features import encode_pictures, load_features
from support.files.video import Video, write_video
from test_commands import call

VARIANTS = {"FlowNar": {}, "FlowNar-C, k = 2": {"last_k": 2}, "FlowNar-C, k = 10": {"last_k": 10},
            "VideoLLM-online": {"memory": "none", "prune": False}, "recent": {"memory": "recent", "memory_tokens": 20},
            "none": {"memory": "none"}, "no narrations": {"last_k": 0},
            "published": {"readout": "cls", "keep_newline": True, "last_k": 1},
            "CLAM on narrations": {"narration_memory": 6, "last_k": 0},
            "on narrations alone": {"memory": "none", "narration_memory": 6, "last_k": 0, "keep_newline": True},
            "one token": {"grid": 0}, "one token, recent": {"grid": 0, "memory": "recent"},
            "one token, published": {"grid": 0, "readout": "cls"}}


def streamed_logits(model, x, narrations):
    """Through the plain Context."""
    context = HistoryContext(model) if model.config.narration_memory else stream.Context(model)
    logits = record_plain(model)
    steps = list(stream.narrate(model, x, forced=dict(narrations), context=context))
    del model.run
    return torch.stack(logits), steps, context


def assert_same(model, narrations, streamed, parallel, tolerance=1e-4):
    """Training = streaming; otherwise the first token that differs is named, not a tensor."""
    tokens = model.layout.sequence(narrations)
    assert len(streamed) == len(tokens) - 1                         # the last EOT waits for a next frame
    difference = (streamed - parallel[:-1]).abs().amax(1)
    if (difference > tolerance).any():
        i = int((difference > tolerance).nonzero()[0])
        kind = ("prompt", "visual", "narration")[tokens.kind[i]]
        pytest.fail(f"training and streaming first differ at position {i} (by {difference[i]:.2g}): {kind} token "
                    f"{spell(model.layout, tokens)[i]!r} of segment {tokens.segment[i]}")


# ------------------------------------------------------------------ training = streaming

def both_ways(model, frames=40, seed=0):
    """Random narrations at random frames, teacher-forced through the loop and in parallel: the logits of all tokens."""
    drawn = torch.randperm(frames - 1, generator=torch.Generator().manual_seed(seed))[:frames // 3]
    at = drawn.add(1).sort().values.tolist()
    x, narrations = video(model, frames, at=(0, *at), seed=seed)
    with torch.no_grad():
        parallel = model.logits(model(x, narrations)[0])
    return narrations, streamed_logits(model, x[:at[-1] + 1], narrations)[0], parallel


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_training_is_streaming(variant, seed, tmp_path):
    tiny(seed, **VARIANTS[variant]).save(tmp_path)
    model = load_narrator(str(tmp_path))
    assert_same(model, *both_ways(model, seed=seed))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
def test_training_is_streaming_with_grouped_queries(dtype, tolerance):
    """Two heads of keys for four of queries; with a bf16 base under fp32 LoRA, within bf16's rounding."""
    model = tiny(llm=grouped(dtype), last_k=2)
    assert model.trainable()["base_model.model.connector.0.weight"].dtype == torch.float32
    narrations, streamed, parallel = both_ways(model)
    assert_same(model, narrations, streamed, parallel, tolerance)
    assert parallel.std() > 5 * tolerance, "logits that are all alike would prove nothing"


def test_the_rule_is_one_place(monkeypatch):
    """Change the rule, and training and streaming change together."""
    model = tiny(last_k=2)
    before = both_ways(model)[2]
    rule = nar.visible
    changed = lambda kind, segment, number, now, *more: (
        rule(kind, segment, number, now, *more) | (kind == nar.VISUAL) & (segment == now - 1))   # two segments' frames
    monkeypatch.setattr(nar, "visible", changed)
    monkeypatch.setattr(stream, "visible", changed)
    narrations, streamed, parallel = both_ways(model)
    assert_same(model, narrations, streamed, parallel)
    assert (parallel - before).abs().max() > 1e-2


class MemoryLast(nar.Layout):
    """The memory of the past at the end of each segment instead of its beginning."""

    def opening(self, n):
        tokens = self.end_of_text(n - 1).add(self.newline, nar.NARRATION, segment=n, number=n - 1)
        return tokens.add(self.open + [nar.FRAME] * self.J, nar.VISUAL, segment=n)

    def closing(self, n):
        tokens = nar.Tokens().add(self.close if n else [], nar.VISUAL, segment=n, learn=True)
        memory = self.open + [nar.MEMORY] * self.M + self.close if n else []
        tokens.add(memory, nar.VISUAL, segment=n)
        return tokens.add(self.assistant, nar.NARRATION, segment=n, number=n, learn=True)


def test_the_layout_is_one_place():
    """Move the memory to the end of the segment in Layout, and training is still streaming."""
    model = tiny(last_k=2)
    before = both_ways(model)[2]
    model.layout = MemoryLast(model.layout.tokenizer, model.config.J, model.config.memory_tokens)
    narrations, streamed, parallel = both_ways(model)
    assert_same(model, narrations, streamed, parallel)
    assert (parallel - before).abs().max() > 1e-2


@pytest.mark.parametrize("variant", [{"last_k": 2}, {"last_k": 0, "narration_memory": 6}], ids=str)
def test_the_middle_of_a_long_stream(variant):
    """The parallel forward with a Past is a stream that continues, to 1e-4: its memories hold what was
    before, and its counter is far beyond the prompt."""
    model = tiny(**variant)
    x, narrations = video(model)
    state = train.memory_after(model, [train.Example(*video(model, 30, (0, 8, 20), seed=5))])

    class Late(HistoryContext if model.config.narration_memory else stream.Context):
        before = 5000

        def feed(self, tokens, x=None):
            logits = super().feed(tokens, x)
            self.position += self.before
            self.before = 0
            return logits

    context = Late(model)
    if model.config.narration_memory:
        context.state, context.history_state = state
    else:
        context.state = state
    context.readable = context.state
    logits = record_plain(model)
    list(stream.narrate(model, x[:16], forced=dict(narrations), context=context))
    del model.run
    others = [nar.Past()]
    if model.config.narration_memory:
        others.append(nar.Past((state[0], None), 5000))
    with torch.no_grad():
        parallel = model.logits(model(x, narrations, nar.Past(state, 5000))[0])
        for other in others:
            assert (model.logits(model(x, narrations, other)[0]) - parallel).abs().max() > 1e-2
    assert_same(model, narrations, torch.stack(logits), parallel)


def test_only_the_narration_memory_knows_what_was_said():
    """Another first sentence changes every later segment; without the memory, only its own."""
    for changes, reaches in (({"narration_memory": 6}, {0, 1, 2, 3}), ({}, {0})):
        model = tiny(last_k=0, **changes)
        x, narrations = video(model)
        other = [(0, [i % 600 + 2 for i in narrations[0][1]]), *narrations[1:]]
        with torch.no_grad():
            (one, _, tokens), (two, _, _) = model(x, narrations), model(x, other)
        segment = torch.tensor(tokens.segment)
        assert {n for n in range(4) if (one - two)[segment == n].abs().max() > 1e-4} == reaches


def test_a_narration_memory_is_constant():
    """One state of one size, changed once a narration; of the text, only the prompt stays."""
    model = tiny(last_k=0, narration_memory=6)
    x, narrations = video(model, 60, tuple(range(0, 60, 6)))
    context, states = HistoryContext(model), []
    for step in stream.narrate(model, x, forced=dict(narrations), context=context):
        states.append(context.history_state)
        assert not step.narration or step.text_tokens == sum(kind == nar.PROMPT for kind in model.layout.first().kind)
    assert {(state.shape, state.dtype) for state in states} == {(model.narration_memory.initial_state().shape,
                                                                 torch.float32)}
    changed = [t for t in range(1, len(states)) if not torch.equal(states[t], states[t - 1])]
    assert changed == [t for t, _ in narrations[1:]] and context.history.shape == (1, 6, 128)


def test_the_mask_matters():
    """The same comparison fails when training sees one narration more: test_training_is_streaming can fail."""
    model = tiny(last_k=2)
    x, narrations = video(model, frames=30, at=(0, 4, 8, 12, 16, 20, 24))
    streamed, _, _ = streamed_logits(model, x[:25], narrations)
    model.config.last_k = 3
    with torch.no_grad():
        assert (streamed - model.logits(model(x, narrations)[0])[:-1]).abs().max() > 1e-3


def test_self_conditioned_is_parallel_too():
    """What the loop decides and writes itself, put through the parallel forward, gives the probabilities it saw."""
    model = tiny(last_k=3)
    model.config.max_new_tokens, model.config.theta, model.config.theta_low = 6, 0.003, 0.002
    x, _ = video(model, frames=40)
    steps = list(stream.narrate(model, x))
    narrations = [(s.frame, s.narration.tokens) for s in steps if s.narration]
    with torch.no_grad():
        hidden, _, tokens = model(x, narrations)
        p = model.logits(hidden).softmax(-1)[:, model.layout.skip]
    decided = [s for s in steps if s.p_skip is not None]
    last = [i for i in range(len(tokens) - 1) if tokens.ids[i] == nar.FRAME and tokens.ids[i + 1] != nar.FRAME][1:]
    assert len({s.frame for s in decided}) == len(last) == 39 and len(narrations) > 3
    by_frame = {s.frame: s.p_skip for s in decided}
    assert max(abs(by_frame[t + 1] - p[row].item()) for t, row in enumerate(last)) < 1e-5


@pytest.mark.skipif(not GOLDEN.exists(), reason="../shared/golden is not there")
@pytest.mark.parametrize("variant, last_k", [("flownar", None), ("flownar_c", 2), ("videollm", None)])
@pytest.mark.parametrize("setting", ["two_threshold_0.8_0.5", "single_threshold_0.8"])
def test_published_narrations(variant, last_k, setting):
    folder = GOLDEN / variant
    model = load_narrator(str(folder / "checkpoint"), llm=str(GOLDEN / "base_llm"), last_k=last_k,
                              keep_newline=last_k is not None)
    for name, settings in json.loads((folder / "streaming.json").read_text()).items():
        record = settings[setting]
        x = load_features(f"{folder / 'features.safetensors'}:{name}")
        steps = list(stream.narrate(model, x, static=setting.startswith("single")))
        narrated = [s for s in steps if s.narration]
        assert [s.frame for s in narrated] == record["narration_frames"]
        assert [s.narration.tokens + [model.layout.eot] for s in narrated] == record["output_ids"]
        expected = {i + 1: frame["skip_prob"] for i, frame in enumerate(record["frames"])}
        assert max(abs(s.p_skip - expected[s.frame]) for s in steps if s.frame) < 1e-5


# ------------------------------------------------------------------ bounded memory

def test_cache_is_bounded():
    """C^nar: the prompt and k narrations; C^vid: one segment. Whatever the length of the video."""
    model = tiny(last_k=3)
    at = tuple(range(0, 400, 8))
    x, narrations = video(model, frames=400, at=at)
    _, steps, context = streamed_logits(model, x[:at[-1] + 1], narrations)
    layout, longest = model.layout, max(len(ids) for _, ids in narrations)
    fixed = len(layout.first()) - layout.J - len(layout.open + layout.close)
    text = fixed + 3 * (longest + len(layout.assistant) + 2)
    visual = layout.M + 8 * (layout.J + 1) + len(2 * layout.open + layout.close)
    assert max(s.text_tokens for s in steps) <= text and max(s.visual_tokens for s in steps) <= visual
    assert len(context.cache.positions) <= 2 * (text + visual)
    assert [s.visual_tokens for s in steps if s.narration] == [0] * len(at)
    assert context.position == len(layout.sequence(narrations)) - 1   # the counter continues as in training


def test_nothing_pruned_grows():
    model = tiny(memory="none", prune=False)
    x, narrations = video(model, frames=30, at=(0, 9, 19, 29))
    _, steps, context = streamed_logits(model, x, narrations)
    assert steps[-1].text_tokens + steps[-1].visual_tokens == context.position


def test_cache_counts_what_it_holds():
    model = tiny()
    x, narrations = video(model)
    _, steps, context = streamed_logits(model, x[:16], narrations)
    used = context.cache.positions != EMPTY
    assert used.sum() == context.cache.text + context.cache.visual == steps[-1].text_tokens + steps[-1].visual_tokens
    assert context.cache.bytes() == sum(y[used].nbytes for y in context.cache.keys + context.cache.values) > 0


@pytest.mark.parametrize("keep_newline", [False, True])
def test_published_weights_run_in_constant_memory(keep_newline, tmp_path):
    """--last-k on a published folder (no narrator.json): the text part stays; --keep-newline reproduces the leak."""
    tiny(memory_target=False, memory_heads=8).save(tmp_path)
    (tmp_path / "narrator.json").unlink()
    options = {"keep_newline": True} if keep_newline else {}
    model = load_narrator(str(tmp_path), last_k=2, **options)
    assert model.config.readout == "cls" and model.config.keep_newline == keep_newline
    x, _ = video(model, frames=60)
    given = {t: [5, 6, 7] for t in range(60)}
    text = [s.text_tokens for s in stream.narrate(model, x, forced=given)]
    assert (text[-1] - text[9] == 50) if keep_newline else len(set(text[3:])) == 1


def test_no_narration_is_kept():
    """last_k = 0 means none, never all: after each narration only the prompt is left (Table 13)."""
    model = tiny(last_k=0)
    x, narrations = video(model)
    _, steps, _ = streamed_logits(model, x[:16], narrations)
    prompt = sum(kind == nar.PROMPT for kind in model.layout.first().kind)
    assert [s.text_tokens for s in steps if s.narration] == [prompt] * 4


def test_slots_are_used_again():
    """Tokens that are removed make room; what is left keeps its place and its position."""
    cache = stream.Cache(capacity=4)
    cache.insert(nar.Tokens().add([1, 2, 3], nar.VISUAL, segment=0).add([4], nar.PROMPT, segment=0), cache.reserve(4))
    cache.positions.copy_(torch.arange(4))
    assert cache.keep(cache.kind == nar.PROMPT) == 3 and (cache.text, cache.visual, cache.span) == (1, 0, 4)
    assert cache.reserve(2).tolist() == [0, 1] and cache.positions.tolist() == [EMPTY, EMPTY, EMPTY, 3]


def test_frames_are_taken_one_by_one():
    """The loop never takes a frame before it has given its Decision for the one before."""
    model, taken = tiny(), []
    x, _ = video(model)
    source = (taken.append(t) or frame for t, frame in enumerate(x))
    for step in stream.narrate(model, source, forced={0: [5], 4: [6]}):
        assert taken[-1] == step.frame


# ------------------------------------------------------------------ trigger (§3.2)

def test_thresholds():
    config = nar.Config(theta=0.8, theta_low=0.5, refractory=4.0, fps=2.0)
    # strictly more than 8 frames
    assert [stream.threshold(seconds, config, False) for seconds in (0.5, 4.0, 4.5)] == [0.5, 0.5, 0.8]
    assert stream.threshold(0.5, config, True) == 0.8


class Constant(nar.Narrator):
    """Gives p([SKIP]) = 0.6 after every frame, and never an end of text."""

    def logits(self, hidden):
        logits = torch.full((*hidden.shape[:-1], len(self.layout.tokenizer)), -30.0)
        logits[..., self.layout.skip], logits[..., 5] = torch.tensor(0.6).log(), torch.tensor(0.4).log()
        return logits


def constant(**changes):
    model = tiny(**changes)
    model.__class__ = Constant
    model.config.max_new_tokens = 3
    return model


def test_two_thresholds_wait_static_does_not():
    model = constant(theta=0.7, theta_low=0.5)
    x, _ = video(model, frames=21)
    narrated = [s.frame for s in stream.narrate(model, x) if s.narration]
    assert narrated == [0, 9, 18, 20]                              # after the refractory 8 frames, and the last one
    assert [s.frame for s in stream.narrate(model, x, static=True) if s.narration] == list(range(21))


def test_condition_is_not_above_the_threshold():
    model = constant()
    x, _ = video(model, frames=4)
    p = next(s.p_skip for s in stream.narrate(model, x) if s.frame == 1)
    model.config.theta = model.config.theta_low = p                # p <= theta narrates (Eq. 1)
    assert all(s.narration for s in stream.narrate(model, x))


def test_narration_without_end_is_closed():
    model = constant(theta=0.7, last_k=1)
    x, _ = video(model, frames=30)
    steps = list(stream.narrate(model, x))
    narrations = [s.narration for s in steps if s.narration]
    assert all(len(y.tokens) == 3 for y in narrations) and len(narrations) == 5
    context = stream.Context(model)
    list(stream.narrate(model, x, context=context))
    assert context.position == len(model.layout.sequence([(y.frame, y.tokens) for y in narrations])) - 1


# ------------------------------------------------------------------ command line

def command(*arguments, **options):
    return subprocess.run([sys.executable, "stream.py", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True,
                          **options)


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kitchen")
    files = {name: folder / f"n.{name}" for name in ("jsonl", "srt", "vtt", "trace")}
    run = command("toy/kitchen.mp4", *(part for name, file in files.items() for part in (f"--{name}", file)))
    assert run.returncode == 0, run.stderr
    return run, {name: file.read_text() for name, file in files.items()}


def test_narrates_the_kitchen(kitchen):
    run, files = kitchen
    truth = json.loads((ROOT / "toy" / "kitchen.json").read_text())
    lines = [json.loads(line) for line in files["jsonl"].splitlines()]
    assert run.stdout.splitlines() == [f"[{timestamp(y['end'])}] {y['text']}" for y in lines]
    assert abs(len(lines) - len(truth["narrations"])) <= 0.1 * len(truth["narrations"])
    right = {y["text"] for y in truth["narrations"]} & {y["text"] for y in lines}
    assert len(right) >= 0.95 * len({y["text"] for y in truth["narrations"]})
    assert "frames/s" in run.stderr and "cache" in run.stderr


def test_output_formats(kitchen):
    _, files = kitchen
    lines = [json.loads(line) for line in files["jsonl"].splitlines()]
    trace = [json.loads(line) for line in files["trace"].splitlines()]
    assert list(lines[0]) == ["n", "frame", "start", "end", "text", "p_skip", "tokens"]
    assert [y["n"] for y in lines] == list(range(len(lines)))
    assert all(y["end"] == (y["frame"] + 1) / 2 for y in lines)
    assert all(a["end"] == b["start"] for a, b in zip(lines, lines[1:]))
    assert [row["frame"] for row in trace] == list(range(len(trace)))
    assert [row["frame"] for row in trace if row["narrate"]] == [y["frame"] for y in lines]
    assert list(trace[1]) == ["frame", "p_skip", "theta", "narrate", "position", "text_tokens", "visual_tokens",
                              "forced", "kept"]
    assert [row["frame"] for row in trace if row["forced"]] == [0, 303]      # the first and the last frame
    assert files["vtt"].startswith("WEBVTT\n\n00:00:00.000 --> 00:00:00.500\n")
    assert files["srt"].startswith("1\n00:00:00,000 --> 00:00:00,500\n")
    assert files["srt"].count(" --> ") == files["vtt"].count(" --> ") == len(lines)


@pytest.mark.parametrize("given, says", [(("--jsonl", "x.safetensors"), "x.safetensors"),
                                         (("--srt", "./x.safetensors"), "./x.safetensors"),
                                         (("--jsonl", "a", "--trace", "./a"), "./a")])
def test_no_output_destroys_the_input_or_another_output(tmp_path, monkeypatch, given, says):
    monkeypatch.chdir(tmp_path)
    save_file({"x": torch.randn(2, 10, 128)}, "x.safetensors")
    before = (tmp_path / "x.safetensors").read_bytes()
    for source in ("x.safetensors", "x.safetensors:x"):
        code, err = call(stream_command, [source, "--device", "cpu", *given])
        assert code == 1 and err.splitlines()[-1].startswith(f"error: {says}: is given twice")
    assert (tmp_path / "x.safetensors").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_several_inputs(tmp_path, monkeypatch, capsys):
    """Lines carry the input's name, files go into folders; one input that fails is named, and the others are done."""
    monkeypatch.chdir(tmp_path)
    for name, frames in (("a", 9), ("b", 14)):
        features(f"{name}.safetensors", torch.randn(frames, 10, 128, generator=torch.Generator().manual_seed(frames)))
    alone = {}
    for name in "ab":
        assert call(stream_command, [f"{name}.safetensors", "--device", "cpu", "--jsonl", f"{name}.jsonl"])[0] == 0
        alone[name] = [json.loads(line) for line in open(f"{name}.jsonl")]
    told = io.StringIO()
    with redirect_stdout(told), pytest.raises(SystemExit) as end, monkeypatch.context() as patch:
        patch.setattr("sys.argv", ["stream.py", "a.safetensors", "missing.safetensors", "b.safetensors", "--device",
                                   "cpu", "--jsonl", "out", "--srt", "out"])
        stream_command.main()
    errors = capsys.readouterr().err
    assert end.value.code == 1 and "1 of 3 inputs" in errors and errors.count("missing: missing.safetensors") == 1
    lines = told.getvalue().splitlines()
    for name, rows in alone.items():
        beside = [json.loads(line) for line in open(f"out/{name}.jsonl")]
        assert [row["text"] for row in beside] == [row["text"] for row in rows]
        assert [line for line in lines if line.startswith(f"[{name} ")] == [
            f"[{name} {timestamp(row['end'])}] {row['text']}" for row in rows]
        assert open(f"out/{name}.srt").read().count(" --> ") == len(rows)
    assert not any("missing" in line for line in lines)
    assert call(stream_command, ["a.safetensors", "./a.safetensors"])[1].startswith("error: several inputs are called a;")


def test_outputs_of_all_inputs_are_apart(tmp_path, monkeypatch):
    """x's trace and the JSONL of x.trace would be one file; so would an output and another input."""
    monkeypatch.chdir(tmp_path)
    for name in ("x", "x.trace", "y"):
        features(f"{name}.safetensors", torch.randn(2, 10, 128))
    code, err = call(stream_command, ["x.safetensors", "x.trace.safetensors", "--jsonl=out", "--trace=out"])
    assert (code, err.count("\n")) == (1, 1) and err.startswith("error: out/x.trace.jsonl: is given twice")
    assert not (tmp_path / "out").exists()


ANNOTATED = "1\n00:00:00,000 --> 00:00:01,000\nYou look.\n\n"


@pytest.mark.parametrize("output, content, says", [
    ("--srt=x.srt", ANNOTATED, "beside a video narrations of its name are taken for your own"),
    ("--srt=./x.srt", ANNOTATED, "beside a video"), ("--vtt=x.vtt", "WEBVTT\n\n", "beside a video"),
    ("--trace=x.csv", "1,You look.\n", "beside a video"), ("--jsonl=x.json", "[]", "beside a video"),
    ("--jsonl=n.jsonl", "a diary\n", "is not what --jsonl writes"), ("--srt=n.srt", "a diary\n", "is not what --srt"),
    ("--vtt=n.vtt", ANNOTATED, "is not what --vtt"), ("--trace=n.trace", '{"n": 0}', "is not what --trace writes")])
def test_files_of_ones_own_are_not_replaced_unasked(tmp_path, monkeypatch, output, content, says):
    monkeypatch.chdir(tmp_path)
    features("x.safetensors", torch.randn(2, 10, 128))
    file = tmp_path / output.partition("=")[2]
    file.write_text(content)
    line = ["x.safetensors", "--device=cpu", output]
    code, err = call(stream_command, line)
    assert (code, err.count("\n")) == (1, 1) and says in err and "--overwrite" in err and file.read_text() == content
    assert call(stream_command, [*line, "--overwrite"])[0] == 0 and file.read_text() != content


def test_a_command_is_given_again(tmp_path, monkeypatch):
    """Its own outputs are replaced, wherever they are, but for narrations beside the video."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    features("x.safetensors", torch.randn(2, 10, 128))
    for _ in range(2):
        assert call(stream_command, ["x.safetensors", "--device=cpu", "--jsonl=x.jsonl", "--srt=out/x.srt", "--vtt=out/x.vtt",
                             "--trace=x.trace.jsonl"])[0] == 0


def test_clock():
    assert timestamp(74.5) == "00:01:14.5" and timestamp(3600.0, ",", 3) == "01:00:00,000"
    assert timestamp(59.96) == "00:01:00.0"


def features(path, x, **more):
    save_file({"x": x, **more}, path)
    return path


BAD = {
    "missing file": lambda d: d / "nothing.mp4",
    "directory": lambda d: d,
    "text file": lambda d: (d / "a.mp4", (d / "a.mp4").write_text("hello"))[0],
    "empty file": lambda d: (d / "a.mp4", (d / "a.mp4").touch())[0],
    "truncated": lambda d: (d / "a.mp4", (d / "a.mp4").write_bytes((ROOT / "toy/kitchen.mp4").read_bytes()[:200]))[0],
    "rank": lambda d: features(d / "a.safetensors", torch.zeros(4, 128)),
    "width": lambda d: features(d / "a.safetensors", torch.zeros(4, 10, 64)),
    "tokens": lambda d: features(d / "a.safetensors", torch.zeros(4, 9, 128)),
    "not a number": lambda d: features(d / "a.safetensors", torch.full((4, 10, 128), float("nan"))),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_one_line(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    code, errors = call(stream_command, [str(BAD[kind](tmp_path)), "--jsonl", str(tmp_path / "n.jsonl")])
    assert code == 1 and len(errors.strip().splitlines()) == 1 and "Traceback" not in errors, errors


def test_numbers_that_are_not_finite_end_the_stream(tmp_path, monkeypatch):
    """Features of frames 5 to 7 that are finite, but too large: one line names the first of them,
    and no file has anything of it, nor of what comes after."""
    monkeypatch.chdir(ROOT)
    x = torch.randn(12, 10, 128, generator=torch.Generator().manual_seed(0))
    x[5:8] *= 1e36
    files = {name: tmp_path / name for name in ("jsonl", "trace", "state", "srt")}
    given = [part for name, file in files.items() for part in (f"--{name}", str(file))]
    code, errors = call(stream_command, [str(features(tmp_path / "a.safetensors", x)), *given])
    last = errors.strip().splitlines()[-1]                            # before it, a bar of progress
    assert code == 1 and "error: frame 5:" in last and "--dtype bfloat16 or float32" in last, errors
    assert "Traceback" not in errors
    trace = [json.loads(line) for line in files["trace"].read_text().splitlines()]
    assert [row["frame"] for row in trace] == list(range(len(trace))) and len(trace) <= 5
    assert not files.pop("state").exists()
    assert "NaN" not in "".join(file.read_text() for file in files.values())


@pytest.mark.parametrize("broken", ["llm.lm_head.lora_B.weight", "memory.w_v.weight", "memory.z",
                                    "connector.0.bias"])
def test_damaged_weights_end_the_stream(broken):
    """Also of the memory alone, whose numbers are not yet in any answer: its state is never NaN
    between two frames."""
    model = tiny()
    x, _ = video(model)
    model.get_parameter(broken).data.fill_(float("nan"))
    context = open_stream(model)
    with pytest.raises(BadData, match="frame [01]: .* not finite"):
        for _ in stream.narrate(model, x, context=context):
            assert context.state.isfinite().all()


@pytest.mark.parametrize("arguments", [["--model", "nowhere"], ["--jsonl", "/dev/null/n.jsonl"], ["--llm", "./nowhere"],
                                       ["--vision", "./nowhere"]])
def test_bad_options_are_one_line(arguments, monkeypatch):
    monkeypatch.chdir(ROOT)
    code, errors = call(stream_command, ["toy/kitchen.mp4", *arguments])
    assert code == 1 and len(errors.strip().splitlines()) == 1, errors


@pytest.mark.parametrize("arguments", [[], ["--last-k", "-1"], ["--theta", "1.7"], ["--fps", "0"]])
def test_usage_is_2(arguments):
    code, errors = call(stream_command, ["toy/kitchen.mp4", *arguments] if arguments else [])
    assert code == 2 and (not arguments or arguments[0] in errors)


@pytest.mark.parametrize("arguments", [
    ["missing.mp4"], ["missing.safetensors", "also.mp4"], ["a.mp4", "--jsonl", "a.mp4/n.jsonl"],
    ["a.mp4", "--state", "a.mp4/n.state"], ["a.mp4", "--html", "a.mp4/n.html"], ["a.mp4", "--vision", "./nowhere"],
    ["a.mp4", "--vision", "owner/nowhere"], ["a.mp4", "--vtt", "./a.mp4"]])
def test_what_cannot_work_is_refused_before_anything_is_loaded(arguments, tmp_path, monkeypatch):
    """One line, no model, and no folder for outputs has been made."""
    monkeypatch.chdir(tmp_path)
    write_video(tmp_path / "a.mp4", np.zeros((4, 96, 96, 3), np.uint8), 2)
    for name in ("load_llm", "load_vision_model"):
        monkeypatch.setattr(f"support.engine.checkpoint.{name}", lambda *_: pytest.fail("a model is loaded"))
    code, errors = call(stream_command, [*arguments, "--srt", "new/folder/n.srt", "--device", "cpu"])
    assert code == 1 and len(errors.splitlines()) == 1, errors
    assert [file.name for file in tmp_path.iterdir()] == ["a.mp4"]


def test_folders_of_outputs_are_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    features("a.safetensors", torch.randn(3, 10, 128))
    files = [word for name in ("jsonl", "srt", "vtt", "trace", "state") for word in (f"--{name}", f"{name}/new/{name}")]
    assert call(stream_command, ["a.safetensors", *files])[0] == 0
    assert call(stream_command, ["a.safetensors", "--html", "html/new/html"])[0] == 0
    made = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("new/*")}
    assert made == {f"{name}/new/{name}" for name in ("jsonl", "srt", "vtt", "trace", "state", "html")}


def test_a_file_name_that_is_no_text(tmp_path):
    """Its bytes are no UTF-8: on the page there is a mark in their place, and the page finds the file."""
    name = os.fsdecode(b"a\xff.mp4")
    try:
        write_video(tmp_path / name, np.zeros((3, 96, 96, 3), np.uint8), 2)
    except (OSError, BadData):
        pytest.skip("this file system has only names that are text")
    code, _ = call(stream_command, [str(tmp_path / name), "--html", str(tmp_path / "a.html")])
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert code == 0 and 'src="a%FF.mp4"' in page and "<title>a?.mp4" in page


def test_a_bar_knows_the_end_only_of_recordings(monkeypatch):
    """The total of a live source, or of a pipe, is not known; otherwise it would stand at 100 % all the time."""
    class Run:
        def __init__(self, total, count):
            self.total, self.count, self.live, self.name, self.video = total, count, False, "", None
    totals = []
    bar = stream_command.progress(None)
    monkeypatch.setattr(stream_command, "progress", lambda *_, **__: bar)
    monkeypatch.setattr(bar, "set_postfix", lambda *_, **__: totals.append(bar.total))
    step = stream.Decision(0, 0.9, 0.8, 0, 0, 0, [], None, False, nar.Tokens(), 0)
    args = argparse.Namespace(explain=False, speak=False, voice_command=None, repeats=False)
    for runs in ([Run(100, 3)], [Run(None, 3)], [Run(100, 3), Run(None, 0)], [Run(100, 3), Run(None, 1)]):
        stream_command.show(iter([(0, (step, None))]), runs, None, args)
    assert totals == [100, None, 100, None]


class Clock:
    """A clock that only moves when somebody sleeps."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("streams.camera.time.monotonic", lambda: self.now)
        monkeypatch.setattr("streams.camera.time.sleep", self.sleep)

    def sleep(self, seconds):
        self.now += seconds


def test_a_recording_at_its_own_pace(monkeypatch):
    """Frame i is there i / rate seconds after the first, in steps that let others go on; what is late catches up."""
    clock, came = Clock(monkeypatch), []
    for i in paced(range(6), 4.0, DirectPasses().wait):
        came.append((i, round(clock.now, 3)))
        clock.now += 0.6 if i == 1 else 0
    assert came == [(0, 0.0), (1, 0.25), (2, 0.85), (3, 0.85), (4, 1.0), (5, 1.25)]


@pytest.mark.parametrize("pace, seconds", [("1", 9.5), ("2", 4.75), (None, 0.0)])
def test_pace(pace, seconds, tmp_path, monkeypatch):
    """The sentences are those without; 20 frames at 2 a second are over when the last one comes."""
    monkeypatch.chdir(tmp_path)
    features("a.safetensors", torch.randn(20, 10, 128, generator=torch.Generator().manual_seed(3)))
    clock = Clock(monkeypatch)
    assert call(stream_command, ["a.safetensors", "--jsonl", "paced", *(["--pace", pace] if pace else [])])[0] == 0
    assert clock.now == pytest.approx(seconds, abs=0.01)
    assert call(stream_command, ["a.safetensors", "--jsonl", "plain", "--lookahead", "1"])[0] == 0
    paced_rows, plain_rows = ([json.loads(line) for line in open(name)] for name in ("paced", "plain"))
    assert [(row["end"], row["tokens"]) for row in paced_rows] == [(row["end"], row["tokens"]) for row in plain_rows]


def test_a_live_source_has_its_own_pace():
    code, errors = call(stream_command, ["lavfi:testsrc", "--pace", "1"])
    assert code == 1 and errors.startswith("error: --pace is for recordings; lavfi:testsrc is live")
    for value in ("0", "-1", "x"):
        assert call(stream_command, ["a.mp4", "--pace", value])[0] == 2


def test_speech_of_a_recording_suggests_a_pace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    features("a.safetensors", torch.randn(2, 10, 128))
    monkeypatch.setattr(stream_command, "Speaker", lambda args: nullcontext(argparse.Namespace(say=lambda text: None)))
    for more, count in (([], 1), (["--pace", "1000"], 0)):
        assert call(stream_command, ["a.safetensors", "--speak", *more])[1].count("--pace 1 ") == count


def test_an_option_that_ffmpeg_does_not_know_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    features("a.safetensors", torch.randn(2, 10, 128))
    given = ["--source-option", "nonsense=1", "--source-option", "rtsp_transport=udp", "--source-option", "framerate=5"]
    code, errors = call(stream_command, ["a.safetensors", *given])
    assert code == 0 and [line.split(":")[0] for line in errors.splitlines() if "option" in line] == [
        "--source-option nonsense"]


def test_the_bundled_narrator_says_what_it_knows(tmp_path):
    """Other videos without --model: one line of warning; a video of the miniature world: none."""
    for name in "ab":
        write_video(tmp_path / f"{name}.mp4", [np.full((64, 96, 3), 9 * k, np.uint8) for k in range(4)], 2)
    run = command(tmp_path / "a.mp4", tmp_path / "b.mp4")
    assert run.returncode == 0 and run.stderr.count("--model") == 1 and "miniature kitchen" in run.stderr
    assert "--model" not in command(tmp_path / "a.mp4", "--model", "toy/checkpoint").stderr


def test_explain():
    """What the letters mean; every frame in words; for the last one, that it always narrates."""
    run = command("toy/kitchen.mp4", "--explain")
    assert run.stdout.startswith("legend: ")
    lines = [line for line in run.stdout.splitlines() if line.startswith("frame ")]
    assert len(lines) == 305 and "the first frame always narrates" in lines[0] and "l = " in lines[0]
    assert "fed [SKIP] x x 10" in lines[2] and "theta_low, within 4 s" in lines[2] and " > 0.5 " in lines[2]
    assert "fed $ \\n [ m x 10 ]\\n [ x x 10" in lines[1]
    assert "the last frame always narrates" in lines[-1] and "narration 42" in lines[-1]


def test_no_output_is_emptied_before_all_can_be_written(tmp_path):
    """The narrations of an earlier run survive a mistyped second output."""
    (tmp_path / "n.jsonl").write_text("kept\n")
    with ExitStack() as stack, pytest.raises(BadData, match="n.srt: cannot be written"):
        Writers({"jsonl": tmp_path / "n.jsonl", "srt": tmp_path / "n.jsonl" / "n.srt"}, stack)
    assert (tmp_path / "n.jsonl").read_text() == "kept\n"


def test_generated_text_cannot_forge_a_cue():
    """Line breaks, times, escapes and tags in a narration are text, in files and on the terminal."""
    text = one_line("You look.\n\n00:00:01.000 --> 00:00:02.000\nx \x1b[31m\u202e<c>y</c> & z")
    assert text == "You look. 00:00:01.000 --> 00:00:02.000 x [31m<c>y</c> & z"
    assert vtt_cue(0, 1, text).count("-->") == srt_cue(0, 0, 1, text).count("-->") == 1
    assert "<c>" not in vtt_cue(0, 1, text) and "&lt;c&gt;y" in vtt_cue(0, 1, text) and "&amp; z" in vtt_cue(0, 1, text)
    model = constant(theta=0.7)
    model.layout.decode = lambda ids: "You\n\nlook \x1b[2J."
    x, _ = video(model, frames=2)
    assert [s.narration.text for s in stream.narrate(model, x) if s.narration] == ["You look [2J."] * 2


def test_a_repeated_picture_is_encoded_once():
    encoder, calls = nar.VisionEncoder(str(TOY / "vision")), []
    encoder.register_forward_hook(lambda *_: calls.append(1))
    one, two = (np.full((96, 96, 3), k, np.uint8) for k in (3, 200))
    x = list(encode_pictures([one, one, one, two, two, one], encoder))
    assert len(x) == 6 and len(calls) == 3 and torch.equal(x[0], x[2]) and torch.equal(x[0], x[5])


def test_interrupted_leaves_valid_files(tmp_path):
    path = features(tmp_path / "a.safetensors", torch.randn(20_000, 10, 128))
    files = "--jsonl", tmp_path / "n.jsonl", "--trace", tmp_path / "t"
    process = subprocess.Popen([sys.executable, "stream.py", path, *files], cwd=ROOT,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline, trace = time.monotonic() + 60, tmp_path / "t"
    while time.monotonic() < deadline and not (trace.exists() and trace.stat().st_size > 500):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in errors
    for name in ("n.jsonl", "t"):
        lines = (tmp_path / name).read_text().splitlines()
        assert lines and all(json.loads(line) for line in lines)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_features_stored_in_half_precision(dtype):
    """What `data.py encode` writes (bf16) is streamed like the same values in fp32."""
    model = tiny()
    x, narrations = video(model)
    x = x.to(dtype)
    halves, _, _ = streamed_logits(model, x[:16], narrations)
    floats, _, _ = streamed_logits(model, x[:16].float(), narrations)
    assert torch.equal(halves, floats)
    with torch.no_grad():
        assert torch.allclose(model.logits(model(x, narrations)[0])[:-1], floats, atol=1e-4)


def test_the_plain_context_narrates_the_kitchen():
    """Algorithm 2 as it stands in stream.py, by itself: the same sentences at the same frames as with all that makes a
    stream fast."""
    narrator = load_narrator(str(TOY))
    encoder = narrator.vision_encoder()
    pictures = [torch.from_numpy(picture) for picture in Video(ROOT / "toy" / "kitchen.mp4", narrator.config.fps)]
    x = torch.cat([encoder(torch.stack(pictures[i:i + 32])) for i in range(0, len(pictures), 32)])
    plain = [(step.frame, step.narration.text) for step in stream.narrate(narrator, x) if step.narration]
    fast = open_stream(narrator.merge(), lookahead=4)
    steps = stream.narrate(narrator, x, context=fast)
    assert plain == [(step.frame, step.narration.text) for step in steps if step.narration]
    assert len(plain) == 43
