"""VideoLLM-MoD: routers beside a dense oracle, training = streaming, cache, what routers learn."""
from types import MethodType

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import narrator as nar
import train
from baselines.mod import MoDLayer, RoutedSlots
from baselines.variants import load_narrator, make_config
from commands import train as train_command
from experiments import efficiency, timing
from helpers import TOY, grouped, tiny, video
from streams.bounds import open_stream
from support.common.errors import BadData
from support.engine import passes, slots
from test_evaluate import assert_segments_go_on
from test_passes import MOD, ONLINE, assert_same, lively, small, together, trace
from test_equalities import assert_same as assert_training_is_streaming, both_ways, streamed_logits
from test_train import epic


def routers(model: nar.Narrator) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.trainable().items() if "router" in name}


def decided(llm=None, seed=0, **changes) -> nar.Narrator:
    """A narrator whose routers have a will: scores of size 1 instead of 0.02."""
    model = tiny(seed, llm=llm, **MOD | changes)
    for p in routers(model).values():
        nn.init.normal_(p, std=0.1)
    return model


def logits(model, x, narrations):
    with torch.no_grad():
        return model.logits(model(x, narrations)[0])


# ------------------------------------------------------------------ the function

def test_without_a_choice_it_is_the_plain_model():
    """All are kept and w = 0, so g = 1: VideoLLM-online's logits, to the last bit."""
    plain = tiny(**ONLINE)
    routed = tiny(1, **ONLINE, mod_keep=1)
    with torch.no_grad():
        for name, p in routed.trainable().items():
            p.copy_(plain.trainable()[name] if "router" not in name else 0)
    x, narrations = video(plain)
    assert torch.equal(logits(plain, x, narrations), logits(routed, x, narrations))
    for p in routers(routed).values():
        nn.init.normal_(p, std=0.1)
    assert (logits(plain, x, narrations) - logits(routed, x, narrations)).abs().max() > 0.1


def dense(model: nar.Narrator, ids: list[int]):
    """The oracle of MoDLayer.forward: token by token, and with nothing left out."""
    J = model.config.J
    k = max(1, round(model.config.mod_keep * J))
    is_frame = [i == nar.FRAME for i in ids]
    frame_starts = [i for i in range(len(ids)) if is_frame[i] and not is_frame[i - 1]]

    def forward(self, h, attention_mask, **options):
        scores = [self.router.weight[0] @ row / row.square().mean().sqrt() for row in h[0]]
        keep = torch.tensor([not frame for frame in is_frame])
        for start in frame_starts:
            best_first = sorted(range(start, start + J), key=lambda i: -scores[i])
            keep[best_first[:k]] = True
        mask = torch.ones(len(ids), len(ids)).tril().bool() & keep
        after = self.inner(h, attention_mask=mask[None, None], **options)
        g = torch.ones(len(ids), 1)
        for i, score in enumerate(scores):
            if is_frame[i]:
                g[i] = 2 * score.sigmoid()
        return torch.where(keep[:, None], h + g * (after - h), h)

    return forward


@pytest.mark.parametrize("changes", [
    {}, {"mod_layers": "all", "mod_keep": 0.3}, {"mod_layers": "deep"}, {"mod_keep": 0.01},
    {"grid": 1, "mod_keep": 0.5},
], ids=str)
@torch.no_grad()
def test_layers_are_those_of_the_oracle(changes):
    model = decided(**changes)
    x, narrations = video(model)
    layers = [i for i, layer in enumerate(model.llm.model.layers) if isinstance(layer, MoDLayer)]
    assert layers == {"all": [1, 2, 3], "deep": [2, 3]}.get(changes.get("mod_layers"), [1, 3])
    hidden, _, tokens = model(x, narrations)
    forward = dense(model, tokens.ids)
    for i in layers:
        layer = model.llm.model.layers[i]
        layer.forward = MethodType(forward, layer)
    expected, _, _ = model(x, narrations)
    assert (hidden - expected).abs().max() < 1e-4


def test_a_later_frame_changes_nothing_before_it():
    model = decided()
    x, narrations = video(model)
    before = logits(model, x, narrations)
    x[9] = torch.randn(x[9].shape)
    after = logits(model, x, narrations)
    tokens = model.layout.sequence(narrations)
    frame_tokens = [i for i, token in enumerate(tokens.ids) if token == nar.FRAME]
    first = frame_tokens[9 * model.config.J]
    assert (before[:first] - after[:first]).abs().max() < 1e-5
    assert (before - after).abs().max() > 1e-2


# ------------------------------------------------------------------ training = streaming

@pytest.mark.parametrize("changes", [
    {}, {"seed": 1}, {"mod_layers": "all"}, {"mod_layers": "deep", "mod_keep": 0.5},
], ids=str)
def test_training_is_streaming(changes):
    model = decided(**changes)
    assert_training_is_streaming(model, *both_ways(model, seed=changes.get("seed", 0)))


@pytest.mark.parametrize("llm", [grouped, lambda: small("Qwen3")], ids=["Llama", "Qwen3"])
def test_training_is_streaming_with_grouped_queries(llm):
    model = decided(llm())
    assert_training_is_streaming(model, *both_ways(model))


def willing(**changes):
    """A narrator with routers like these that narrates every few frames, and its frames."""
    model, x = lively(**MOD | changes)
    for p in routers(model).values():
        nn.init.normal_(p, std=0.1)
    return model, x


@pytest.mark.parametrize("family, changes", [
    (None, {}),
    (None, {"mod_layers": "all", "mod_keep": 0.3}),
    ("Qwen3", {}),
], ids=["interleaved", "all", "Qwen3"])
def test_lookahead_and_merging_change_nothing(family, changes):
    """Frames read ahead and words guessed are taken back in both kinds of layers, on the plain path
    and on the fast one."""
    model, x = willing(llm=small(family) if family else None, **changes)
    once = trace(model, x)
    skipped = model.config.J - model.routing.k
    assert sum(bool(words) for *_, words in once[1]) > 5
    for fast, lookaheads in ((False, [4]), (True, [1, 4])):
        for lookahead in lookaheads:
            context = open_stream(model)
            assert_same(once, trace(model, x, lookahead, context))
            assert fewer_tokens(context) == context.position - len(x) * skipped
        model.merge()
        assert model.slow_because is None
        assert isinstance(model.decoder, passes.Decoder)


def test_streams_do_not_depend_on_each_other():
    """In joint passes of any lengths, also if one failed after it wrote keys: its inputs are run
    alone."""
    model, _ = willing()
    decoder = model.merge().decoder
    sources = [video(model, frames=frames, seed=frames)[0] for frames in (13, 40, 25, 1)]
    expected = [trace(model, x, 4) for x in sources]
    forward = decoder.forward
    widths = []                                     # of all passes, in streams

    def failing(inputs):
        logits = forward(inputs)
        widths.append(len(inputs))
        if len(widths) % 5 == 0:
            raise ValueError
        return logits

    decoder.forward = failing
    for alone, beside in zip(expected, together(model, sources, 3, 4)):
        assert_same(alone, beside)
    assert max(widths) == 3
    assert len(widths) > 15


def test_captured_passes_end_where_a_buffer_grows():
    whole = slots.Slots()
    for stored in (whole, RoutedSlots(whole)):
        whole.graphs["a pass"] = "captured over both"
        stored.grow(1)
        assert not whole.graphs


def fewer_tokens(context) -> int:
    """How many tokens the layers with routers hold; slots in use and positions agree."""
    routed = context.cache.routed
    count = int(routed.used.sum())
    assert (routed.positions != slots.EMPTY).sum() == count
    assert (routed.slot_of >= 0).sum() == count
    return count


@pytest.mark.parametrize("fast", [False, True])
def test_the_cache_holds_what_is_predicted(fast):
    """Of a frame, two of ten tokens in half of the four layers: 0.6 of VideoLLM-online's keys and
    values. Text is whole."""
    routed_model = decided()
    plain_model = tiny(**ONLINE)
    if fast:
        routed_model.merge()
        plain_model.merge()
    x, narrations = video(routed_model, frames=40, at=(0, 20, 39))

    def cache_after(model):
        _, steps, context = streamed_logits(model, x, narrations)
        assert steps[-1].text_tokens + steps[-1].visual_tokens == context.position
        return context.cache, context.position

    def size(buffers):
        return sum(tensor.nbytes for tensor in buffers.keys + buffers.values)

    routed, _ = cache_after(routed_model)
    assert len(routed.keys) == len(routed.routed.keys) == 2
    assert routed.held() == size(routed) + size(routed.routed)
    plain, tokens = cache_after(plain_model)
    assert len(plain.keys) == 4
    assert plain.held() == size(plain)

    token = 2 * 128 * 4                             # key and value of one layer [bytes]
    frame = 4 * 10 * token
    assert plain.bytes() == 4 * token * tokens
    saved = plain.bytes() - routed.bytes()
    assert saved == 2 * 8 * token * len(x)
    assert saved == frame * len(x) * 4 // 10


def test_macs_count_what_is_computed():
    """What FlopCounter saves against VideoLLM-online: the skipped tokens' linear layers, and some
    attention."""
    work = timing.Work(16, every=8, words=4)
    model = tiny(**ONLINE, mod_keep=0.2).merge()
    plain = tiny(**ONLINE).merge()
    layer = sum(p.numel() for p in plain.llm.model.layers[0].parameters() if p.dim() == 2)
    saved = efficiency.macs(plain, work) - efficiency.macs(model, work)
    assert 1 < saved / (2 * layer * 8 * 16) < 1.5


@torch.no_grad()
def test_segments_go_on_under_teacher_forcing():
    """Frames that follow a segment (TimeDiff, Fluency) see the tokens that each layer has kept."""
    model = decided()
    x, narrations = video(model, frames=30, at=(0, 3, 9, 15, 16, 22))
    assert_segments_go_on(model, x, narrations)


# ------------------------------------------------------------------ training, checkpoints, refusals

def test_routers_learn_through_the_tokens_that_they_keep():
    model = decided()
    x, narrations = video(model)
    scores = []                                     # of each router [L, 1]

    def note(module, inputs, output):
        output.retain_grad()
        scores.append(output)

    for layer in model.llm.model.layers[1::2]:
        layer.router.register_forward_hook(note)
    loss, _ = model.loss(x, narrations)
    loss.backward()
    frame = torch.tensor(model.layout.sequence(narrations).ids) == nar.FRAME
    learning = []
    for output in scores:
        best = output[frame].view(16, 10).topk(2).indices
        kept = torch.zeros(len(frame)).bool()
        kept[frame] = torch.zeros(16, 10).bool().scatter(1, best, True).flatten()
        learns = output.grad[:, 0] != 0
        assert not learns[~kept].any()
        learning.append(int(learns.sum()))
    assert learning[0] == 2 * 16
    # in the last layer only the frames' last tokens learn, from p([SKIP])
    assert 0 < learning[1] < learning[0]
    assert all(p.grad.abs().sum() > 0 for p in model.trainable().values())


def test_checkpointing_gives_the_same_gradients():
    results = []
    for checkpointing in (False, True):
        model = decided().train()
        if checkpointing:
            model.llm.gradient_checkpointing_enable({"use_reentrant": False})
        loss, _ = model.loss(*video(model))
        loss.backward()
        gradients = [p.grad for p in model.trainable().values()]
        results.append([loss.detach(), *gradients])
    for plain, checkpointed in zip(*results):
        assert torch.allclose(plain, checkpointed, atol=1e-6)


def test_saved_and_loaded(tmp_path):
    """Names as if no layer were wrapped. A checkpoint without routers is refused, and so is one
    with too many."""
    model = decided(mod_layers="deep")
    model.save(tmp_path)
    names = {name: p.shape for name, p in model.trainable().items()}
    plain = {name: p.shape for name, p in tiny(**ONLINE).trainable().items()}
    routed = {f"base_model.model.model.layers.{i}.router.weight": (1, 128) for i in (2, 3)}
    assert names == plain | routed
    x, narrations = video(model)
    again = load_narrator(str(tmp_path))
    assert (again.config.mod_keep, again.config.mod_layers) == (0.2, "deep")
    assert torch.equal(logits(model, x, narrations), logits(again, x, narrations))
    with pytest.raises(BadData, match="has unexpected 2 tensors"):
        load_narrator(str(tmp_path), mod_keep=None)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    without_routers = {name: weight for name, weight in weights.items() if name in plain}
    save_file(without_routers, tmp_path / "adapter_model.safetensors")
    with pytest.raises(BadData, match="lacks 2 tensors: .*router"):
        load_narrator(str(tmp_path))


def test_a_narrator_with_routers_is_trained(tmp_path):
    epic(tmp_path / "root")
    options = train.Options(
        data="ek100", root=str(tmp_path / "root"), output=str(tmp_path / "out"),
        llm=str(TOY / "llm"), vision=str(TOY / "vision"), lora_rank=2, batch=2, epochs=1.0, lr=1e-2,
        val_limit=0, device="cpu", memory="none", no_prune=True, mod_keep=0.2,
    )
    train_command.train(options)
    model = load_narrator(str(tmp_path / "out"))
    assert model.config.mod_keep == 0.2
    assert len(routers(model)) == 2
    start = 0.02 * 128 ** -0.5
    assert all(p.std() > 2 * start for p in routers(model).values())


@pytest.mark.parametrize("changes, message", [
    ({"memory": "clam"}, "has no memory"),
    ({"prune": True}, "prunes nothing"),
    ({"mod_keep": 0}, "from 1e-06 to 1"),
    ({"mod_keep": 1.5}, "from 1e-06 to 1"),
    ({"mod_keep": "0.2"}, "cannot be"),
    ({"mod_keep": True}, "cannot be"),
    ({"mod_layers": "odd"}, "one of interleaved, all, deep"),
])
def test_settings_are_refused(changes, message):
    with pytest.raises(BadData, match=message):
        make_config(**MOD | changes)


def test_routers_are_of_one_narrator():
    """Another one around the same language model has its own, or none."""
    llm = decided().llm
    assert len(routers(tiny(llm=llm, **MOD, mod_layers="all"))) == 3
    model = tiny(llm=llm, **ONLINE)
    assert not routers(model)
    assert not any(isinstance(layer, MoDLayer) for layer in llm.model.layers)
    assert logits(model, *video(model)).isfinite().all()


def test_a_model_without_room_for_routers():
    with pytest.raises(BadData, match="one layer"):
        tiny(llm=small("Llama", num_hidden_layers=1), **MOD)
