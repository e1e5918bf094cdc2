"""Evaluation (§4): teacher forcing by hand and as published, efficiency, attention, and the commands."""
import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from experiments import efficiency
import evaluate
from experiments import figures
from support import captions as metrics
import narrator as nar
import stream
from helpers import GOLDEN, ROOT, TOY, published, tiny, video
from test_train import epic

golden = pytest.mark.skipif(not GOLDEN.exists(), reason="../shared/golden is not there")


def command(*args, ok=True):
    """`python evaluate.py ARGS` in this process: what it prints, parsed with --json; or its one line of error."""
    out, err = io.StringIO(), io.StringIO()
    with mock.patch("sys.argv", ["evaluate.py", *map(str, args)]), redirect_stdout(out), redirect_stderr(err):
        with pytest.raises(SystemExit) as end:
            evaluate.main()
    assert (end.value.code == 0) == ok, err.getvalue()
    if not ok:
        errors = [line for line in err.getvalue().splitlines() if line.startswith("error") or "Traceback" in line]
        assert end.value.code == 1 and len(errors) == 1 and errors[0].startswith("error: "), err.getvalue()
        return errors[0]
    return json.loads(out.getvalue().splitlines()[-1]) if "--json" in args else out.getvalue()


def write(path, content):
    path.write_text(json.dumps(content))
    return path


@pytest.fixture(autouse=True)
def no_java(monkeypatch):
    """METEOR takes seconds to start; test_metrics.py tests it once."""
    monkeypatch.setattr(metrics, "java_problem", lambda: "needs Java")


# ---------------------------------------------------------------------- score

TRUE = {"a": [{"time": 2.0, "text": "You open the fridge."}, {"time": 5, "text": "You wash the cup."}]}


def test_score_reads_every_form(tmp_path):
    predicted = write(tmp_path / "p.json", TRUE)
    forms = [TRUE, {"a": [TRUE["a"]]}, {"a": {"start": 0.0, "annotators": [TRUE["a"]]}}]
    for form in forms:
        result = command("score", "--pred", predicted, "--gt", write(tmp_path / "g.json", form), "--json",
                         "--per-video", tmp_path / "each.json")
        assert result["f1"] == 1 and result["cider"] == pytest.approx(10) and result["narrations"] == 2
        assert json.loads((tmp_path / "each.json").read_text())["a"]["rouge_l"] == pytest.approx(1)
    several = write(tmp_path / "g.json", {"a": [TRUE["a"], [{"time": 3.0, "text": "You look."}]]})
    assert command("score", "--pred", predicted, "--gt", several, "--json")["narrations"] == 3


def test_score_reads_our_own_files(tmp_path):
    lines = [{"n": 0, "frame": 3, "start": 0.0, "end": 2.0, "text": "You look.", "p_skip": None, "tokens": [1]}]
    (tmp_path / "pred").mkdir()
    (tmp_path / "pred" / "kitchen.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    toy = {"video": "kitchen.mp4", "fps": 2, "duration": 4.0, "narrations": [{"time": 2.0, "text": "You look.", "memory": []}]}
    result = command("score", "--pred", tmp_path / "pred", "--gt", write(tmp_path / "kitchen.json", toy), "--json")
    assert result["f1"] == 1 and result["rouge_l"] == 1


@pytest.mark.parametrize("predicted, true, says", [
    ("{", TRUE, "not JSON"), ([1], TRUE, "expected an object"), ({"a": [{"time": "2", "text": "x"}]}, TRUE, "narration 0"),
    ({"a": [{"time": 2}]}, TRUE, "narration 0"), ({"b": []}, TRUE, "are not in"), ({"a": [], "b": []}, TRUE, "are not in"),
    ({}, {}, "nothing to score"), ({"a": []}, {"a": 3}, "expected"), ({"a": []}, {"a": {"start": 0}}, "annotators")])
def test_bad_files_get_one_line(tmp_path, predicted, true, says):
    pred, gt = tmp_path / "p.json", write(tmp_path / "g.json", true)
    pred.write_text(predicted if isinstance(predicted, str) else json.dumps(predicted))
    assert says in command("score", "--pred", pred, "--gt", gt, ok=False)


def test_score_without_java(tmp_path):
    """METEOR is said to be missing, nothing takes its name; --ptb cannot run."""
    pred, gt = write(tmp_path / "p.json", TRUE), write(tmp_path / "g.json", TRUE)
    assert command("score", "--pred", pred, "--gt", gt, "--json")["meteor"] is None
    assert "Java" in command("score", "--pred", pred, "--gt", gt, "--ptb", ok=False)


def test_partial(tmp_path):
    pred, gt = write(tmp_path / "p.json", TRUE), write(tmp_path / "g.json", TRUE | {"b": TRUE["a"]})
    assert "--partial" in command("score", "--pred", pred, "--gt", gt, ok=False)
    assert command("score", "--pred", pred, "--gt", gt, "--partial", "--json")["videos"] == 1


# ---------------------------------------------------------------------- stream

def test_stream_is_resumable_and_sharded(tmp_path):
    one = command("stream", "--data", "toy", "--limit", 2, "--json", "--by-duration")
    assert one["videos"] == 2 and 0 <= one["f1"] <= 1 and one["by_duration"]["<= 2 min"]["videos"] == 2
    out = tmp_path / "out"
    assert command("stream", "--data", "toy", "--limit", 2, "--output", out, "--json")["cider"] == one["cider"]
    files = sorted((out / "predictions").iterdir())
    kept, before = files[0].stat().st_mtime_ns, files[1].read_text()
    files[1].unlink()                                                                 # as if killed before the second
    again = command("stream", "--data", "toy", "--limit", 2, "--output", out, "--json")
    assert files[0].stat().st_mtime_ns == kept and files[1].read_text() == before and again["cider"] == one["cider"]
    assert "other settings" in command("stream", "--data", "toy", "--limit", 2, "--output", out, "--theta", 0.7, ok=False)


def test_stream_in_two_processes(tmp_path):
    run = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                          str(ROOT / "evaluate.py"), "stream", "--data", "toy", "--limit", "3", "--output", str(tmp_path), "--json"],
                         capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr[-2000:]
    assert len(list((tmp_path / "predictions").iterdir())) == 3
    (tmp_path / "again").mkdir()
    assert json.loads(run.stdout.splitlines()[-1])["videos"] == 3


def test_annotated_data_sets(tmp_path):
    """Features instead of pictures; times count from the start of the video, several annotators are scored together."""
    root, model = tmp_path / "root", tiny(width=16, max_new_tokens=5)
    epic(root)
    model.save(tmp_path / "model")
    result = command("stream", "--data", "ek100", "--root", root, "--model", tmp_path / "model", "--output", tmp_path / "out", "--json")
    assert result["videos"] == 6 and result["narrations"] == 2 * 2 + 2 * 3 + 2 * 4
    first = json.loads((tmp_path / "out" / "predictions" / "val_0_0_6.jsonl").read_text().splitlines()[0])
    assert (first["start"], first["end"]) == (0.4, 0.9)
    teacher = command("teacher", "--data", "ek100", "--root", root, "--model", tmp_path / "model", "--json")
    assert teacher["videos"] == 6 and teacher["ppl"] > 1
    tiny(width=32).save(tmp_path / "wide")
    assert "32" in command("teacher", "--data", "ek100", "--root", root, "--model", tmp_path / "wide", ok=False)


# ---------------------------------------------------------------------- teacher

class Scripted:
    """Stands in for a narrator: frames of 2 tokens, and logits that say what the test wants."""

    def __init__(self, replies, words):
        self.model = tiny(grid=1)
        self.layout, self.config, self.replies, self.words = self.model.layout, self.model.config, replies, words

    def __call__(self, x, narrations):
        tokens = self.layout.sequence(narrations)
        labels = torch.tensor([i if learn else -100 for i, learn in zip(tokens.ids[1:], tokens.learn[1:])] + [-100])
        skip, logits, frame = self.layout.sep[0], torch.zeros(len(tokens), len(self.layout.tokenizer)), 0
        for row, (i, label) in enumerate(zip(tokens.ids, labels.tolist())):
            logits[row, label if label != -100 else 0] = 3.0
            if i == nar.FRAME:
                frame += 1
                t = (frame - 1) // self.config.J
                logits[row] = 0
                logits[row, self.layout.close[0] if t in self.replies else skip] = 3.0
        for row in self.words:                                                        # rows counted among learned words
            words = [r for r, (i, label) in enumerate(zip(tokens.ids, labels.tolist())) if label != -100 and i != nar.FRAME]
            logits[words[row], labels[words[row]]] = -3.0
        return logits, labels, tokens

    def logits(self, hidden):
        return hidden


def test_turns_by_hand():
    """Turn 1 replies two frames early; turn 2 two frames late, which is one frame early for turn 3."""
    narrations = [(0, [7, 8]), (5, [7, 8, 9]), (9, [7]), (12, [7, 8])]
    model = Scripted(replies={3, 11}, words=[])
    found = evaluate.turns(model, torch.zeros(13, 2, 32), narrations)
    assert [turn.difference for turn in found] == [None, 2, -2, 1]
    count = len(model.layout.assistant) + 1                                           # Assistant: ... EOT
    words = [count + n for n in (2, 3, 1, 2)]
    assert found[1].fluency == pytest.approx((5 - 2) / (5 + words[1]))
    assert found[2].fluency == pytest.approx((4 - 1) / (4 + words[2]))
    assert found[3].fluency == pytest.approx((3 - 1) / (3 + words[3])) and all(turn.correctness == 1 for turn in found)
    vocabulary = len(model.layout.tokenizer)
    assert found[0].ppl == pytest.approx((np.exp(3) + vocabulary - 1) / np.exp(3))
    assert evaluate.summary(found, fps=2.0)["time_diff"] == pytest.approx((2 + 2 + 1) / 3 / 2)
    never = evaluate.turns(Scripted(replies={3}, words=[]), torch.zeros(13, 2, 32), narrations)
    assert [turn.difference for turn in never] == [None, 2, -3, 0] and never[3].fluency == 1


def test_correctness_is_the_length_of_the_right_beginning():
    model = Scripted(replies=set(), words=[1])
    first = evaluate.turns(model, torch.zeros(4, 2, 32), [(0, [7, 8, 9]), (3, [7])])[0]
    assert first.correctness == pytest.approx(1 / (len(model.layout.assistant) + 4))


def test_reply_threshold():
    model = Scripted(replies=set(), words=[])
    found = evaluate.turns(model, torch.zeros(4, 2, 32), [(0, [7]), (3, [7])], theta=0.999999)
    assert found[1].difference == 2                                                   # p([SKIP]) is below from the start


@golden
@pytest.mark.parametrize("name", ["flownar", "flownar_c", "videollm"])
@torch.no_grad()
def test_teacher_forced_is_the_published(name):
    """With the published mask and tokens: the published loss and metrics. With ours: how far the stricter mask and the
    unmerged token move them."""
    base = GOLDEN / name
    model = nar.Narrator.load(str(base / "checkpoint"), llm=str(GOLDEN / "base_llm"), last_k=2 if name == "flownar_c" else None)
    features = load_file(base / "features.safetensors")
    for key, case in json.loads((base / "teacher_forced.json").read_text()).items():
        x = features[key.split("/")[0]][:case["num_frames"]]
        narrations = [(frame, model.layout.encode(" " + text)) for frame, text in case["events"]]
        calls = []

        def forward(x, narrations):
            calls.append(narrations)
            return published(model, x, case)

        hidden, labels, _ = published(model, x, case)
        loss = torch.nn.functional.cross_entropy(model.logits(hidden), labels)
        # logits agree to 4e-6; a fp32 log-softmax over 128,256 words is itself only right to 7e-4
        assert loss.item() == pytest.approx(case["loss"], abs=1e-4), key
        for theta in (0.0, 0.8):
            theirs = case[f"interval_threshold_{theta}"]
            found = evaluate.turns(model, x, narrations, theta, forward)
            assert [turn.ppl for turn in found] == pytest.approx(theirs["per_turn"]["lm_ppl"], abs=1e-3), key
            assert [turn.correctness for turn in found] == pytest.approx(theirs["per_turn"]["lm_correctness"], abs=1e-6), key
            assert [abs(turn.difference) for turn in found[1:]] == theirs["per_turn"]["abs_frame_diff"], key
            assert [turn.fluency for turn in found[1:]] == pytest.approx(theirs["per_turn"]["fluency"], abs=1e-6), key
            ours = evaluate.summary(evaluate.turns(model, x, narrations, theta), model.config.fps)
            assert ours["time_diff"] == pytest.approx(theirs["time_diff_s"], abs=0.5), key
            later = [turn.ppl for turn in evaluate.turns(model, x, narrations, theta)][1:]
            assert later == pytest.approx(theirs["per_turn"]["lm_ppl"][1:], rel=0.1), key
        assert len(calls) == 2


def test_teacher_command():
    result = command("teacher", "--data", "toy", "--limit", 1, "--json", "--by-duration")
    assert result["ppl"] >= 1 and 0 <= result["fluency"] <= 1 and result["by_duration"]


# ---------------------------------------------------------------------- efficiency, attention, timeline

def test_cache_bytes_are_what_the_tensors_hold():
    model = tiny(last_k=2)
    state = efficiency.Timed(model)
    x, narrations = video(model)
    for step in stream.narrate(model, x, forced=dict(narrations), state=state):
        used = sum(y[:, :, state.cache.origin - state.cache.text:state.cache.origin + state.cache.visual].numel() * 4
                   for layer in state.cache.layers for y in layer)
        assert state.cache.bytes() == used <= state.held()


def test_timed_is_the_same_stream():
    """Clocking the stages and feeding narrations word by word changes no logit."""
    model = tiny()
    x, narrations = video(model)
    logits = []
    for kind in (stream.State, efficiency.Timed):
        state = kind(model)
        state.logits = []
        list(stream.narrate(model, x, forced=dict(narrations), state=state))
        logits.append(torch.stack(state.logits))
    assert torch.allclose(*logits, atol=1e-4) and set(state.seconds) == {"clam", "llm", "generation"}


@torch.no_grad()
def test_macs_of_the_language_model():
    """FlopCounter's total for the baseline without LoRA's tiny rank, against the layers' sizes: within 15 %."""
    model = tiny(memory="none", prune=False, lora_rank=1).requires_grad_(False)
    frames, words = 8, 4
    total = efficiency.macs(model, frames, every=8, words=words)
    layers = sum(p.numel() for n, p in model.llm.named_parameters() if "layers" in n and p.dim() == 2)
    tokens = len(model.layout.sequence([(0, [1] * words), (7, [1] * words)])) - 1
    assert layers * tokens < total < 1.4 * layers * tokens


def test_efficiency_command(tmp_path):
    result = command("efficiency", "--frames", 60, "--window", 20, "--macs-frames", 20, "--png", tmp_path / "e.png", "--json")
    rows = {name: [row["cache_bytes"] for row in r["windows"]] for name, r in result["variants"].items()}
    assert rows["VideoLLM-online"][-1] > rows["FlowNar"][-1] and all(len(r) == 3 for r in rows.values())
    assert all(r["macs"] > 1e6 for r in result["variants"].values()) and (tmp_path / "e.png").stat().st_size > 5000


def test_attention_sums_to_one():
    """Against the layer's own output: the weights, applied to its values, give what it computed."""
    for changes in ({}, {"memory": "none", "prune": False}):
        model = tiny(**changes)
        x, narrations = video(model)
        groups = figures.attention(model, x, narrations)
        assert groups.shape == (4,) and (groups >= 0).all() and groups.sum() <= 1
        assert (groups[2] > 0) == (not model.config.prune) and (groups[3] > 0) == bool(model.layout.M)
        seen, layer = {}, model.llm.model.layers[-1].self_attn
        layer.register_forward_hook(lambda m, a, kw, out: seen.update(kw, out=out[0], hidden=kw["hidden_states"]), with_kwargs=True)
        with torch.no_grad():
            model(x, narrations)
            weights = figures.weights_of(layer, seen["hidden"], seen["position_embeddings"], seen["attention_mask"])
        assert torch.allclose(weights.sum(1), torch.ones(len(weights)), atol=1e-5)


def test_attention_weights_reproduce_the_layer():
    """One head's worth: with a single head, weights times values through W_o is the layer's output."""
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    llm = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                       num_attention_heads=1, num_key_value_heads=1)).eval()
    attn, seen = llm.model.layers[0].self_attn, {}
    attn.register_forward_hook(lambda m, a, kw, out: seen.update(kw, out=out[0]), with_kwargs=True)
    mask = torch.rand(1, 1, 9, 9).round().bool() | torch.eye(9, dtype=torch.bool)
    with torch.no_grad():
        llm.model(inputs_embeds=torch.randn(1, 9, 16), attention_mask=mask)
        weights = figures.weights_of(attn, seen["hidden_states"], seen["position_embeddings"], seen["attention_mask"])
        expected = attn.o_proj(weights @ attn.v_proj(seen["hidden_states"][0]))
    assert torch.allclose(expected, seen["out"][0], atol=1e-5)


def test_attention_and_timeline_commands(tmp_path):
    result = command("attention", "--data", "toy", "--limit", 1, "--png", tmp_path / "a.png", "--json")
    assert set(result[str(TOY)]) == set(figures.GROUPS) and (tmp_path / "a.png").stat().st_size > 5000
    trace, said = tmp_path / "trace.jsonl", tmp_path / "said.jsonl"
    subprocess.run([sys.executable, "stream.py", "toy/kitchen.mp4", "--trace", str(trace), "--jsonl", str(said)], cwd=ROOT,
                   capture_output=True, check=True)
    command("timeline", trace, "--pred", said, "--gt", ROOT / "toy" / "kitchen.json", "--png", tmp_path / "t.png")
    assert (tmp_path / "t.png").stat().st_size > 20000
    assert "is no trace" in command("timeline", said, "--png", tmp_path / "u.png", ok=False) and not (tmp_path / "u.png").exists()
