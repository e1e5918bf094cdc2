"""Experiments: what a stream costs (Fig. 1), where narrations look (App. C.2), timelines, and their commands."""
import json
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

import narrator as nar
from baselines.variants import load_narrator
from commands import data as data_command
from experiments import efficiency, figures, timing, training_step
from helpers import ROOT, TOY, tiny, video
from support.common.errors import BadData
from support.engine import slots
from support.files.narrations import Sentence
from test_evaluate import command, write

measured, drawn = partial(command, main=efficiency.main), partial(command, main=figures.main)


# ---------------------------------------------------------------------- efficiency

WORK = timing.Work(frames=20, every=5, words=3)


@pytest.mark.parametrize("changes", [{"last_k": 2}, {"memory": "none", "prune": False},
                                     {"last_k": 0, "narration_memory": 4}])
def test_used_bytes_are_those_of_all_that_a_stream_keeps(changes):
    meter = timing.Meter(tiny(**changes), WORK)
    for _ in range(WORK.frames):
        meter.advance(1)
        c, row = meter.context, meter.rows[-1]
        used = sum(y[c.cache.positions != slots.EMPTY].nbytes for y in c.cache.keys + c.cache.values)
        history = [c.history_state, c.history] if c.narrator.config.narration_memory else []
        state = sum(y.nbytes for y in (c.state, c.memory, *history, *c.waiting) if y is not None)
        assert row["cache_bytes"] == used and row["used_bytes"] == used + state
        assert row["held_bytes"] == state + sum(y.nbytes for y in c.cache.keys + c.cache.values) >= row["used_bytes"]


def test_every_pass_is_in_its_stage(monkeypatch):
    """With a clock that ticks whenever it is read, a stage takes one second each time, and nothing is counted twice."""
    model, ticks = tiny(), count()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(ticks)))
    result = efficiency.measure_stream(model, WORK, window=8)
    frames, narrations = 20, 5                                                  # of frames 0, 4, 9, 14, 19
    stages = result["stages_s"]
    assert (stages["frame"], stages["text"], stages["trigger"]) == (frames, narrations * 4, frames - 1)
    assert stages["memory"] == 2 * narrations == 2 * result["narrations"]       # the frames of a segment together; read
    assert result["seconds"] == 2 * sum(stages.values()) + frames
    assert [row["frames"] for row in result["windows"]] == [8, 16, 20]
    ahead = efficiency.measure_stream(model, replace(WORK, lookahead=4), window=8)["stages_s"]
    assert ahead["frame"] == frames and ahead["text"] == narrations * 4         # as often; most of them without a pass


def test_weights_are_those_of_the_model_that_streams(monkeypatch):
    """LoRA merged, no copies; connector and CLAM in fp32 whatever the language model has."""
    args = SimpleNamespace(device="cpu", dtype="bfloat16", config=None, llm=None)
    model = efficiency.build(args, {"last_k": 10})
    loaded = load_narrator(str(TOY), dtype=torch.bfloat16).merge()
    assert {n: (p.shape, p.dtype) for n, p in model.named_parameters()} == {
        n: (p.shape, p.dtype) for n, p in loaded.named_parameters()} and model.slow_because is None
    monkeypatch.setitem(efficiency.LLAMA, "small", (64, 96, 2, 16))
    one = efficiency.build(SimpleNamespace(device="cpu", dtype="float32", config="small", llm=None), {})
    assert one.llm.model.layers[1].mlp.up_proj.weight.shape == (96, 64) and one.slow_because is None


@torch.no_grad()
def test_macs_of_the_language_model():
    """FlopCounter's total for the baseline without LoRA's tiny rank, against the layers' sizes: within 40 %."""
    model = tiny(memory="none", prune=False, lora_rank=1).requires_grad_(False)
    frames, words = 8, 4
    total = efficiency.macs(model, timing.Work(frames, every=8, words=words))
    layers = sum(p.numel() for n, p in model.llm.named_parameters() if "layers" in n and p.dim() == 2)
    tokens = len(model.layout.sequence([(0, [1] * words), (7, [1] * words)])) - 1
    assert layers * tokens < total < 1.4 * layers * tokens
    assert efficiency.macs(model.merge(), timing.Work(frames, every=8, words=words)) < total


def test_macs_with_a_narration_memory():
    """Its tokens are fed, and its CLAM absorbs the words, besides what is done without it."""
    work = timing.Work(frames=8, every=4, words=3)
    without, model = tiny(last_k=0), tiny(last_k=0, narration_memory=4)
    assert efficiency.macs(model, work) > 1.05 * efficiency.macs(without, work)


def test_flatness_is_the_last_window_over_the_second(monkeypatch):
    """With a clock that only the frames move, by the number of the frame, two streams in turn give the mean numbers."""
    model, clock = tiny(), [0.0]
    monkeypatch.setattr(timing.time, "process_time", lambda: clock[0])

    def narrate(*args, **how):
        for t in range(40):
            clock[0] += t
            yield SimpleNamespace(narration=None)

    monkeypatch.setattr(timing.stream, "narrate", narrate)
    ratio = timing.flatness(model, timing.Work(40, every=5), window=10)
    assert ratio == pytest.approx(sum(range(30, 40)) / sum(range(10, 20)))


def test_efficiency_command(tmp_path):
    result = measured("--frames", 30, "--window", 10, "--macs-frames", 4, "--every", 4, "--words", 6, "--streams", 3,
                      "--png", tmp_path / "e.png", "--json")
    rows = {name: [row["cache_bytes"] for row in r["windows"]] for name, r in result["variants"].items()}
    assert rows["VideoLLM-online"][-1] > rows["FlowNar"][-1] and all(len(r) == 3 for r in rows.values())
    assert all(r["macs"] > 1e6 for r in result["variants"].values()) and (tmp_path / "e.png").stat().st_size > 5000
    peak = {name: r["cache_tokens_peak"] for name, r in result["variants"].items()}
    assert max(row["cache_tokens"] for row in result["variants"]["FlowNar-C"]["windows"]) < peak["FlowNar-C"]
    assert peak["VideoLLM-online"] > peak["FlowNar"]
    assert [r["flatness"] is None for r in result["variants"].values()] == [False, True, True, True]


def test_fig_1_shows_weights_and_what_is_in_use(monkeypatch):
    """Against frames on a logarithmic axis, with a line at 24 GB and a cross where memory was full."""
    shown = []
    monkeypatch.setattr(efficiency, "save_figure", lambda figure, png: shown.append(figure))
    result = efficiency.measure_stream(tiny(), WORK, window=10)
    row, weights = result["windows"][-1], result["weights_bytes"]
    assert result["memory"][0][0] == 1 and result["memory"][-1][0] == 20
    assert weights + row["used_bytes"] <= result["memory"][-1][1] < weights + 2 * row["used_bytes"]
    efficiency.plot_efficiency({"FlowNar": result | {"out_of_memory": True}}, "e.png", limit=24e9)
    memory, bars, _ = shown[0].axes
    curve, cross, line = memory.lines
    assert memory.get_xscale() == "log" and list(curve.get_ydata()) == [y / 1e9 for _, y in result["memory"]]
    assert cross.get_label() == "out of memory" and list(line.get_ydata()) == [24, 24]
    assert [bar.get_height() for bar in bars.patches] == [result["fps"]]


def test_every_number_of_the_readme_is_printed(capsys):
    """The rows of its table; a window's speed in ms a frame, by hand."""
    windows = [{"fps": fps, "cache_bytes": 1, "used_bytes": 2, "held_bytes": 3e6} for fps in (50, 20, 10, 40)]
    costs = {name: 1.0 for name in ("frame_ms_p50", "frame_ms_p95", "narration_ms_p50", "narration_ms_p95", "flatness")}
    costs |= {"frames": 8, "macs": 2e9, "cache_tokens_peak": 9, "fps": 20.0, "stages_s": {"frame": 1.0}, "seconds": 1.5,
              "weights_bytes": 4e6, "live_fps": 10.0, "streams": 16, "streams_fps": 25.0}
    efficiency.print_costs({"FlowNar": costs | {"windows": windows, "out_of_memory": False}}, 8)
    printed = dict(line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    printed = {name.strip(): value for name, value in printed.items()}
    assert (printed["GMACs, 8 frames"], printed["cache, tokens, at most"]) == ("2.000", "9")
    assert (printed["frame, ms a frame"], printed["rest, ms a frame"]) == ("125.000", "62.500")
    assert (printed["weights, MB"], printed["held, MB"]) == ("4.000", "3.000")
    assert [printed[f"ms a frame, {which}"] for which in ("window 1", "window 2", "slowest from 2", "last window")] == [
        "20.000", "50.000", "100.000", "25.000"]
    assert {"cache, MB", "used, MB", "FPS", "last window / window 2", "frame, ms, p50", "frame, ms, p95",
            "one live stream, FPS", "16 at once, FPS", "narration, ms, p95"} <= printed.keys()


# ---------------------------------------------------------------------- a training step

class Asking(list):
    """The other end of a connection: asks for two steps, and keeps what it is sent."""

    def recv(self):
        return len(self) < 2

    def send(self, answer):
        self.append(answer)


def test_a_training_step_of_each_variant():
    """Two steps and the numbers; FlowNar feeds its memory besides what the baseline feeds."""
    small = ("--frames 8 --every 4 --words 3 --layers 2 --width 32 --inner 48 --heads 2 --kv-heads 1 --rank 2 "
             "--device cpu --checkpointing FlowNar VideoLLM-online")
    args = training_step.parser().parse_args(small.split())
    tokens = {}
    for name in efficiency.VARIANTS:
        answers = Asking()
        training_step.steps(answers, args, name)
        assert len(answers) == 3 and all(0 < seconds < 60 for seconds in answers[:2])
        assert answers[2]["peak_bytes"] >= answers[2]["weights_bytes"] > 0
        tokens[name] = answers[2]["tokens"]
    assert tokens["FlowNar"] == tokens["FlowNar-C"] == tokens["VideoLLM-online"] + 2 * (20 + 2)


# ---------------------------------------------------------------------- attention

def test_attention_is_where_it_may_be():
    """Shares of the whole; none on past frames that are pruned, some on memory where there is one."""
    for changes in ({}, {"memory": "none", "prune": False}, {"memory": "none", "last_k": 0, "narration_memory": 4}):
        model = tiny(**changes)
        groups = figures.attention(model, *video(model))
        assert groups.shape == (4,) and (groups >= 0).all() and groups.sum() <= 1
        assert (groups[2] > 0) == (not model.config.prune) and (groups[3] > 0) == bool(model.layout.M + model.config.narration_memory)


FAMILIES = {"Llama": {}, "Qwen3": {}, "Olmo2": {}, "Cohere": {}, "Phi3": {},
            "SmolLM3": {"num_hidden_layers": 4, "bos_token_id": 0, "eos_token_id": 1}}


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_that_of_the_models_own_weights(family):
    """Those that transformers returns for the mask of Fig. 4, with norms of queries and keys
    (Qwen3, Olmo2), a layer without rotation (SmolLM3), other rotations (Cohere), one matrix for
    queries, keys and values (Phi3)."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 640, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    config = getattr(transformers, family + "Config")(**sizes | FAMILIES[family])
    llm = getattr(transformers, family + "ForCausalLM")(config)
    for name, p in llm.named_parameters():                                 # far from uniform
        if p.dim() == 2 and ("q_proj" in name or "k_proj" in name):
            p.data *= 8
        elif "_norm" in name:
            p.data *= 3
    model, seen = tiny(llm=llm, last_k=2), {}
    x, narrations = video(model)
    hook = llm.model.register_forward_pre_hook(lambda module, args, given: seen.update(given),
                                               with_kwargs=True)
    shares = figures.attention(model, x, narrations)
    hook.remove()
    tokens = model.layout.sequence(narrations)
    unseen = ~nar.attention_mask(tokens, 2)
    hidden = torch.zeros(unseen.shape).masked_fill(unseen, float("-inf"))
    llm.set_attn_implementation("eager")
    with torch.no_grad():
        given = {name: seen[name] for name in ("inputs_embeds", "position_ids")}
        answer = llm.model(**given, attention_mask=hidden[None, None], use_cache=False,
                           output_attentions=True)
    weights = answer.attentions[-1][0].mean(0)
    segment, number, ids = (torch.tensor(y) for y in (tokens.segment, tokens.number, tokens.ids))
    learned = torch.tensor(tokens.learn[1:] + [False])
    expected = []
    for n in range(1, len(narrations)):
        rows = weights[(segment == n) & learned & (number == n)]
        frames, memory = ids == nar.FRAME, (ids == nar.MEMORY) & (segment == n)
        narrated = (number >= 0) & (number < n)
        groups = narrated, frames & (segment == n), frames & (segment < n), memory
        expected.append([rows[:, group].sum(1).mean().item() for group in groups])
    assert shares == pytest.approx(np.mean(expected, axis=0), abs=1e-4)


def test_only_the_rows_asked_for_are_computed():
    """They are those of the whole matrix, whose rows sum to one; no tensor of [heads, L, L] is made."""
    largest, L = [], 600
    query, key = torch.randn(4, L, 8), torch.randn(2, L, 8)
    mask = torch.ones(L, L, dtype=torch.bool).tril()
    some, all_rows = torch.arange(L) % 50 == 3, torch.ones(L, dtype=torch.bool)
    part, whole = figures.attention_rows(query, key, 0.3, mask, [some, all_rows])
    assert torch.allclose(whole.sum(1), torch.ones(L), atol=1e-5)
    assert torch.allclose(part, whole[some], atol=1e-6)

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            largest.append(result.numel() if isinstance(result, torch.Tensor) else 0)
            return result

    with Sizes():
        list(figures.attention_rows(query, key, 0.3, mask, [some]))
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
    data_command.write_toy(7, 0.1, tmp_path / "video.mp4")
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
