"""Experiments: what a stream costs (Fig. 1), where narrations look (App. C.2), timelines, and their
commands."""
import json
from dataclasses import replace
from functools import partial
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
from support.engine import slots
from support.files.narrations import Sentence
from test_evaluate import command, write

run_efficiency = partial(command, main=efficiency.main)
run_figures = partial(command, main=figures.main)


# ---------------------------------------------------------------------- efficiency

WORK = timing.Work(frames=20, every=5, words=3)


@pytest.mark.parametrize("changes", [{"last_k": 2}, {"memory": "none", "prune": False},
                                     {"last_k": 0, "narration_memory": 4}])
def test_used_bytes_are_those_of_all_that_a_stream_keeps(changes):
    meter = timing.Meter(tiny(**changes), WORK)
    for _ in range(WORK.frames):
        meter.advance(1)
        context = meter.context
        buffers = context.cache.keys + context.cache.values
        in_use = context.cache.positions != slots.EMPTY
        used = sum(buffer[in_use].nbytes for buffer in buffers)
        tensors = [context.state, context.memory, *context.unabsorbed]
        if hasattr(context.narrator, "narration_memory"):
            tensors += [context.history_state, context.history]
        state = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        row = meter.rows[-1]
        assert row["cache_bytes"] == used
        assert row["used_bytes"] == used + state
        assert row["held_bytes"] == sum(buffer.nbytes for buffer in buffers) + state
        assert row["held_bytes"] >= row["used_bytes"]


@pytest.mark.parametrize("lookahead", [1, 4])
def test_stages_are_parts_of_the_whole(lookahead):
    result = efficiency.measure_stream(tiny(), replace(WORK, lookahead=lookahead), window=8)
    stages = result["stages_s"]
    assert stages.keys() == {"memory", "frame", "text"}
    assert all(seconds > 0 for seconds in stages.values())
    assert sum(stages.values()) < result["seconds"]
    assert result["frames"] == 20
    assert result["narrations"] == 5           # of frames 0, 4, 9, 14, 19
    assert [window["frames"] for window in result["windows"]] == [8, 16, 20]
    assert result["fps"] == pytest.approx(20 / result["seconds"])


def shapes(model) -> dict:
    return {name: (p.shape, p.dtype) for name, p in model.named_parameters()}


def test_weights_are_those_of_the_model_that_streams():
    """LoRA merged, no copies; connector and CLAM in fp32 whatever the language model has."""
    args = SimpleNamespace(device="cpu", dtype="bfloat16", config=None, llm=None)
    model = efficiency.build(args, {"last_k": 10})
    loaded = load_narrator(str(TOY), dtype=torch.bfloat16).merge()
    assert shapes(model) == shapes(loaded)
    assert model.slow_because is None


def test_a_language_model_of_a_given_size(monkeypatch):
    monkeypatch.setitem(efficiency.LLAMA, "small", (64, 96, 2, 16))
    args = SimpleNamespace(device="cpu", dtype="float32", config="small", llm=None)
    model = efficiency.build(args, {})
    assert model.llm.model.layers[1].mlp.up_proj.weight.shape == (96, 64)
    assert model.slow_because is None


@torch.no_grad()
def test_macs_of_the_language_model():
    """The total of the baseline, without LoRA's tiny rank, against the sizes of the layers."""
    model = tiny(memory="none", prune=False, lora_rank=1).requires_grad_(False)
    work = timing.Work(frames=8, every=8, words=4)
    total = efficiency.macs(model, work)
    weights = 0
    for name, p in model.llm.named_parameters():
        if "layers" in name and p.dim() == 2:
            weights += p.numel()
    tokens = len(model.layout.sequence([(0, [1] * 4), (7, [1] * 4)])) - 1
    assert weights * tokens < total < 1.4 * weights * tokens
    assert efficiency.macs(model.merge(), work) < total


def test_macs_with_a_narration_memory():
    """More work: its tokens are fed, and its CLAM absorbs the words."""
    work = timing.Work(frames=8, every=4, words=3)
    without = efficiency.macs(tiny(last_k=0), work)
    assert efficiency.macs(tiny(last_k=0, narration_memory=4), work) > 1.05 * without


def test_flatness_is_the_last_window_over_the_second(monkeypatch):
    """Frame t takes t seconds, by a clock that only the frames move. Two streams take turns."""
    clock = [0.0]
    monkeypatch.setattr(timing.time, "process_time", lambda: clock[0])

    def narrate(*args, **options):
        for t in range(40):
            clock[0] += t
            yield SimpleNamespace(narration=None)

    monkeypatch.setattr(timing.stream, "narrate", narrate)
    ratio = timing.flatness(tiny(), timing.Work(40, every=5), window=10)
    assert ratio == pytest.approx(sum(range(30, 40)) / sum(range(10, 20)))


def test_efficiency_command(tmp_path):
    result = run_efficiency("--frames", 15, "--window", 5, "--macs-frames", 2, "--every", 4,
                            "--words", 4, "--streams", 2, "--png", tmp_path / "e.png", "--json")
    variants = result["variants"]
    for costs in variants.values():
        assert [window["frames"] for window in costs["windows"]] == [5, 10, 15]
        assert costs["macs"] > 1e6
    flownar = variants["FlowNar"]
    online = variants["VideoLLM-online"]
    assert online["windows"][-1]["cache_bytes"] > flownar["windows"][-1]["cache_bytes"]
    assert online["cache_tokens_peak"] > flownar["cache_tokens_peak"]
    # Frames that are read ahead stand in the cache between the ends of the windows.
    flownar_c = variants["FlowNar-C"]
    at_ends = [window["cache_tokens"] for window in flownar_c["windows"]]
    assert flownar_c["cache_tokens_peak"] > max(at_ends)
    assert [costs["flatness"] is None for costs in variants.values()] == [False, True, True, True]
    assert (tmp_path / "e.png").stat().st_size > 5000


def test_fig_1_shows_weights_and_what_is_in_use(monkeypatch):
    """Against frames on a logarithmic axis, with a line at 24 GB and a cross where memory was full.
    """
    saved = []
    monkeypatch.setattr(efficiency, "save_figure", lambda figure, png: saved.append(figure))
    result = efficiency.measure_stream(tiny(), WORK, window=10)
    weights = result["weights_bytes"]
    used = result["windows"][-1]["used_bytes"]
    (first, _), *_, (last, largest) = result["memory"]
    assert (first, last) == (1, 20)
    assert weights + used <= largest < weights + 2 * used

    efficiency.plot_efficiency({"FlowNar": result | {"out_of_memory": True}}, "e.png", limit=24e9)
    memory, bars, _ = saved[0].axes
    curve, cross, line = memory.lines
    assert memory.get_xscale() == "log"
    assert list(curve.get_ydata()) == [size / 1e9 for _, size in result["memory"]]
    assert cross.get_label() == "out of memory"
    assert list(line.get_ydata()) == [24, 24]
    assert [bar.get_height() for bar in bars.patches] == [result["fps"]]


def test_the_table_of_costs(capsys):
    """Its rows, in their order, and the numbers by hand."""
    windows = [{"fps": fps, "cache_bytes": 1e6, "used_bytes": 2e6, "held_bytes": 3e6}
               for fps in (50, 20, 10, 40)]
    costs = {
        "frames": 8, "macs": 2e9, "weights_bytes": 4e6, "windows": windows, "fps": 20.0,
        "cache_tokens_peak": 9, "flatness": 0.5, "live_fps": 10.0, "streams": 16,
        "streams_fps": 25.0, "frame_ms_p50": 1.0, "frame_ms_p95": 2.0, "narration_ms_p50": None,
        "narration_ms_p95": 4.0, "stages_s": {"frame": 1.0}, "seconds": 1.5, "out_of_memory": True,
    }
    efficiency.print_costs({"FlowNar": costs}, 8)
    lines = capsys.readouterr().out.splitlines()
    printed = [line.rsplit(maxsplit=1) for line in lines]
    table = {name.strip(): value for name, value in printed}
    expected = {
        "frames": "8",
        "GMACs, 8 frames": "2.000",
        "weights, MB": "4.000",
        "cache, MB": "1.000",
        "used, MB": "2.000",
        "held, MB": "3.000",
        "cache, tokens, at most": "9",
        "FPS": "20.000",
        "ms a frame, window 1": "20.000",
        "ms a frame, window 2": "50.000",
        "ms a frame, slowest from 2": "100.000",
        "ms a frame, last window": "25.000",
        "last window / window 2": "0.500",
        "one live stream, FPS": "10.000",
        "16 at once, FPS": "25.000",
        "frame, ms, p50": "1.000",
        "frame, ms, p95": "2.000",
        "narration, ms, p50": "-",
        "narration, ms, p95": "4.000",
        "frame, ms a frame": "125.000",
        "rest, ms a frame": "62.500",
        "out of memory": "yes",
    }
    assert list(table.items()) == list(expected.items())


# ---------------------------------------------------------------------- a training step

class TwoSteps(list):
    """The other end of a connection: asks for two steps, and keeps the answers."""

    def recv(self):
        return len(self) < 2

    def send(self, answer):
        self.append(answer)


def test_a_training_step_of_each_variant():
    """FlowNar feeds its memory tokens besides the tokens of the baseline."""
    small = ("--frames 8 --every 4 --words 3 --layers 2 --width 32 --inner 48 --heads 2 "
             "--kv-heads 1 --rank 2 --device cpu --checkpointing FlowNar VideoLLM-online")
    args = training_step.parser().parse_args(small.split())
    tokens = {}
    for name in efficiency.VARIANTS:
        answers = TwoSteps()
        training_step.steps(answers, args, name)
        first, second, numbers = answers
        assert 0 < first < 60
        assert 0 < second < 60
        assert numbers["peak_bytes"] >= numbers["weights_bytes"] > 0
        tokens[name] = numbers["tokens"]
    read_outs = 2
    assert tokens["FlowNar"] == tokens["VideoLLM-online"] + read_outs * (20 + 2)   # with brackets
    assert tokens["FlowNar-C"] == tokens["FlowNar"]


# ---------------------------------------------------------------------- attention

@pytest.mark.parametrize("changes, past_frames, memory", [
    ({}, False, True),
    ({"memory": "none", "prune": False}, True, False),
    ({"memory": "none", "last_k": 0, "narration_memory": 4}, False, True),
])
def test_attention_is_where_it_may_be(changes, past_frames, memory):
    """Shares of the whole; none on past frames that are pruned, some on memory where there is one.
    """
    model = tiny(**changes)
    shares = figures.attention(model, *video(model))
    assert shares.shape == (4,)
    assert (shares >= 0).all() and shares.sum() <= 1
    assert (shares[2] > 0) == past_frames
    assert (shares[3] > 0) == memory


FAMILIES = {"Llama": {}, "Qwen3": {}, "Olmo2": {}, "Cohere": {}, "Phi3": {},
            "SmolLM3": {"num_hidden_layers": 4, "bos_token_id": 0, "eos_token_id": 1}}


def small_llm(family):
    """A language model of a family, whose attention is far from uniform."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 640, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    config = getattr(transformers, family + "Config")(**sizes | FAMILIES[family])
    llm = getattr(transformers, family + "ForCausalLM")(config)
    for name, p in llm.named_parameters():
        if p.dim() == 2 and ("q_proj" in name or "k_proj" in name):
            p.data *= 8
        elif "_norm" in name:
            p.data *= 3
    return llm


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_that_of_the_models_own_weights(family):
    """As transformers returns it for the mask of Fig. 4, with norms of queries and keys (Qwen3,
    Olmo2), a layer without rotation (SmolLM3), other rotations (Cohere), one matrix for queries,
    keys and values (Phi3)."""
    llm = small_llm(family)
    model = tiny(llm=llm, last_k=2)
    x, narrations = video(model)
    inputs = {}

    def keep_inputs(module, arguments, options):
        inputs.update(options)

    hook = llm.model.register_forward_pre_hook(keep_inputs, with_kwargs=True)
    shares = figures.attention(model, x, narrations)
    hook.remove()

    # The same pass with a dense mask, whose attention transformers returns.
    tokens = model.layout.sequence(narrations)
    unseen = ~nar.attention_mask(tokens, 2)
    mask = torch.zeros(unseen.shape).masked_fill(unseen, float("-inf"))
    llm.set_attn_implementation("eager")
    with torch.no_grad():
        output = llm.model(
            inputs_embeds=inputs["inputs_embeds"],
            position_ids=inputs["position_ids"],
            attention_mask=mask[None, None],
            use_cache=False,
            output_attentions=True,
        )
    last_layer = output.attentions[-1][0]                                  # [h, L, L]
    weights = last_layer.mean(0)                                           # [L, L]

    # Rows: the words of a narration. Columns: the four groups of `figures.GROUPS`.
    segment = torch.tensor(tokens.segment)
    number = torch.tensor(tokens.number)
    ids = torch.tensor(tokens.ids)
    learned = torch.tensor(tokens.learn[1:] + [False])
    expected = []
    for n in range(1, len(narrations)):
        rows = weights[(segment == n) & learned & (number == n)]
        groups = [
            (number >= 0) & (number < n),
            (ids == nar.FRAME) & (segment == n),
            (ids == nar.FRAME) & (segment < n),
            (ids == nar.MEMORY) & (segment == n),
        ]
        expected.append([rows[:, group].sum(1).mean().item() for group in groups])
    assert shares == pytest.approx(np.mean(expected, axis=0), abs=1e-4)


def test_only_the_rows_asked_for_are_computed():
    """They equal rows of the whole matrix, which sum to one. No tensor [heads, L, L] is made."""
    L = 600
    query = torch.randn(4, L, 8)
    key = torch.randn(2, L, 8)
    mask = torch.ones(L, L, dtype=torch.bool).tril()
    few = torch.arange(L) % 50 == 3
    every = torch.ones(L, dtype=torch.bool)
    rows, whole = figures.attention_rows(query, key, 0.3, mask, [few, every])
    assert torch.allclose(whole.sum(1), torch.ones(L), atol=1e-5)
    assert torch.allclose(rows, whole[few], atol=1e-6)

    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                sizes.append(result.numel())
            return result

    with Sizes():
        list(figures.attention_rows(query, key, 0.3, mask, [few]))
    assert max(sizes) < L * L


def test_attention_command(tmp_path):
    """Of the model's own narrations, or of the true ones, and of a FlowNar-C checkpoint without
    last-k."""
    common = ["attention", "--data", "toy", "--limit", 1, "--json"]
    own = run_figures(*common, "--png", tmp_path / "a.png")
    true = run_figures(*common, "--teacher")
    without_last_k = run_figures(*common, "--teacher", "--last-k", "all")
    assert own["narrations"] == "the model's own narrations"
    assert true["narrations"] == "true narrations"
    assert own["models"][str(TOY)].keys() == set(figures.GROUPS)
    past = {result["models"][str(TOY)]["past narrations"] for result in (own, true, without_last_k)}
    assert len(past) == 3
    assert (tmp_path / "a.png").stat().st_size > 5000


# ---------------------------------------------------------------------- timeline

def rows_of(*changes):
    """A trace of a stream: a row for each change, with these fields replaced."""
    row = {"p_skip": 0.5, "theta": 0.8, "narrate": False, "position": 9, "text_tokens": 5,
           "visual_tokens": 7}
    return [{"frame": i} | row | change for i, change in enumerate(changes)]


def write_lines(path, rows):
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_wrong_sentences():
    true = [Sentence(2, "a"), Sentence(4, "b"), Sentence(8, "c")]
    predicted = [Sentence(2, "a"), Sentence(4.5, "x"), Sentence(5, "b"), Sentence(8, "c")]
    # The third one fits c's segment.
    assert figures.wrong_sentences(predicted, true) == [False, True, True, False]
    assert figures.wrong_sentences(predicted, []) == [False] * 4
    assert figures.wrong_sentences([Sentence(2, ""), Sentence(4, "")], true) == [False] * 2


@pytest.mark.parametrize("memory, bands", [
    (0, ["text", "current segment"]),
    (3, ["text", "memory", "frames"]),
])
def test_timeline_says_what_is_wrong_forced_and_memory(monkeypatch, memory, bands):
    shown = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, png: shown.append(figure))
    first = {"p_skip": None, "theta": None, "narrate": True}
    trace = rows_of(first, {}, {"narrate": True}, {}, {"narrate": True, "forced": True})
    true = [Sentence(1.5, "a $b"), Sentence(2.5, "c")]
    predicted = [Sentence(1.5, "a $b"), Sentence(2.5, "d$")]
    figures.plot_timeline(trace, predicted, true, 2.0, memory, "t.png")
    figure, = shown
    true_axis, predicted_axis, trigger, cache = figure.axes
    assert [text.get_color() for text in true_axis.texts] == ["black", "black"]
    assert [text.get_color() for text in predicted_axis.texts] == ["black", "#c03020"]
    assert [text.get_text() for text in cache.get_legend().texts] == bands
    dots = {line.get_label(): line for line in trigger.lines}
    assert dots["narrates"].get_xdata().tolist() == [1.5]
    assert dots["forced"].get_xdata().tolist() == [2.5]
    assert dots["forced"].get_markerfacecolor() == "white"
    figure.canvas.draw()                                                   # $ is no formula


def test_timeline_of_a_video(tmp_path):
    data_command.write_toy(7, 0.1, tmp_path / "video.mp4")
    run_figures("timeline", tmp_path / "video.mp4")
    assert (tmp_path / "video.png").stat().st_size > 20000


def test_timeline_of_a_trace(tmp_path):
    rows = rows_of({"narrate": True}, {}, {"narrate": True})
    trace = write_lines(tmp_path / "kitchen.jsonl", rows)
    narrations = write_lines(tmp_path / "n.jsonl", [{"end": 0.5, "text": "You look."},
                                                    {"end": 1.5, "text": "You wash."}])
    run_figures("timeline", trace, "--pred", narrations, "--gt", ROOT / "toy" / "kitchen.json")
    assert (tmp_path / "kitchen.png").stat().st_size > 5000
    picture = tmp_path / "new.png"
    assert "is no trace" in run_figures("timeline", narrations, "--png", picture, ok=False)
    assert not picture.exists()
    for options in (["--png", trace], ["--pred", narrations, "--png", narrations]):
        assert "is given twice" in run_figures("timeline", trace, *options, ok=False)


@pytest.mark.parametrize("row", [
    {"frame": "x"}, {"p_skip": []}, {"text_tokens": None}, {"narrate": "yes"}, {"theta": {}},
    {"visual_tokens": 10 ** 400},
], ids=lambda row: next(iter(row)))
def test_a_bad_trace_gets_one_line(tmp_path, row):
    trace = write_lines(tmp_path / "t.jsonl", rows_of({}, row))
    assert "is no trace" in run_figures("timeline", trace, ok=False)


@pytest.mark.parametrize("truth, says", [
    ({}, "no narrations"),
    ({"t": []}, "no narrations"),
    ({"t": [[]]}, "no narrations"),
    ({"a": [], "b": []}, "no narrations"),
    ([], "expected an object"),
    ({"t": {"start": 0}}, "annotators"),
])
def test_a_bad_truth_gets_one_line(tmp_path, truth, says):
    trace = write_lines(tmp_path / "t.jsonl", rows_of({}, {}))
    gt = write(tmp_path / "g.json", truth)
    assert says in run_figures("timeline", trace, "--gt", gt, ok=False)


def test_times_far_outside_the_video_are_drawn_at_its_edge(tmp_path):
    """A time of a damaged file is no reason for a picture (and its text) of a billion seconds."""
    trace = write_lines(tmp_path / "t.jsonl", rows_of({}, {}, {}, {}, {}))
    narrations = [{"time": -1e11, "text": "a"}, {"time": 1e11, "text": "b"}]
    gt = write(tmp_path / "g.json", {"t": narrations})
    run_figures("timeline", trace, "--gt", gt)
    assert (tmp_path / "t.png").stat().st_size > 5000


@pytest.mark.parametrize("content, says", [(b"", "has no frames"), (b"\xff\xfe", "not UTF-8")])
def test_empty_and_damaged_traces_get_one_line(tmp_path, content, says):
    (tmp_path / "t.jsonl").write_bytes(content)
    assert says in run_figures("timeline", tmp_path / "t.jsonl", ok=False)


def test_features_need_no_vision_encoder(tmp_path):
    """A timeline of features: a narrator whose vision model is nowhere to be found will do."""
    model = tiny(width=16, vision="nowhere", max_new_tokens=2)
    model.save(tmp_path / "model")
    save_file({"features": torch.randn(6, 10, 16)}, tmp_path / "x.safetensors")
    run_figures("timeline", tmp_path / "x.safetensors", "--model", tmp_path / "model")
    assert (tmp_path / "x.png").stat().st_size > 5000
