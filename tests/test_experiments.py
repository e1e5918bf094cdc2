"""Experiments: what a stream costs (Fig. 1), where narrations look (App. C.2), timelines, and their commands."""
import json
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

import data
import narrator as nar
import stream
from experiments import efficiency, figures
from helpers import ROOT, TOY, tiny, video
from support.narrations import Sentence
from test_evaluate import command, write

measured, drawn = partial(command, main=efficiency.main), partial(command, main=figures.main)


# ---------------------------------------------------------------------- efficiency

def test_cache_bytes_are_what_the_tensors_hold():
    model = tiny(last_k=2)
    context = efficiency.Timed(model)
    x, narrations = video(model)
    for step in stream.narrate(model, x, forced=dict(narrations), context=context):
        used = sum(y[:, :,
                     context.cache.positions != stream.EMPTY].nbytes for layer in context.cache.layers for y in layer)
        assert context.cache.bytes() == used <= context.held()


def test_timed_is_the_same_stream():
    """Timing the stages and feeding narrations word by word changes no logit."""
    model = tiny()
    x, narrations = video(model)
    logits = []
    for kind in (stream.Context, efficiency.Timed):
        context = kind(model)
        context.logits = []
        list(stream.narrate(model, x, forced=dict(narrations), context=context))
        logits.append(torch.stack(context.logits))
    assert torch.allclose(*logits, atol=1e-4) and set(context.seconds) == {"clam", "llm", "generation"}


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
    result = measured("--frames", 30, "--window", 10, "--macs-frames", 8, "--png", tmp_path / "e.png", "--json")
    rows = {name: [row["cache_bytes"] for row in r["windows"]] for name, r in result["variants"].items()}
    assert rows["VideoLLM-online"][-1] > rows["FlowNar"][-1] and all(len(r) == 3 for r in rows.values())
    assert all(r["macs"] > 1e6 for r in result["variants"].values()) and (tmp_path / "e.png").stat().st_size > 5000
    peak = {name: r["cache_tokens_peak"] for name, r in result["variants"].items()}
    assert max(row["cache_tokens"] for row in result["variants"]["FlowNar-C"]["windows"]) < peak["FlowNar-C"]
    assert peak["VideoLLM-online"] > peak["FlowNar"]


def test_every_number_of_the_readme_is_printed(capsys):
    """The rows of its table; a window's speed in ms a frame, by hand."""
    windows = [{"fps": fps, "cache_bytes": 1, "held_bytes": 2} for fps in (50, 20, 10, 40)]
    costs = {name: 1.0 for name in ("frame_ms_p50", "frame_ms_p95", "narration_ms_p50", "narration_ms_p95")}
    costs |= {"frames": 8, "macs": 2e9, "cache_tokens_peak": 9, "fps": 20.0, "stages_s": {"llm": 1.0}}
    efficiency.print_costs({"FlowNar": costs | {"windows": windows, "out_of_memory": False}}, 8)
    printed = dict(line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    printed = {name.strip(): value for name, value in printed.items()}
    assert (printed["GMACs, 8 frames"], printed["cache, tokens, at most"]) == ("2.000", "9")
    assert printed["llm, ms a frame"] == "125.000"
    assert [printed[f"ms a frame, {which}"] for which in ("window 1", "window 2", "slowest from 2", "last window")] == [
        "20.000", "50.000", "100.000", "25.000"]
    assert {"cache, MB", "held, MB", "FPS", "frame, ms, p50", "frame, ms, p95", "narration, ms, p95"} <= printed.keys()


# ---------------------------------------------------------------------- attention

def test_attention_is_where_it_may_be():
    """Shares of the whole; none on past frames that are pruned, some on memory where there is one."""
    for changes in ({}, {"memory": "none", "prune": False}):
        model = tiny(**changes)
        groups = figures.attention(model, *video(model))
        assert groups.shape == (4,) and (groups >= 0).all() and groups.sum() <= 1
        assert (groups[2] > 0) == (not model.config.prune) and (groups[3] > 0) == bool(model.layout.M)


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
        inputs = seen["hidden_states"], seen["position_embeddings"], seen["attention_mask"]
        weights, = figures.attention_rows(attn, *inputs, [torch.ones(9, dtype=torch.bool)])
        expected = attn.o_proj(weights @ attn.v_proj(seen["hidden_states"][0]))
    assert torch.allclose(expected, seen["out"][0], atol=1e-5)


def test_only_the_rows_asked_for_are_computed():
    """They are those of the whole matrix, whose rows sum to one; no tensor of [heads, L, L] is made."""
    model, seen, largest = tiny(), {}, []
    x, narrations = video(model, frames=60, at=(0, 20, 40))
    layer = model.llm.model.layers[-1].self_attn
    hook = layer.register_forward_pre_hook(lambda m, a, kw: seen.update(kw), with_kwargs=True)
    with torch.no_grad():
        _, _, tokens = model(x, narrations)
        hook.remove()
        L = len(tokens)
        some, all_rows = torch.arange(L) % 50 == 3, torch.ones(L, dtype=torch.bool)
        inputs = seen["hidden_states"], seen["position_embeddings"], nar.attention_mask(tokens)[None, None]
        part, whole = figures.attention_rows(layer, *inputs, [some, all_rows])
        assert torch.allclose(whole.sum(1), torch.ones(L), atol=1e-5) and torch.allclose(part, whole[some], atol=1e-6)

        class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                result = function(*args, **(kwargs or {}))
                largest.append(result.numel() if isinstance(result, torch.Tensor) else 0)
                return result

        with Sizes():
            list(figures.attention_rows(layer, *inputs, [some]))
    assert max(largest) < L * L


def test_attention_command(tmp_path):
    """Of the model's own narrations, or of the true ones, and of a FlowNar-C checkpoint without last-k."""
    own = drawn("attention", "--data", "toy", "--limit", 1, "--png", tmp_path / "a.png", "--json")
    assert own["narrations"] == "the model's own narrations" and (tmp_path / "a.png").stat().st_size > 5000
    assert set(own["models"][str(TOY)]) == set(figures.GROUPS)
    true = drawn("attention", "--data", "toy", "--limit", 1, "--teacher", "--json")
    assert true["narrations"] == "true narrations"
    every = drawn("attention", "--data", "toy", "--limit", 1, "--teacher", "--last-k", "all", "--json")
    past = [result["models"][str(TOY)]["past narrations"] for result in (own, true, every)]
    assert len(set(past)) == 3


# ---------------------------------------------------------------------- timeline

def rows_of(*changes):
    """A trace of a stream, with some fields of its rows replaced."""
    row = {"p_skip": 0.5, "theta": 0.8, "narrate": False, "position": 9, "text_tokens": 5, "visual_tokens": 7}
    return [{"frame": i} | row | change for i, change in enumerate(changes)]


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_wrong_sentences():
    true = [Sentence(2, "a"), Sentence(4, "b"), Sentence(8, "c")]
    said = [Sentence(2, "a"), Sentence(4.5, "x"), Sentence(5, "b"), Sentence(8, "c")]
    assert figures.wrong_sentences(said, true) == [False, True, True, False]          # the third fits c's segment
    assert figures.wrong_sentences(said, []) == [False] * 4
    assert figures.wrong_sentences([Sentence(2, ""), Sentence(4, "")], true) == [False] * 2


def test_timeline_says_what_is_wrong_forced_and_memory(monkeypatch, tmp_path):
    shown = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, png: shown.append(figure))
    trace = rows_of({"p_skip": None, "theta": None, "narrate": True}, {}, {"narrate": True}, {},
                    {"narrate": True, "forced": True})
    true, said = [Sentence(1.5, "a $b"), Sentence(2.5, "c")], [Sentence(1.5, "a $b"), Sentence(2.5, "d$")]
    for memory, bands in ((0, ["text", "current segment"]), (3, ["text", "memory", "frames"])):
        figures.plot_timeline(trace, said, true, 2.0, memory, "t.png")
        truth, narrated, trigger, cache = shown[-1].axes
        assert [text.get_color() for text in narrated.texts] == ["black", "#c03020"]
        assert [text.get_color() for text in truth.texts] == ["black", "black"]
        assert [text.get_text() for text in cache.get_legend().texts] == bands
        dots = {line.get_label(): line for line in trigger.lines}
        assert dots["narrates"].get_xdata().tolist() == [1.5] and dots["forced"].get_xdata().tolist() == [2.5]
        assert dots["forced"].get_markerfacecolor() == "white"
        figure = shown.pop()
        figure.canvas.draw()                                                          # $ is no formula


def test_timeline_command(tmp_path):
    data.write_toy(7, 0.1, tmp_path / "video.mp4")
    drawn("timeline", tmp_path / "video.mp4")
    assert (tmp_path / "video.png").stat().st_size > 20000
    trace = lines(tmp_path / "kitchen.jsonl", rows_of({"narrate": True}, {}, {"narrate": True}))
    said = lines(tmp_path / "said.jsonl", [{"end": 0.5, "text": "You look."}, {"end": 1.5, "text": "You wash."}])
    drawn("timeline", trace, "--pred", said, "--gt", ROOT / "toy" / "kitchen.json")
    assert (tmp_path / "kitchen.png").stat().st_size > 5000
    assert "is no trace" in drawn("timeline", said, "--png", tmp_path / "u.png", ok=False)
    assert "is given twice" in drawn("timeline", trace, "--png", trace, ok=False)
    assert "is given twice" in drawn("timeline", trace, "--pred", said, "--png", said, ok=False)
    assert not (tmp_path / "u.png").exists()


@pytest.mark.parametrize("row", [{"frame": "x"}, {"p_skip": []}, {"text_tokens": None}, {"narrate": "yes"},
                                 {"theta": {}}, {"visual_tokens": 10 ** 400}], ids=lambda row: next(iter(row)))
def test_a_bad_trace_gets_one_line(tmp_path, row):
    assert "is no trace" in drawn("timeline", lines(tmp_path / "t.jsonl", rows_of({}, row)), ok=False)


@pytest.mark.parametrize("truth, says", [
    ({}, "no narrations"), ({"t": []}, "no narrations"), ({"t": [[]]}, "no narrations"),
    ({"a": [], "b": []}, "no narrations"), ([], "expected an object"), ({"t": {"start": 0}}, "annotators")])
def test_a_bad_truth_gets_one_line(tmp_path, truth, says):
    trace, gt = lines(tmp_path / "t.jsonl", rows_of({}, {})), write(tmp_path / "g.json", truth)
    assert says in drawn("timeline", trace, "--gt", gt, ok=False)


def test_times_far_outside_the_video_are_drawn_at_its_edge(tmp_path):
    """A time of a damaged file is no reason for a picture (and its text) of a billion seconds."""
    trace, gt = lines(tmp_path / "t.jsonl", rows_of(*[{}] * 5)), tmp_path / "g.json"
    write(gt, {"t": [{"time": -1e11, "text": "a"}, {"time": 1e11, "text": "b"}]})
    drawn("timeline", trace, "--gt", gt)
    assert (tmp_path / "t.png").stat().st_size > 5000


def test_empty_and_damaged_traces_get_one_line(tmp_path):
    (tmp_path / "t.jsonl").write_bytes(b"")
    assert "has no frames" in drawn("timeline", tmp_path / "t.jsonl", ok=False)
    (tmp_path / "t.jsonl").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in drawn("timeline", tmp_path / "t.jsonl", ok=False)


def test_features_need_no_vision_encoder(tmp_path):
    """A timeline of features: a narrator whose vision model is nowhere to be found will do."""
    model = tiny(width=16, vision="nowhere", max_new_tokens=2)
    model.save(tmp_path / "model")
    save_file({"features": torch.randn(6, 10, 16)}, tmp_path / "x.safetensors")
    drawn("timeline", tmp_path / "x.safetensors", "--model", tmp_path / "model")
    assert (tmp_path / "x.png").stat().st_size > 5000
