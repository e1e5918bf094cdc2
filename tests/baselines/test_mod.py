"""VideoLLM-MoD: routers beside a dense oracle, training = streaming, what its cache holds, what its routers learn."""
from types import MethodType

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import narrator as nar
import train
from baselines.mod import MoDLayer, RoutedSlots
from baselines.variants import load_narrator
from commands import train as train_command
from experiments import efficiency, timing
from helpers import TOY, grouped, tiny, video
from streams.fast import open_stream
from support.common.errors import BadData
from support.engine import passes, slots
from test_evaluate import assert_segments_go_on
from test_passes import MOD, ONLINE, assert_same, lively, small, together, trace
from test_stream import assert_same as assert_training_is_streaming, both_ways, streamed_logits
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
    """r = 1 and w = 0, so g = 1: VideoLLM-online's logits, to the last bit, from the same checkpoint."""
    plain, routed = tiny(**ONLINE), tiny(1, **ONLINE, mod_keep=1)
    with torch.no_grad():
        for name, p in routed.trainable().items():
            p.copy_(plain.trainable()[name] if "router" not in name else 0)
    x, narrations = video(plain)
    assert torch.equal(logits(plain, x, narrations), logits(routed, x, narrations))
    for p in routers(routed).values():
        nn.init.normal_(p, std=0.1)
    assert (logits(plain, x, narrations) - logits(routed, x, narrations)).abs().max() > 0.1


def dense(model: nar.Narrator, ids: list[int]):
    """A layer with a router, token by token and with nothing left out: the oracle of MoDLayer.forward."""
    def forward(self, h, attention_mask, **more):
        scores = [self.router.weight[0] @ row / row.square().mean().sqrt() for row in h[0]]
        keep = [i != nar.FRAME for i in ids]
        for start in (i for i, token in enumerate(ids) if token == nar.FRAME and ids[i - 1] != nar.FRAME):
            best = sorted(range(start, start + model.config.J), key=lambda i: -scores[i])
            for i in best[:max(1, round(model.config.mod_keep * model.config.J))]:
                keep[i] = True
        keep = torch.tensor(keep)
        mask = (torch.ones(len(ids), len(ids)).tril().bool() & keep)[None, None]
        after = self.inner(h, attention_mask=mask, **more)
        g = torch.tensor([2 * s.sigmoid() if i == nar.FRAME else 1.0 for i, s in zip(ids, scores)])[:, None]
        return torch.where(keep[:, None], h + g * (after - h), h)

    return forward


@pytest.mark.parametrize("changes", [{}, {"mod_layers": "all", "mod_keep": 0.3}, {"mod_layers": "deep"},
                                     {"mod_keep": 0.01}, {"grid": 1, "mod_keep": 0.5}], ids=str)
@torch.no_grad()
def test_layers_are_those_of_the_oracle(changes):
    model = decided(**changes)
    x, narrations = video(model)
    layers = [i for i, layer in enumerate(model.llm.model.layers) if isinstance(layer, MoDLayer)]
    assert layers == {"all": [1, 2, 3], "deep": [2, 3]}.get(changes.get("mod_layers"), [1, 3])
    found, forward = model(x, narrations)[0], dense(model, model.layout.sequence(narrations).ids)
    for i in layers:
        model.llm.model.layers[i].forward = MethodType(forward, model.llm.model.layers[i])
    assert (found - model(x, narrations)[0]).abs().max() < 1e-4


def test_a_later_frame_changes_nothing_before_it():
    model = decided()
    x, narrations = video(model)
    one, x[9] = logits(model, x, narrations), torch.randn(x[9].shape)
    tokens, changed = model.layout.sequence(narrations), logits(model, x, narrations)
    first = [i for i, token in enumerate(tokens.ids) if token == nar.FRAME][9 * model.config.J]
    assert (one[:first] - changed[:first]).abs().max() < 1e-5 < 1e-2 < (one - changed).abs().max()


# ------------------------------------------------------------------ training = streaming

@pytest.mark.parametrize("changes", [{}, {"seed": 1}, {"mod_layers": "all"}, {"mod_layers": "deep", "mod_keep": 0.5}],
                         ids=str)
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


@pytest.mark.parametrize("changes", [{}, {"mod_layers": "all", "mod_keep": 0.3}, {"llm": lambda: small("Qwen3")}],
                         ids=["interleaved", "all", "Qwen3"])
def test_lookahead_and_merging_change_nothing(changes):
    """Frames read ahead and words guessed are taken back in both kinds of layers, on the plain path and on the fast
    one."""
    model, x = willing(**changes | ({"llm": changes["llm"]()} if "llm" in changes else {}))
    once, skipped = trace(model, x), model.config.J - model.routing.k
    assert sum(bool(row[-1]) for row in once[1]) > 5
    for fast in (False, True):
        for lookahead in (1, 4):
            context = open_stream(model)
            assert_same(once, trace(model, x, lookahead, context))
            assert fewer_tokens(context) == context.position - len(x) * skipped
        assert model.merge().slow_because is None and isinstance(model.decoder, passes.Decoder)


@pytest.mark.parametrize("lookahead", [1, 4])
def test_streams_do_not_depend_on_each_other(lookahead):
    """In joint passes of any lengths, also if one has failed after it wrote keys: then each part is run alone."""
    model, _ = willing()
    decoder = model.merge().decoder
    sources = [video(model, frames=frames, seed=frames)[0] for frames in (13, 40, 25, 1)]
    expected, forward, joint = [trace(model, x, lookahead) for x in sources], decoder.forward, []

    def failing(parts):
        logits = forward(parts)
        joint.append(len(parts))
        if len(joint) % 5 == 0:
            raise ValueError
        return logits

    decoder.forward = failing
    for alone, beside in zip(expected, together(model, sources, 3, lookahead)):
        assert_same(alone, beside)
    assert max(joint) == 3 and len(joint) > 15


def test_captured_passes_end_where_a_buffer_grows():
    whole = slots.Slots()
    for stored in (whole, RoutedSlots(whole)):
        whole.graphs["a pass"] = "captured over both"
        stored.grow(1)
        assert not whole.graphs


def fewer_tokens(context) -> int:
    """How many tokens the layers with routers hold; slots in use and positions agree."""
    fewer = context.cache.routed
    assert fewer.used.sum() == (fewer.positions != slots.EMPTY).sum() == (fewer.slot_of >= 0).sum()
    return int(fewer.used.sum())


@pytest.mark.parametrize("fast", [False, True])
def test_the_cache_holds_what_is_predicted(fast):
    """Of a frame, two of ten tokens in half of the layers: 0.6 of VideoLLM-online's keys and values. Text is whole."""
    model, plain = (one.merge() if fast else one for one in (decided(), tiny(**ONLINE)))
    x, narrations = video(model, frames=40, at=(0, 20, 39))
    size = {}
    for one in (model, plain):
        _, steps, context = streamed_logits(one, x, narrations)
        size[one] = context.cache.bytes()
        assert steps[-1].text_tokens + steps[-1].visual_tokens == context.position
        buffers = [context.cache] + ([context.cache.routed] if one is model else [])
        assert [len(y.keys) for y in buffers] == ([2, 2] if one is model else [4])
        assert context.cache.held() == sum(y.nbytes for slots in buffers for y in slots.keys + slots.values)
    token = 2 * 128 * 4                                                         # key and value of one layer, in bytes
    assert size[plain] == 4 * token * context.position
    assert size[plain] - size[model] == 2 * token * 8 * len(x) == 0.4 * 4 * token * 10 * len(x)


def test_macs_count_what_is_computed():
    """What FlopCounter saves against VideoLLM-online: the skipped tokens' linear layers, and some attention."""
    work = timing.Work(16, every=8, words=4)
    model, plain = (tiny(**ONLINE, **more).merge() for more in ({"mod_keep": 0.2}, {}))
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
    model, scores = decided(), []
    x, narrations = video(model)
    for layer in model.llm.model.layers[1::2]:
        layer.router.register_forward_hook(lambda module, given, scored: scored.retain_grad() or scores.append(scored))
    model.loss(x, narrations)[0].backward()
    frame = torch.tensor(model.layout.sequence(narrations).ids) == nar.FRAME
    learning = []
    for scored in scores:
        kept, learns = torch.zeros(len(frame)).bool(), scored.grad[:, 0] != 0
        kept[frame] = torch.zeros(16, 10).bool().scatter(1, scored[frame].view(16, 10).topk(2).indices, True).flatten()
        assert not learns[~kept].any()
        learning.append(int(learns.sum()))
    assert learning[0] == 2 * 16 > learning[1] > 0            # last layer: only frames' last tokens, for p([SKIP])
    assert all(p.grad.abs().sum() > 0 for p in model.trainable().values())


def test_checkpointing_gives_the_same_gradients():
    found = []
    for checkpointing in (False, True):
        model = decided().train()
        if checkpointing:
            model.llm.gradient_checkpointing_enable({"use_reentrant": False})
        loss = model.loss(*video(model))[0]
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.trainable().values())])
    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(*found))


def test_saved_and_loaded(tmp_path):
    """Names as if no layer were wrapped; a checkpoint without routers is refused, and so is one too many."""
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
    save_file({name: y for name, y in weights.items() if name in plain}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(BadData, match="lacks 2 tensors: .*router"):
        load_narrator(str(tmp_path))


def test_a_narrator_with_routers_is_trained(tmp_path):
    epic(tmp_path / "root")
    given = dict(data="ek100", root=str(tmp_path / "root"), output=str(tmp_path / "out"), llm=str(TOY / "llm"),
                 vision=str(TOY / "vision"), lora_rank=2, batch=2, epochs=1.0, lr=1e-2, val_limit=0, device="cpu")
    train_command.train(train.Options(**given, memory="none", no_prune=True, mod_keep=0.2))
    model = load_narrator(str(tmp_path / "out"))
    assert model.config.mod_keep == 0.2 and len(routers(model)) == 2
    assert all(p.std() > 2 * 0.02 * 128 ** -0.5 for p in routers(model).values())            # far from its start


@pytest.mark.parametrize("changes, message", [
    ({"memory": "clam"}, "has no memory"), ({"prune": True}, "prunes nothing"), ({"mod_keep": 0}, "from 1e-06 to 1"),
    ({"mod_keep": 1.5}, "from 1e-06 to 1"), ({"mod_keep": "0.2"}, "cannot be"), ({"mod_keep": True}, "cannot be"),
    ({"mod_layers": "odd"}, "one of interleaved, all, deep")])
def test_settings_are_refused(changes, message):
    with pytest.raises(BadData, match=message):
        nar.Config(**MOD | changes)


def test_routers_are_of_one_narrator():
    """Another one around the same language model has its own, or none."""
    llm = decided().llm
    assert len(routers(tiny(llm=llm, **MOD, mod_layers="all"))) == 3
    model = tiny(llm=llm, **ONLINE)
    assert not routers(model) and not any(isinstance(layer, MoDLayer) for layer in llm.model.layers)
    assert logits(model, *video(model)).isfinite().all()


def test_a_model_without_room_for_routers():
    with pytest.raises(BadData, match="one layer"):
        tiny(llm=small("Llama", num_hidden_layers=1), **MOD)
