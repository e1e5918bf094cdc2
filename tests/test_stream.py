"""Streaming (§3.4): training = streaming, the cache, the trigger, the command line."""
import json
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import save_file

import narrator as nar
import stream
from support.features import load_features
from helpers import GOLDEN, ROOT, tiny, video

VARIANTS = {"FlowNar": {}, "FlowNar-C, k = 2": {"last_k": 2}, "FlowNar-C, k = 10": {"last_k": 10},
            "VideoLLM-online": {"memory": "none", "prune": False}, "recent": {"memory": "recent", "memory_tokens": 20},
            "none": {"memory": "none"}, "published": {"readout": "cls", "keep_newline": True, "last_k": 1}}


def streamed_logits(model, x, narrations):
    state = stream.State(model)
    state.logits = []
    steps = list(stream.narrate(model, x, forced=dict(narrations), state=state))
    return torch.stack(state.logits), steps, state


# ------------------------------------------------------------------ training = streaming

@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_training_is_streaming(variant, seed, tmp_path):
    """Random narrations at random frames, teacher-forced through the loop: the logits of the parallel forward."""
    tiny(seed, **VARIANTS[variant]).save(tmp_path)
    model = nar.Narrator.load(str(tmp_path))
    numbers = torch.Generator().manual_seed(seed)
    at = torch.randperm(39, generator=numbers)[:13].add(1).sort().values.tolist()
    x, narrations = video(model, frames=40, at=(0, *at), seed=seed)
    with torch.no_grad():
        parallel = model.logits(model(x, narrations)[0])
    streamed, _, _ = streamed_logits(model, x[:at[-1] + 1], narrations)
    assert len(streamed) == len(parallel) - 1                       # the last EOT waits for a next frame
    assert (streamed - parallel[:-1]).abs().max() < 1e-4


class Late(stream.State):
    """A stream that has gone on for long: its memory holds earlier frames, its counter stands far from the prompt."""

    def __init__(self, model, memory, before):
        super().__init__(model)
        self.memory, self.read, self.before = memory, memory, before

    def feed(self, tokens, x=None, memory=None):
        logits = super().feed(tokens, x, memory)
        self.position, self.before = self.position + self.before, 0
        return logits


def test_the_middle_of_a_long_stream():
    """`state` and `before` of the parallel forward (train.py: past) are a stream that goes on, to 1e-4."""
    model = tiny(last_k=2)
    x, narrations = video(model)
    _, memory = model.memory(torch.randn(1, 300, model.config.width), torch.zeros(1, 0, dtype=torch.long))
    state = Late(model, memory.detach(), 5000)
    state.logits = []
    list(stream.narrate(model, x[:16], forced=dict(narrations), state=state))
    with torch.no_grad():
        parallel = model.logits(model(x, narrations, memory, 5000)[0])
        plain = model.logits(model(x, narrations)[0])
    assert (torch.stack(state.logits) - parallel[:-1]).abs().max() < 1e-4
    assert (plain - parallel).abs().max() > 1e-2


def test_the_mask_matters():
    """The same comparison fails when training sees one narration more: the test above can fail."""
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
        p = model.logits(hidden).softmax(-1)[:, model.layout.sep[0]]
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
    model = nar.Narrator.load(str(folder / "checkpoint"), llm=str(GOLDEN / "base_llm"), last_k=last_k)
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
    _, steps, state = streamed_logits(model, x[:at[-1] + 1], narrations)
    layout, longest = model.layout, max(len(ids) for _, ids in narrations)
    fixed = len(layout.first()) - layout.J - len(layout.open + layout.close)
    text = fixed + 3 * (longest + len(layout.assistant) + 2)
    visual = layout.M + 8 * (layout.J + 1) + len(2 * layout.open + layout.close)
    assert max(s.text_tokens for s in steps) <= text and max(s.visual_tokens for s in steps) <= visual
    assert state.cache.capacity <= 4 * (text + visual)
    assert [s.visual_tokens for s in steps if s.narration] == [0] * len(at)
    assert state.position == len(layout.sequence(narrations)) - 1   # the counter goes on as in training


def test_nothing_pruned_grows():
    model = tiny(memory="none", prune=False)
    x, narrations = video(model, frames=30, at=(0, 9, 19, 29))
    _, steps, state = streamed_logits(model, x, narrations)
    assert steps[-1].text_tokens + steps[-1].visual_tokens == state.position


def test_cache_counts_what_it_holds():
    model = tiny()
    x, narrations = video(model)
    _, _, state = streamed_logits(model, x[:16], narrations)
    used = sum(y[:, :, state.cache.origin - state.cache.text:state.cache.origin + state.cache.visual].nbytes
               for layer in state.cache.layers for y in layer)
    assert state.cache.bytes() == used > 0


def test_frames_are_taken_one_by_one():
    """The loop never asks for a frame before it has answered to the one before."""
    model, taken = tiny(), []
    x, _ = video(model)
    source = (taken.append(t) or frame for t, frame in enumerate(x))
    for step in stream.narrate(model, source, forced={0: [5], 4: [6]}):
        assert taken[-1] == step.frame


# ------------------------------------------------------------------ trigger (§3.2)

def test_thresholds():
    config = nar.Config(theta=0.8, theta_low=0.5, refractory=4.0, fps=2.0)
    assert [stream.threshold(t, 10, config, False) for t in (11, 18, 19)] == [0.5, 0.5, 0.8]   # strictly more than 8 frames
    assert stream.threshold(11, 10, config, True) == 0.8


class Constant(nar.Narrator):
    """Says p(SEP) = 0.6 after every frame, and never an end of text."""

    def logits(self, hidden):
        logits = torch.full((*hidden.shape[:-1], len(self.layout.tokenizer)), -30.0)
        logits[..., self.layout.sep[0]], logits[..., 5] = torch.tensor(0.6).log(), torch.tensor(0.4).log()
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
    state = stream.State(model)
    list(stream.narrate(model, x, state=state))
    assert state.position == len(model.layout.sequence([(y.frame, y.tokens) for y in narrations])) - 1


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
    assert run.stdout.splitlines() == [f"[{stream.clock(y['end'])}] {y['text']}" for y in lines]
    assert abs(len(lines) - len(truth["narrations"])) <= 0.1 * len(truth["narrations"])
    right = {y["text"] for y in truth["narrations"]} & {y["text"] for y in lines}
    assert len(right) >= 0.6 * len({y["text"] for y in truth["narrations"]})
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
    assert set(trace[1]) == {"frame", "p_skip", "theta", "narrate", "position", "text_tokens", "visual_tokens"}
    assert files["vtt"].startswith("WEBVTT\n\n00:00:00.000 --> 00:00:00.500\n")
    assert files["srt"].startswith("1\n00:00:00,000 --> 00:00:00,500\n")
    assert files["srt"].count(" --> ") == files["vtt"].count(" --> ") == len(lines)


def test_clock():
    assert stream.clock(74.5) == "00:01:14.5" and stream.clock(3600.0, ",", 3) == "01:00:00,000"
    assert stream.clock(59.96) == "00:01:00.0"


def features(path, x, **more):
    save_file({"x": x, **more}, path)
    return path


BAD = {
    "missing file": lambda d: d / "nothing.mp4",
    "directory": lambda d: d,
    "text file": lambda d: (d / "a.mp4", (d / "a.mp4").write_text("hello"))[0],
    "empty file": lambda d: (d / "a.mp4", (d / "a.mp4").touch())[0],
    "truncated": lambda d: (d / "a.mp4", (d / "a.mp4").write_bytes((ROOT / "toy" / "kitchen.mp4").read_bytes()[:200]))[0],
    "rank": lambda d: features(d / "a.safetensors", torch.zeros(4, 128)),
    "width": lambda d: features(d / "a.safetensors", torch.zeros(4, 10, 64)),
    "tokens": lambda d: features(d / "a.safetensors", torch.zeros(4, 9, 128)),
    "not a number": lambda d: features(d / "a.safetensors", torch.full((4, 10, 128), float("nan"))),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_one_line(kind, tmp_path):
    run = command(BAD[kind](tmp_path), "--jsonl", tmp_path / "n.jsonl")
    assert run.returncode == 1 and run.stdout == ""
    assert len(run.stderr.strip().splitlines()) == 1 and "Traceback" not in run.stderr, run.stderr


@pytest.mark.parametrize("arguments", [["--model", "nowhere"], ["--jsonl", "/nowhere/n.jsonl"], ["--llm", "./nowhere"],
                                       ["--vision", "./nowhere"]])
def test_bad_options_are_one_line(arguments):
    run = command("toy/kitchen.mp4", *arguments)
    assert run.returncode == 1 and len(run.stderr.strip().splitlines()) == 1, run.stderr


def test_usage_is_2():
    assert command().returncode == 2 and command("toy/kitchen.mp4", "--last-k", "0").returncode == 2


def test_interrupted_leaves_valid_files(tmp_path):
    path = features(tmp_path / "a.safetensors", torch.randn(20_000, 10, 128))
    process = subprocess.Popen([sys.executable, "stream.py", path, "--jsonl", tmp_path / "n.jsonl", "--trace", tmp_path / "t"],
                               cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # background jobs ignore it
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
