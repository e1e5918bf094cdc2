"""The toy's own stages (toy/stages.py): what they learn from, and that they learn."""
import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import clam
import train
from helpers import tiny, video
from support.common import BadData
from toy import stages, world


def test_last_seen_by_hand():
    labels = torch.zeros(4, 9, 2, dtype=torch.long)
    labels[0, 3], labels[2, 3], labels[1, 5] = torch.tensor([1, 2]), torch.tensor([4, 6]), torch.tensor([2, 2])
    last = stages.last_seen(labels)
    assert last[:, 3].tolist() == [[1, 2], [1, 2], [4, 6], [4, 6]] and last[:, 5].tolist() == [[0, 0], *[[2, 2]] * 3]
    assert not last[:, 0].any()


def test_last_seen_is_what_the_world_asks_for():
    """The memory words of every narration are what its place showed last when the segment before it ended."""
    asked = 0
    for seed in range(20):
        kitchen = world.Kitchen(seed)
        last = stages.last_seen(torch.from_numpy(kitchen.labels()[..., :2]).long())
        for before, narration in zip(kitchen.narrations, kitchen.narrations[1:]):
            if narration.memory_words:
                place = next(i for i, name in enumerate(world.PLACES) if f"the {name} " in narration.text)
                kind, colour = last[before.frame, place].tolist()
                assert narration.memory_words == (world.COLOURS[colour - 1], world.TYPES[kind - 1]), (seed, narration)
                asked += 1
    assert asked > 50


def test_inventory():
    labels = torch.zeros(9, 2, dtype=torch.long)
    labels[0], labels[6] = torch.tensor([1, 1]), torch.tensor([2, 2])
    assert stages.inventory(labels) == " the shelf: red cup\nthe drawer: green bowl"


def scene(seed, width):
    """A training video whose tokens say outright what is where: clean codes, no encoder needed."""
    labels = torch.from_numpy(world.Kitchen(seed, 4).labels()[..., :2]).long()
    generator = torch.Generator().manual_seed(0)
    code = torch.randn(10 + 14, width, generator=generator)
    x = code[:10].expand(len(labels), 10, width).clone()
    x[:, 1:] += code[10 + labels[..., 0]] + code[17 + labels[..., 1]]
    return stages.Scene(x, [(0, [5])], labels)


def test_remember_where_nothing_is_hidden(tmp_path):
    one = scene(0, 32)
    one.labels[:] = 1
    fit = partial(train.fit, options=train.Options(output=str(tmp_path)))
    stages.remember(fit, tiny().memory, [one], 1, 0, batch=1)
    assert json.loads((tmp_path / "remember-log.jsonl").read_text())["loss"] == 0


@pytest.mark.parametrize("M", [1, 5, 10, 15])
def test_remember_learns(tmp_path, M):
    torch.manual_seed(0)
    videos = [scene(seed, 64) for seed in range(8)]
    memory = clam.CLAM(64, M, 2, dropout=0.0)
    memory.initialise(torch.cat([v.x for v in videos]))
    options = train.Options(output=str(tmp_path))
    stages.remember(partial(train.fit, options=options), memory, videos, 40, seed=0, lr=3e-3, batch=1)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "remember-log.jsonl").read_text().splitlines()]
    assert sum(losses[-8:]) < 0.75 * sum(losses[:8])


def test_the_code_head_is_linear():
    """The squared error vanishes for tokens that hold slot, type and colour as one-hot vectors."""
    heads = stages.CellHeads(22)
    with torch.no_grad():
        heads.code.weight.copy_(torch.eye(22))
        heads.code.bias.zero_()
    labels = torch.zeros(1, 9, len(world.SIZES), dtype=torch.long)
    labels[0, 4, :2] = torch.tensor([2, 5])
    x = torch.zeros(1, 10, 22)
    x[0, :, :10] = torch.eye(10)
    weights = [torch.ones(size) for size in world.SIZES]
    x[0, 5, 10 + 1] = x[0, 5, 16 + 4] = 1
    right = heads.loss(x, labels, weights)
    x[0, 5, 10 + 1] = 0
    assert heads.loss(x, labels, weights) > right + 0.2


@pytest.mark.parametrize("settings", [{}, {"memory": "recent"}, {"memory": "none"}, {"readout": "cls", "last_k": 0},
                                      {"memory": "none", "prune": False}, {"narration_memory": 3, "last_k": 0},
                                      {"grid": 0}])
@pytest.mark.parametrize("at", [(0,), (0, 1), (0, 2, 3)])
def test_several_sequences_at_once_are_each_alone(settings, at):
    """short_loss is the sum of Narrator.loss after the frames before each sequence: value and gradients."""
    model, starts = tiny(**settings), [5, 1, 12]
    x, narrations = zip(*(video(model, start + at[-1] + 1, at, seed=start) for start in starts))
    several, learned = stages.short_loss(model, x, starts, narrations)
    alone, count = 0.0, 0
    for y, start, one in zip(x, starts, narrations):
        state = model.memory(y[:start].flatten(0, 1)[None], torch.zeros(1, 0, dtype=torch.long))[1]
        loss, number = model.loss(y[start:], one, state)
        alone, count = alone + loss, count + number
    assert learned == count and torch.allclose(several, alone, rtol=1e-5)
    trained = model.trainable().values()
    for a, b in zip(*(torch.autograd.grad(loss, trained, allow_unused=True) for loss in (several, alone))):
        assert (a is None) == (b is None) and (a is None or torch.allclose(a, b, rtol=1e-3, atol=1e-3))


def test_routers_take_one_sequence_at_a_time():
    torch.manual_seed(0)
    model, videos = tiny(memory="none", prune=False, mod_keep=0.2), [scene(seed, 32) for seed in range(2)]
    given = [v.x[:start + 1] for v, start in zip(videos, (1, 2))], [1, 2], [[(0, [5, 6])], [(0, [7])]]
    loss, learned = stages.short_loss(model, *given)
    each = [model.loss(x[start:], lists) for x, start, lists in zip(*given)]
    assert torch.allclose(loss, sum(one for one, _ in each)) and learned == sum(n for _, n in each)


def test_inventories_run_with_every_memory(tmp_path):
    for memory in ("clam", "recent", "none"):
        model = tiny(memory=memory)
        options = train.Options(output=str(tmp_path / memory))
        videos = [scene(seed, 32) for seed in range(2)]
        for stage in ("look", "recall"):
            stages.inventories(partial(train.fit, options=options), stage, model, videos, 1, 1e-3, 0, batch=1)
            assert (tmp_path / memory / f"{stage}-log.jsonl").stat().st_size > 20


def test_stages_of_one_token(tmp_path):
    """Frames that are their CLS token alone: look, remember and recall have losses, and what they train changes."""
    model = tiny(grid=0, narration_memory=3, last_k=0)
    model.initialise(torch.randn(60, 1, 32))
    before = {name: p.detach().clone() for name, p in model.trainable().items()}
    videos = [scene(seed, 32) for seed in range(2)]
    for one in videos:
        one.x = one.x[:, :1]
    fit = partial(train.fit, options=train.Options(output=str(tmp_path)))
    for stage in ("look", "recall"):
        stages.inventories(fit, stage, model, videos, 2, 1e-3, 0, batch=2)
    stages.remember(fit, model.memory, videos, 2, 0, batch=1)
    assert all(p.isfinite().all() for p in model.trainable().values())
    changed = {name.split(".")[2] for name, p in model.trainable().items() if not torch.equal(p, before[name])}
    assert changed >= {"connector", "clustering", "narration_memory", "lm_head"}


def test_inventory_of_the_second_kitchen():
    labels = torch.zeros(9, 2, dtype=torch.long)
    labels[1] = torch.tensor([1, 1])
    assert stages.inventory(labels, world.WORLDS["second"]) == " the sink: orange cup"


def test_what_is_dark_is_not_listed(tmp_path, monkeypatch):
    video, listed, real = scene(0, 32), [], stages.inventory
    video.labels[5:] = 0
    monkeypatch.setattr(stages, "inventory", lambda labels, *more: (listed.append(labels), real(labels, *more))[1])
    fit = partial(train.fit, options=train.Options(output=str(tmp_path)))
    for stage in ("look", "recall"):
        stages.inventories(fit, stage, tiny(), [video], 2, 1e-3, 0, batch=4)
    assert len(listed) == 24 and all(labels.any() for labels in listed)


def test_look_is_taken_over(tmp_path):
    """LoRA and connector of another training, whatever its memory; the own memory stays."""
    options, first = train.Options(output=str(tmp_path)), tiny()
    stages.inventories(partial(train.fit, options=options), "look", first, [scene(0, 32)], 2, 1e-3, 0)
    for memory in ("clam", "recent"):
        second, done = tiny(memory=memory), []
        before = {name: p.clone() for name, p in second.memory.named_parameters()}
        stages.before_narrating(lambda stage, *more: done.append(stage), second, [scene(0, 32)], 1e-3, 0, False,
                                str(tmp_path))
        looked = stages.look_parameters(second)
        assert len(looked) == 4 + 2 * (7 * second.llm.config.num_hidden_layers + 1) and done == ["recall"]
        assert all(torch.equal(p, stages.look_parameters(first)[name]) for name, p in looked.items())
        assert all(torch.equal(p, before[name]) for name, p in second.memory.named_parameters())


def test_look_of_an_unlike_narrator_is_refused(tmp_path):
    options = train.Options(output=str(tmp_path))
    backward = lambda step: (first.connector[0].weight.square().sum().backward(), (1.0, 1))[1]
    first, file = tiny(lora_rank=2), tmp_path / "look-state.safetensors"
    take = lambda model: stages.before_narrating(None, model, [], 1e-3, 0, look=str(tmp_path))
    with pytest.raises(BadData, match="look-state.safetensors is not the finished stage of a like narrator"):
        take(first)
    train.fit("look", first.trainable(), backward, 2, 1e-3, options)
    with pytest.raises(BadData, match="has the wrong shape for 58 tensors"):
        take(tiny(lora_rank=4))
    with safe_open(file, "pt") as state:
        tensors, about = {key: state.get_tensor(key) for key in state.keys()}, state.metadata()
    save_file(tensors, file, about | {"step": "1"})
    with pytest.raises(BadData, match="is of an unfinished stage"):
        take(first)


class Brightness(torch.nn.Module):
    """An encoder of pictures: their brightness, so many times brighter."""

    def __init__(self, times=1.0):
        super().__init__()
        self.register_buffer("times", torch.tensor(times))

    def forward(self, frames):
        return self.times * frames.float().mean((1, 2, 3), keepdim=True)[..., 0].expand(-1, 10, 1)


def test_kept_features_are_not_written_again(tmp_path):
    make = lambda limit: stages.scenes(Brightness(), SimpleNamespace(encode=lambda text: [1]), limit,
                                       world.WORLDS["plain"], cache)
    cache = tmp_path / "x.safetensors"
    make(1)
    written = cache.stat().st_ino
    make(1)
    assert cache.stat().st_ino == written                                    # the same file
    make(2)
    assert cache.stat().st_ino != written


def test_scenes_of_two_worlds_share_a_file(tmp_path):
    """The frame tokens that are kept for one world, or of one encoder, are not taken for another's."""
    layout, file = SimpleNamespace(encode=lambda text: [len(text)]), tmp_path / "x.safetensors"
    make = lambda name, times=1.0: stages.scenes(Brightness(times), layout, 2, world.WORLDS[name], file)
    first, idle, again = make("plain"), make("night"), make("plain")
    for a, b, c in zip(first, idle, again):
        assert torch.equal(a.x, c.x) and len(b.x) == len(b.labels) == len(a.x) + 240 and b.variant.kinds == ("dark",)
        assert (b.labels.flatten(1).any(1) == (b.x[:, 0, 0] > 10)).all()           # what is lit has labels
    assert torch.allclose(make("plain", 2.0)[0].x, 2 * first[0].x, rtol=1e-2)
