"""The fast path of streaming computes what transformers' modules do, for one stream or several."""
from functools import partial

import pytest
import torch
import transformers
from torch import nn

import stream
from helpers import grouped, narrate, tiny, video
from streams import fast
from streams.fast import open_stream, try_passes
from streams.together import Failed, side_by_side
from support.engine import linear, passes, slots
from support.engine.linear import ONEDNN_BF16, Linear, PackedLinear
from support.engine.shared import SharedRows

SMALL = {"vocab_size": 640, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
         "attn_implementation": "sdpa"}
ONLINE = {"memory": "none", "prune": False}
MOD = ONLINE | {"mod_keep": 0.2}


def small(name: str, **changes) -> nn.Module:
    """A small language model of one of transformers' families, random weights."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL | changes)
    llm = getattr(transformers, f"{name}ForCausalLM")(config)
    for p in llm.parameters():
        if p.dim() == 1:                # norms and biases: at their usual values none is missed
            nn.init.normal_(p, 1.0, 0.3)
    return llm


def row_of(step) -> tuple:
    """What must be equal in two streams: place, sizes of the cache, and the narration."""
    words = step.narration.tokens if step.narration else None
    return step.frame, step.position, step.text_tokens, step.visual_tokens, step.pruned, words


def trace(model, x, lookahead=1, context=None):
    """What the loop decides for x: p([SKIP]) of each frame, and its `row_of`."""
    steps = list(narrate(model, x, context=context, lookahead=lookahead))
    return [step.p_skip or 0.0 for step in steps], [row_of(step) for step in steps]


def lively(llm=None, seed=0, **changes):
    """A tiny narrator whose thresholds let it narrate every few frames, and narrations that end."""
    model = tiny(seed, llm=llm, **{"max_new_tokens": 6} | changes)
    x, _ = video(model, frames=30, seed=seed)
    p_skips, _ = trace(model, x)
    p_skips.sort()

    def threshold(i):
        """Between two p([SKIP]), so that rounding decides nothing."""
        return (p_skips[i - 1] + p_skips[i]) / 2

    model.config.theta = threshold(len(p_skips) // 3)
    model.config.theta_low = threshold(len(p_skips) // 5)
    return model, x


def assert_same(one, other, tolerance=1e-5):
    """Two results of `trace` are equal, p([SKIP]) up to a tolerance."""
    p_skips, rows = one
    other_p_skips, other_rows = other
    assert rows == other_rows
    assert max(abs(a - b) for a, b in zip(p_skips, other_p_skips)) < tolerance


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_fast_is_plain(name):
    """Grouped queries, biases (Qwen2), norms of queries and keys (Qwen3); LoRA merged."""
    model, x = lively(small(name), last_k=2)
    plain = trace(model, x)
    assert isinstance(model.decoder, passes.Plain)
    assert sum(bool(words) for *_, words in plain[1]) >= 5
    model.merge()
    assert model.slow_because is None
    assert isinstance(model.decoder, passes.Decoder)
    assert_same(plain, trace(model, x))


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize("name, changes, why", [
    ("Gemma", {}, "is not built like Llama"),
    ("Olmo2", {}, "norm"),
    ("Granite", {"residual_multiplier": 0.5}, "something that Llama does not"),
    ("Llama", {"rope_parameters": DYNAMIC}, "dynamic"),
])
def test_other_models_take_the_plain_path_and_say_so(name, changes, why):
    model, x = lively(small(name, **changes))
    plain = trace(model, x)
    model.merge()
    assert why in model.slow_because
    assert isinstance(model.decoder, passes.Plain)
    assert_same(plain, trace(model, x))


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
        "original_max_position_embeddings": 128}
# families, the setting by which each differs from Llama, and their configuration
ALMOST_LLAMA = {
    "Ministral3": ("llama_4_scaling_beta", {
        "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1},
    }),
    "SmolLM3": ("use_rope", {
        "num_hidden_layers": 4, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1,
    }),
    "Granite": ("residual_multiplier", {
        "num_hidden_layers": 4, "residual_multiplier": 0.97,
    }),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ALMOST_LLAMA)
def test_what_is_almost_llama_takes_the_plain_path(family, dtype, monkeypatch):
    """Known by name, and by the numbers alone: the queries of Ministral 3 differ from position 128
    on, every fourth layer of SmolLM3 does not rotate, and bf16's rounding is larger than what
    Granite's layers multiply by."""
    strange, changes = ALMOST_LLAMA[family]
    llm = small(family, **changes)
    for p in llm.parameters():
        p.data = p.data.to(dtype)
    model = tiny(llm=llm)
    monkeypatch.setattr(linear, "ONEDNN_BF16", False)           # so that it can be asked again
    model.merge()
    assert strange in model.slow_because
    assert isinstance(model.decoder, passes.Plain)
    monkeypatch.setattr(passes, "LLAMA", {})
    assert passes.fastest(model)[1] == "computes something that Llama does not"


def test_the_fast_path_is_found_whatever_the_dtype(monkeypatch):
    """Llama with rotations of several kinds, in bf16: the proof is in fp32, of one layer at a time,
    whose weights are afterwards what they were. It takes no random numbers from the caller."""
    for rope in ({"rope_type": "default", "rope_theta": 1e4}, YARN):
        llm = small("Llama", rope_parameters=rope)
        for p in llm.parameters():
            p.data = p.data.to(torch.bfloat16)
        model = tiny(llm=llm)
        in_fp32 = []                            # layers in fp32, whenever a layer computes

        def count(module, args):
            dtypes = [layer.mlp.up_proj.weight.dtype for layer in llm.model.layers]
            in_fp32.append(dtypes.count(torch.float32))

        for layer in llm.model.layers:
            layer.mlp.register_forward_pre_hook(count)
        before = torch.get_rng_state()
        monkeypatch.setattr(linear, "ONEDNN_BF16", False)       # else its weights were packed then
        model.merge()
        assert model.slow_because is None
        assert torch.equal(torch.get_rng_state(), before)
        assert in_fp32 == [1] * len(llm.model.layers)
        assert {p.dtype for p in llm.parameters()} == {torch.bfloat16}
        for layer, fused in zip(llm.model.layers, model.decoder.layers):
            assert torch.equal(layer.self_attn.q_proj.weight, fused.qkv[0][:64])
            assert layer.self_attn.q_proj.weight.data_ptr() == fused.qkv[0].data_ptr()


def test_merging_leaves_the_embeddings():
    """The toy's head shares the embeddings' weight, but its LoRA belongs to the head alone."""
    model = tiny()
    ids = torch.arange(2, 40)[None]
    embeddings = model.llm.get_input_embeddings().weight.clone()
    with torch.no_grad():
        logits = model.llm(input_ids=ids).logits
        model.merge()
        assert torch.allclose(model.llm(input_ids=ids).logits, logits, atol=1e-4)
    assert torch.equal(model.llm.get_input_embeddings().weight, embeddings)
    assert not any("lora" in name for name, _ in model.named_parameters())


def test_merged_weights_are_held_once():
    model = tiny().merge()

    def storage(weight):
        return weight.untyped_storage().data_ptr()

    for layer, fused in zip(model.llm.model.layers, model.decoder.layers):
        qkv, _ = fused.qkv
        up, _ = fused.up
        assert storage(layer.self_attn.q_proj.weight) == storage(qkv)
        assert storage(layer.self_attn.v_proj.weight) == storage(qkv)
        assert storage(layer.mlp.up_proj.weight) == storage(up)


@pytest.mark.skipif(not ONEDNN_BF16, reason="this processor has no products of bf16")
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Gemma"])
def test_packed_weights(name, monkeypatch):
    """Of bf16 models, also with biases (Qwen2) and on the plain path (Gemma): the same decisions,
    up to bf16's rounding. Both paths share each weight."""
    traces = []
    for packed in (False, True):
        llm = small(name)
        for p in llm.parameters():
            p.data = p.data.to(torch.bfloat16)
        model, x = lively(llm, last_k=2)
        monkeypatch.setattr(linear, "ONEDNN_BF16", packed)
        model.merge()
        traces.append(trace(model, x)[0])
        kinds = {type(module) for module in model.llm.model.layers.modules()}
        assert (PackedLinear in kinds) == packed
        assert (Linear in kinds) != packed
    length = min(map(len, traces))
    assert length > 5
    assert max(abs(a - b) for a, b in zip(*traces)) < 0.02
    if isinstance(model.decoder, passes.Decoder):
        for layer, fused in zip(model.llm.model.layers, model.decoder.layers):
            assert layer.mlp.up_proj.weight.pieces[0] is fused.up[0].pieces[1]
        model.decoder.change_weights(linear.unpack_weights)     # as for torch.compile
        assert PackedLinear not in map(type, model.llm.modules())
        assert isinstance(model.decoder.layers[0].up[0], torch.Tensor)
        unpacked = trace(model, x)[0]
        assert max(abs(a - b) for a, b in zip(unpacked, traces[1])) < 0.02


@pytest.mark.skipif(not ONEDNN_BF16, reason="this processor has no products of bf16")
def test_a_shared_table_of_words_is_not_packed():
    llm = grouped(torch.bfloat16)
    llm.lm_head.weight = llm.get_input_embeddings().weight
    model = tiny(llm=llm)
    model.llm.lm_head.lora_B.weight.data.zero_()        # else the head gets a weight of its own
    table = model.llm.get_input_embeddings().weight
    model.merge()
    assert model.llm.lm_head.weight is table
    assert torch.equal(model.llm.get_input_embeddings()(torch.tensor([3])), table[3:4])


@pytest.mark.parametrize("changes", [
    {"last_k": 2}, ONLINE, {"readout": "cls"}, {"last_k": 0, "narration_memory": 4},
    {"grid": 0},
])
def test_lookahead_changes_nothing(changes):
    """Narrations, ids, positions, counts of the cache: all the same; p([SKIP]) to 1e-5. Nothing is
    left behind, on the plain path and on the fast one."""
    model, x = lively(**changes)
    for decoder, lookaheads in ((passes.Plain, [5]), (passes.Decoder, [2, 5])):
        once = trace(model, x)
        for lookahead in lookaheads:
            context = open_stream(model)
            assert_same(once, trace(model, x, lookahead, context))
            cache = context.cache
            assert cache.used.sum() == cache.text + cache.visual
            assert (cache.positions != slots.EMPTY).sum() == cache.used.sum()
        assert isinstance(model.decoder, decoder)
        model.merge()


def test_lookahead_makes_fewer_passes_of_few_shapes():
    """Segments of nine frames: where they end is chosen by the test, not by rounding."""
    model, x = lively(last_k=2)
    ends = dict.fromkeys([0, 9, 18, 27])        # there the model narrates
    model.merge()
    lengths = {}                                # of all passes, in tokens
    for lookahead in (1, 4):
        lengths[lookahead] = []

        def run(given):
            lengths[lookahead].append(given.plan.shape[1])
            return model.decoder([given])[0]

        context = open_stream(model, lookahead=lookahead, run=run)
        for _ in stream.narrate(model, x, forced=ends, context=context):
            pass
    assert len(lengths[4]) < 0.75 * len(lengths[1])
    # first, its closing, opening, frame, closing, word; guesses after text
    assert len(set(lengths[1])) <= 6 + 4 * 3


def test_frames_are_taken_ahead_only_as_asked():
    model = tiny()
    x, _ = video(model)
    taken = []

    def source():
        for t, frame in enumerate(x):
            taken.append(t)
            yield frame

    for step in narrate(model, source(), forced={0: [5], 4: [6]}, lookahead=4):
        assert step.frame <= taken[-1] <= step.frame + 3


@pytest.mark.parametrize("ids, count, expected", [
    ([9, 1, 2, 3, 4, 9, 1], 3, [2, 3, 4]),                  # what followed the last two ids
    ([9, 1, 2, 3, 9, 7, 2], 3, [3]),                        # the last id; up to the end
    ([9, 1, 9, 2, 9], 2, [2]),                              # the latest place counts
    ([9, 1, 2], 3, []),
    ([9, 1, 9], 0, []),
])
def test_guess(ids, count, expected):
    assert fast.guess(ids, count=count, end=9) == expected


@pytest.mark.parametrize("layers, changes, sizes", [
    (1, {"last_k": 2}, (1, 11)),                            # a word, a frame
    (2, MOD, (11,)),
], ids=["FlowNar-C", "VideoLLM-MoD"])
def test_the_pass_is_one_graph(layers, changes, sizes):
    """Nothing in it depends on data or waits for the host: it compiles whole, with the same result.
    """
    model, x = lively(small("Llama", num_hidden_layers=layers), **changes)
    model.merge()
    first_of_size = {}

    def run(given):
        first_of_size.setdefault(given.plan.shape[1], given)
        return model.decoder([given])[0]

    trace(model, x[:12], context=open_stream(model, run=run))
    compiled = torch.compile(model.decoder.forward, fullgraph=True, backend="eager", dynamic=False)
    for size in sizes:
        given = first_of_size[size]
        expected = model.decoder.forward([given])
        assert torch.allclose(compiled([given]), expected, atol=1e-5)


@pytest.mark.parametrize("lookahead", [1, 4])
def test_passes_that_were_tried_leave_nothing(lookahead):
    model, x = lively(last_k=2)
    model.merge()
    context = open_stream(model, lookahead=lookahead)
    try_passes(context)
    assert not context.cache.used.any() and context.position == 0
    assert_same(trace(model, x, lookahead), trace(model, x, lookahead, context))


# ------------------------------------------------------------------ several streams

def together(model, sources, width, lookahead=1):
    """Traces of several streams that share their passes; an error where one failed."""
    def job(x, ask):
        context = open_stream(model, run=lambda given: ask(model.decoder, given))
        yield from narrate(model, x, context=context, lookahead=lookahead)

    results = [([], []) for _ in sources]
    for number, step in side_by_side([partial(job, x) for x in sources], width):
        if isinstance(step, Failed):
            results[number] = step.error
        else:
            p_skips, rows = results[number]
            p_skips.append(step.p_skip or 0.0)
            rows.append(row_of(step))
    return results


@pytest.mark.parametrize("shares_keys, lookahead, changes", [
    (False, 1, {"last_k": 2}),
    (True, 4, {"last_k": 0, "narration_memory": 4}),
    (False, 4, {"grid": 0}),
])
def test_streams_do_not_depend_on_each_other(shares_keys, lookahead, changes):
    """Videos of different lengths, three at a time, so that streams join and end beside others."""
    model, _ = lively(grouped() if shares_keys else None, **changes)
    model.merge()
    sources = [video(model, frames=frames, seed=frames)[0] for frames in (13, 24, 17, 1, 20)]
    results = together(model, sources, 3, lookahead)
    for x, result in zip(sources, results):
        assert_same(trace(model, x), result, 1e-4)


@pytest.mark.parametrize("shares_keys, lookahead, changes", [
    (False, 1, {"last_k": 2}),
    (True, 4, {"last_k": 0, "narration_memory": 4}),
    (False, 4, {}),
])
def test_streams_in_rows_of_one_buffer(shares_keys, lookahead, changes):
    """As on a GPU, without graphs. Streams join and end, and their buffers grow (the last case)."""
    model, _ = lively(grouped() if shares_keys else None, **changes)
    model.merge()
    shared = SharedRows(model.decoder, capture=False)
    model.decoder.shared = shared
    sources = [video(model, frames=frames, seed=frames)[0] for frames in (13, 24, 17, 1, 40)]
    results = together(model, sources, 3, lookahead)
    for x, result in zip(sources, results):
        assert_same(trace(model, x), result, 1e-4)
    assert len(shared.streams) in (2, 4) and len(shared.inputs) > 1


def test_one_stream_fails_and_the_others_go_on():
    model, x = lively()
    model.merge()
    broken = (x[t] if t < 7 else torch.zeros(3) for t in range(9))
    first, failed, last = together(model, [x[:20], broken, x[:15]], 3)
    assert isinstance(failed, ValueError)
    assert "expected frame tokens" in str(failed)
    assert_same(trace(model, x[:20]), first, 1e-4)
    assert_same(trace(model, x[:15]), last, 1e-4)


def test_a_request_that_fails_fails_alone():
    def double(requests):
        return [2 * int(request) for request in requests]

    def job(request, ask):
        yield ask(double, request)

    answers = dict(side_by_side([partial(job, request) for request in ("1", "x", "3")], 3))
    assert answers[0] == 2
    assert answers[2] == 6
    assert isinstance(answers[1].error, ValueError)


def test_an_interruption_in_a_joint_pass_ends_all_streams():
    """Ctrl-C while one function has answered and the next is running: it comes through, and no
    thread is left."""
    ended = []

    def stop(requests):
        raise KeyboardInterrupt

    def job(function, ask):
        try:
            yield ask(function, 1)
        finally:
            ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        list(side_by_side([partial(job, function) for function in (list, stop)], 2))
    assert len(ended) == 2


def test_whoever_stops_listening_stops_the_streams():
    ended = []

    def job(ask):
        try:
            while True:
                yield ask(list, 1)
        finally:
            ended.append(True)

    items = side_by_side([job] * 3, 3)
    next(items)
    items.close()
    assert len(ended) == 3


# ------------------------------------------------------------------ memory

@pytest.mark.parametrize("changes", [{}, ONLINE], ids=["FlowNar", "VideoLLM-online"])
def test_buffers_never_hold_much_more_than_is_used(changes, monkeypatch):
    """From 3,000 to 12,000 text tokens: at most 1.5 times the bytes used, also in the midst of
    growing, when a buffer and its successor are both there. Counted in all live buffers of a stream
    whose language model does nothing."""
    model = tiny(**changes)
    layout = model.layout
    layers = model.llm.config.num_hidden_layers
    shares = []                                         # bytes held / bytes used
    pad = torch.nn.functional.pad

    def run(given):
        given.slots.allocate(layers, torch.empty(2, 8))
        return torch.zeros(1, len(layout.tokenizer))

    context = open_stream(model, run=run)
    cache = context.cache

    def check(*newer):
        live = [cache.positions, *cache.keys, *cache.values, *newer]
        if cache.text > 3000:
            held = sum(tensor.untyped_storage().nbytes() for tensor in live)
            shares.append(held / cache.bytes())

    def padded(old, *args, **options):
        new = pad(old, *args, **options)
        check(new)
        return new

    monkeypatch.setattr(slots.F, "pad", padded)
    context.feed(layout.first())
    context.read_memory()
    for n in range(1, 101):
        frames = [layout.frame(n)] * 7
        narration = layout.narration(n, [5] * 120)
        for tokens in (layout.opening(n), *frames, layout.closing(n), narration):
            context.feed(tokens)
            check()
        context.discard(n + 1)
        check()
    assert cache.text > 12000
    assert len(shares) > 800
    assert 1.25 < max(shares) <= 1.5
