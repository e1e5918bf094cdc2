"""The fast path of streaming: the same function as transformers' modules, alone or beside other streams."""
import pytest
import torch
import transformers
from torch import nn

from helpers import grouped, narrate, tiny, video
from streams import fast
from streams.fast import open_stream
from streams.together import Failed, side_by_side
from support.engine import passes, slots

SMALL = {"vocab_size": 640, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "attn_implementation": "sdpa"}


ONLINE = {"memory": "none", "prune": False}
MOD = ONLINE | {"mod_keep": 0.2}


def small(name: str, **changes) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL | changes)
    llm = getattr(transformers, f"{name}ForCausalLM")(config)
    for p in llm.parameters():
        if p.dim() == 1:                                                    # norms and biases that could be left out
            nn.init.normal_(p, 1.0, 0.3)
    return llm


def trace(model, x, lookahead=1, context=None):
    """What the loop decides for x: where, with which probability, which tokens, and what is in the cache."""
    steps = list(narrate(model, x, context=context, lookahead=lookahead))
    return ([s.p_skip or 0.0 for s in steps],
            [(s.frame, s.position, s.text_tokens, s.visual_tokens, s.pruned, s.narration and s.narration.tokens)
             for s in steps])


def lively(llm=None, seed=0, **changes):
    """A tiny narrator whose thresholds let it narrate every few frames, and narrations that end."""
    model = tiny(seed, llm=llm, **{"max_new_tokens": 6} | changes)
    x, _ = video(model, frames=40, seed=seed)
    p = sorted(trace(model, x)[0])
    between = lambda i: (p[i - 1] + p[i]) / 2                                  # no p([SKIP]) is as high as a threshold
    model.config.theta, model.config.theta_low = between(len(p) // 3), between(len(p) // 5)
    return model, x


def assert_same(one, other, tolerance=1e-5):
    assert one[1] == other[1]
    assert max(abs(a - b) for a, b in zip(one[0], other[0])) < tolerance


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_fast_is_plain(name):
    """Grouped queries, biases (Qwen2), norms of queries and keys (Qwen3); LoRA merged."""
    model, x = lively(small(name), last_k=2)
    plain = trace(model, x)
    assert isinstance(model.decoder, passes.Plain) and sum(bool(row[-1]) for row in plain[1]) > 5
    model.merge()
    assert model.slow_because is None and isinstance(model.decoder, passes.Decoder)
    assert_same(plain, trace(model, x))


@pytest.mark.parametrize("llm, why", [
    (lambda: small("Gemma"), "is not built like Llama"), (lambda: small("Olmo2"), "norm"),
    (lambda: small("Granite", residual_multiplier=0.5), "something that Llama does not"),
    (lambda: small("Llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "dynamic")])
def test_other_models_take_the_plain_path_and_say_so(llm, why):
    model, x = lively(llm())
    plain = trace(model, x)
    assert why in model.merge().slow_because and isinstance(model.decoder, passes.Plain)
    assert_same(plain, trace(model, x))


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
        "original_max_position_embeddings": 128}
ALMOST_LLAMA = {     # with what each is not
    "Ministral3": ("llama_4_scaling_beta",
                   {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}}),
    "SmolLM3": ("use_rope", {"num_hidden_layers": 4, "pad_token_id": 0, "bos_token_id": 0,
                             "eos_token_id": 1}),
    "Granite": ("residual_multiplier", {"num_hidden_layers": 4, "residual_multiplier": 0.97})}


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
    assert strange in model.merge().slow_because and isinstance(model.decoder, passes.Plain)
    monkeypatch.setattr(passes, "LLAMA", {})
    assert passes.fastest(model)[1] == "computes something that Llama does not"


def test_the_fast_path_is_found_whatever_the_dtype():
    """Llama with rotations of several kinds, in bf16: the proof is in fp32, of one layer at a time,
    whose weights are afterwards what they were. It takes no random numbers from the caller."""
    for rope in ({"rope_type": "default", "rope_theta": 1e4}, YARN):
        llm = small("Llama", rope_parameters=rope)
        for p in llm.parameters():
            p.data = p.data.to(torch.bfloat16)
        model = tiny(llm=llm)
        in_fp32, handles = [], []

        def count(module, args):
            dtypes = [layer.mlp.up_proj.weight.dtype for layer in llm.model.layers]
            in_fp32.append(dtypes.count(torch.float32))

        for layer in llm.model.layers:
            handles.append(layer.mlp.register_forward_pre_hook(count))
        before = torch.get_rng_state()
        model.merge()
        assert model.slow_because is None and torch.equal(torch.get_rng_state(), before)
        assert in_fp32 == [1] * len(llm.model.layers)
        assert {p.dtype for p in llm.parameters()} == {torch.bfloat16}
        for layer, fused in zip(llm.model.layers, model.decoder.layers):
            assert torch.equal(layer.self_attn.q_proj.weight, fused.qkv[0][:64])
            assert layer.self_attn.q_proj.weight.data_ptr() == fused.qkv[0].data_ptr()


def test_merging_leaves_the_embeddings():
    """The toy's head shares the embeddings' weight, but its LoRA belongs to the head alone."""
    model = tiny()
    ids, table = torch.arange(2, 40), model.llm.get_input_embeddings().weight
    before = table.clone()
    with torch.no_grad():
        whole = model.llm(input_ids=ids[None]).logits
        model.merge()
        assert torch.allclose(model.llm(input_ids=ids[None]).logits, whole, atol=1e-4)
    assert torch.equal(model.llm.get_input_embeddings().weight, before)
    assert not any("lora" in name for name, _ in model.named_parameters())


def test_merged_weights_are_held_once():
    model = tiny().merge()
    fused = {y.untyped_storage().data_ptr() for layer in model.decoder.layers for y, _ in (layer.qkv, layer.up)}
    for layer in model.llm.model.layers:
        for module in (layer.self_attn.q_proj, layer.self_attn.v_proj, layer.mlp.up_proj):
            assert module.weight.untyped_storage().data_ptr() in fused


@pytest.mark.parametrize("changes", [{}, {"last_k": 2}, ONLINE, {"readout": "cls"},
                                     {"last_k": 0, "narration_memory": 4}, {"grid": 0}])
def test_lookahead_changes_nothing(changes):
    """Narrations, ids, positions, counts of the cache: all the same; p([SKIP]) to 1e-5. Nothing is left behind, on the
    plain path and on the fast one."""
    model, x = lively(**changes)
    for decoder in (passes.Plain, passes.Decoder):
        once = trace(model, x)
        for lookahead in (2, 5):
            context = open_stream(model)
            assert_same(once, trace(model, x, lookahead, context))
            assert context.cache.used.sum() == context.cache.text + context.cache.visual
            assert (context.cache.positions != slots.EMPTY).sum() == context.cache.used.sum()
        assert isinstance(model.decoder, decoder)
        model.merge()


def test_lookahead_makes_fewer_passes_of_few_shapes():
    model, x = lively(last_k=2)
    model.merge()
    passes, shapes = {}, {}
    for lookahead in (1, 4):
        made = []
        context = open_stream(model, run=lambda part: made.append(part.plan.shape[1]) or model.decoder([part])[0])
        trace(model, x, lookahead, context)
        passes[lookahead], shapes[lookahead] = len(made), set(made)
    assert passes[4] < 0.75 * passes[1]
    assert len(shapes[1]) <= 6 + 4 * 3          # first, its closing, opening, frame, closing, word; guesses after text


def test_frames_are_taken_ahead_only_as_asked():
    model, taken = tiny(), []
    x, _ = video(model)
    source = (taken.append(t) or frame for t, frame in enumerate(x))
    for step in narrate(model, source, forced={0: [5], 4: [6]}, lookahead=4):
        assert step.frame <= taken[-1] <= step.frame + 3


def test_guess():
    assert fast.guess([9, 1, 2, 3, 4, 9, 1], count=3, end=9) == [2, 3, 4]          # the same two ids
    assert fast.guess([9, 1, 2, 3, 9, 7, 2], count=3, end=9) == [3]                # the last one; up to the end
    assert fast.guess([9, 1, 9, 2, 9], count=2, end=9) == [2]                      # the latest place counts
    assert fast.guess([9, 1, 2], count=3, end=9) == [] == fast.guess([9, 1, 9], count=0, end=9)


@pytest.mark.parametrize("layers, changes, sizes", [(1, {"last_k": 2}, (1, 11)), (2, MOD, (11,))],
                         ids=["FlowNar-C", "VideoLLM-MoD"])
def test_the_pass_is_one_graph(layers, changes, sizes):
    """Nothing in it depends on data or waits for the host: it compiles whole, and gives the same."""
    model, x = lively(small("Llama", num_hidden_layers=layers), **changes)
    model.merge()
    parts, again = {}, []
    keep = lambda part: parts.setdefault(part.plan.shape[1], part) and model.decoder([part])[0]
    trace(model, x[:12], context=open_stream(model, run=keep))
    compiled = torch.compile(model.decoder.forward, fullgraph=True, backend="eager", dynamic=True)
    for size in sizes:                                                                  # a word, a frame
        part = parts[size]
        for run in (model.decoder.forward, compiled):
            again.append(run([part]))
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(again[::2], again[1::2]))


# ------------------------------------------------------------------ several streams

def together(model, sources, width, lookahead=1):
    """Traces of several streams that share their passes; an error where one failed."""
    def job(x, ask):
        yield from narrate(model, x, context=open_stream(model, run=lambda part: ask(model.decoder, part)),
                           lookahead=lookahead)

    found = [([], []) for _ in sources]
    for number, s in side_by_side([lambda ask, x=x: job(x, ask) for x in sources], width):
        if isinstance(s, Failed):
            found[number] = s.error
        else:
            found[number][0].append(s.p_skip or 0.0)
            found[number][1].append((s.frame, s.position, s.text_tokens, s.visual_tokens, s.pruned,
                                     s.narration and s.narration.tokens))
    return found


@pytest.mark.parametrize("llm, lookahead, changes", [
    (None, 1, {"last_k": 2}), (None, 4, {"last_k": 2}), (grouped, 1, {"last_k": 2}),
    (grouped, 4, {"last_k": 0, "narration_memory": 4}), (None, 4, {"grid": 0})])
def test_streams_do_not_depend_on_each_other(llm, lookahead, changes):
    """Videos of different lengths, three at a time, so that streams join and end beside others."""
    model, _ = lively(llm and llm(), **changes)
    model.merge()
    sources = [video(model, frames=frames, seed=frames)[0] for frames in (13, 40, 25, 1, 31, 20)]
    for alone, beside in zip([trace(model, x) for x in sources], together(model, sources, 3, lookahead)):
        assert_same(alone, beside, 1e-4)


def test_one_stream_fails_and_the_others_go_on():
    model, x = lively()
    model.merge()
    broken = (x[t] if t < 7 else torch.zeros(3) for t in range(9))
    first, failed, last = together(model, [x[:20], broken, x[:15]], 3)
    assert isinstance(failed, ValueError) and "expected frame tokens" in str(failed)
    assert_same(trace(model, x[:20]), first, 1e-4)
    assert_same(trace(model, x[:15]), last, 1e-4)


def test_a_request_that_fails_fails_alone():
    def double(requests):
        return [2 * int(request) for request in requests]

    def job(request, ask):
        yield ask(double, request)

    found = dict(side_by_side([lambda ask, r=r: job(r, ask) for r in ("1", "x", "3")], 3))
    assert (found[0], found[2]) == (2, 6) and isinstance(found[1].error, ValueError)


def test_an_interruption_in_a_joint_pass_ends_all_streams():
    """Ctrl-C while one function has answered and the next is running: it comes through, and no thread is left."""
    ended = []

    def stop(requests):
        raise KeyboardInterrupt

    def job(function, ask):
        try:
            yield ask(function, 1)
        finally:
            ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        list(side_by_side([lambda ask, f=f: job(f, ask) for f in (list, stop)], 2))
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
    """From 3,000 to 12,000 text tokens: at most 1.5 times the bytes used, also in the midst of growing, when a buffer
    and its successor are both there. Counted in all live buffers of a stream whose language model does nothing."""
    model, shares, pad = tiny(**changes), [], torch.nn.functional.pad
    layers, vocabulary, layout = model.llm.config.num_hidden_layers, len(model.layout.tokenizer), model.layout

    def run(part):
        part.slots.allocate(layers, torch.empty(2, 8))
        return torch.zeros(1, vocabulary)

    context = open_stream(model, run=run)
    cache = context.cache

    def check(*newer):
        live = [cache.positions, *cache.keys, *cache.values, *newer]
        if cache.text > 3000:
            shares.append(sum(y.untyped_storage().nbytes() for y in live) / cache.bytes())

    def padded(old, *args, **options):
        new = pad(old, *args, **options)
        check(new)
        return new

    monkeypatch.setattr(slots.F, "pad", padded)
    context.feed(layout.first())
    context.read_memory()
    for n in range(1, 101):
        for piece in (layout.opening(n), *[layout.frame(n)] * 7, layout.closing(n), layout.narration(n, [5] * 120)):
            context.feed(piece)
            check()
        context.discard(n + 1)
        check()
    assert cache.text > 12000 and len(shares) > 800 and 1.25 < max(shares) <= 1.5
