"""The toy's own stages (toy/stages.py): what they learn from, and that they learn."""
import json
import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import narrator as nar
import train
from helpers import tiny, video
from support.common.errors import BadData
from toy import stages, world


def fit_in(folder):
    """train.py's loop, which writes its files to a folder."""
    return partial(train.fit, options=train.Options(output=str(folder)))


def losses_of(log):
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


def scene(seed, width):
    """A training video whose tokens say outright what is where: clean codes, no encoder needed."""
    labels = torch.from_numpy(world.Kitchen(seed, 4).labels()[..., :2]).long()
    generator = torch.Generator().manual_seed(0)
    code = torch.randn(10 + 14, width, generator=generator)
    slots = code[:10]
    types = code[10:17]
    colours = code[17:]
    x = slots.expand(len(labels), 10, width).clone()                   # [T, 10, D]
    x[:, 1:] += types[labels[..., 0]] + colours[labels[..., 1]]
    return stages.Scene(x, [(0, [5])], labels)


# ------------------------------------------------------------- what is known

def test_last_seen_by_hand():
    labels = torch.zeros(4, 9, 2, dtype=torch.long)
    labels[0, 3] = torch.tensor([1, 2])
    labels[2, 3] = torch.tensor([4, 6])
    labels[1, 5] = torch.tensor([2, 2])
    last = stages.last_seen(labels)
    assert last[:, 3].tolist() == [[1, 2], [1, 2], [4, 6], [4, 6]]
    assert last[:, 5].tolist() == [[0, 0], [2, 2], [2, 2], [2, 2]]
    assert not last[:, 0].any()


def test_last_seen_is_what_the_world_asks_for():
    """Memory words are what the place showed last when the segment before ended."""
    asked = 0
    for seed in range(20):
        kitchen = world.Kitchen(seed)
        last = stages.last_seen(torch.from_numpy(kitchen.labels()[..., :2]).long())
        for before, narration in zip(kitchen.narrations, kitchen.narrations[1:]):
            if not narration.memory_words:
                continue
            place, = [i for i, name in enumerate(world.PLACES) if f"the {name} " in narration.text]
            kind, colour = last[before.frame, place].tolist()
            words = (world.COLOURS[colour - 1], world.TYPES[kind - 1])
            assert narration.memory_words == words, (seed, narration)
            asked += 1
    assert asked > 50


def test_inventory():
    labels = torch.zeros(9, 2, dtype=torch.long)
    labels[0] = torch.tensor([1, 1])
    labels[6] = torch.tensor([2, 2])
    in_order = " the shelf: red cup\nthe drawer: green bowl"
    assert stages.inventory(labels) == in_order
    chance = random.Random(0)
    plain = world.WORLDS["plain"]
    lists = {stages.inventory(labels, plain, chance) for _ in range(20)}
    assert lists == {in_order, " the drawer: green bowl\nthe shelf: red cup"}


def test_inventory_of_the_second_kitchen():
    labels = torch.zeros(9, 2, dtype=torch.long)
    labels[1] = torch.tensor([1, 1])
    assert stages.inventory(labels, world.WORLDS["second"]) == " the sink: orange cup"


# ------------------------------------------------------------- encoder

def test_the_code_head_is_linear():
    """The squared error vanishes for tokens that hold slot, type and colour as one-hot vectors."""
    heads = stages.CellHeads(22)
    with torch.no_grad():
        heads.code.weight.copy_(torch.eye(22))
        heads.code.bias.zero_()
    labels = torch.zeros(1, 9, len(world.SIZES), dtype=torch.long)
    labels[0, 4, :2] = torch.tensor([2, 5])
    weights = [torch.ones(size) for size in world.SIZES]
    x = torch.zeros(1, 10, 22)
    x[0, :, :10] = torch.eye(10)               # slots
    x[0, 5, 10 + 1] = 1                        # type 2
    x[0, 5, 16 + 4] = 1                        # colour 5
    right = heads.loss(x, labels, weights)
    x[0, 5, 10 + 1] = 0
    wrong = heads.loss(x, labels, weights)
    assert wrong > right + 0.2


# ------------------------------------------------------------- look, recall

@pytest.mark.parametrize("settings", [
    {},
    {"memory": "recent"},
    {"memory": "none"},
    {"readout": "cls", "last_k": 0},
    {"memory": "none", "prune": False},
    {"narration_memory": 3, "last_k": 0},
    {"grid": 0},
])
@pytest.mark.parametrize("at", [(0,), (0, 2, 3)])
def test_several_sequences_at_once_are_each_alone(settings, at):
    """short_loss is the sum of Narrator.loss of each sequence: value and gradients."""
    model = tiny(**settings)
    starts = [5, 1, 12]
    videos = [video(model, start + at[-1] + 1, at, seed=start) for start in starts]
    x, narrations = zip(*videos)
    together, learned = stages.short_loss(model, x, starts, narrations)

    one_by_one = 0.0
    count = 0
    for tokens, start, sentences in zip(x, starts, narrations):
        # The memory absorbs the frames before the sequence.
        before = tokens[:start].flatten(0, 1)[None]
        _, state = model.memory(before, torch.zeros(1, 0, dtype=torch.long))
        if hasattr(model, "narration_memory"):
            state = state, None                     # no narration came before
        loss, number = model.loss(tokens[start:], sentences, nar.Past(state))
        one_by_one = one_by_one + loss
        count += number
    assert learned == count
    assert torch.allclose(together, one_by_one, rtol=1e-5)

    trained = list(model.trainable().values())
    gradients = torch.autograd.grad(together, trained, allow_unused=True)
    expected_gradients = torch.autograd.grad(one_by_one, trained, allow_unused=True)
    for gradient, expected in zip(gradients, expected_gradients):
        if expected is None:
            assert gradient is None
        else:
            assert torch.allclose(gradient, expected, rtol=1e-3, atol=1e-3)


def test_routers_take_one_sequence_at_a_time():
    torch.manual_seed(0)
    model = tiny(memory="none", prune=False, mod_keep=0.2)
    starts = [1, 2]
    x = [scene(seed, 32).x[:start + 1] for seed, start in enumerate(starts)]
    narrations = [[(0, [5, 6])], [(0, [7])]]
    loss, learned = stages.short_loss(model, x, starts, narrations)
    first, first_count = model.loss(x[0][1:], narrations[0])
    second, second_count = model.loss(x[1][2:], narrations[1])
    assert torch.allclose(loss, first + second)
    assert learned == first_count + second_count


@pytest.mark.parametrize("memory", ["clam", "recent", "none"])
def test_inventories_run_with_every_memory(tmp_path, memory):
    model = tiny(memory=memory)
    videos = [scene(seed, 32) for seed in range(2)]
    for stage in ("look", "recall"):
        stages.inventories(fit_in(tmp_path), stage, model, videos, 1, 1e-3, 0, batch=1)
        assert len(losses_of(tmp_path / f"{stage}-log.jsonl")) == 1


def test_stages_of_one_token(tmp_path):
    """With frames of one token (CLS), all stages have losses and change what they train."""
    model = tiny(grid=0, narration_memory=3, last_k=0)
    model.initialise(torch.randn(60, 1, 32))
    before = {name: parameter.detach().clone() for name, parameter in model.trainable().items()}
    videos = [scene(seed, 32) for seed in range(2)]
    for scene_of_one_token in videos:
        scene_of_one_token.x = scene_of_one_token.x[:, :1]
    for stage in ("look", "recall"):
        stages.inventories(fit_in(tmp_path), stage, model, videos, 2, 1e-3, 0, batch=2)

    changed = set()
    for name, parameter in model.trainable().items():
        assert parameter.isfinite().all()
        if not torch.equal(parameter, before[name]):
            changed.add(name.split(".")[2])
    assert changed >= {"connector", "clustering", "narration_memory", "lm_head"}


def test_lists_are_in_order_only_at_first(tmp_path, monkeypatch):
    """In the first half of stage look; else entry n could be read off token n."""
    in_order = []
    inventory = stages.inventory

    def recorded(labels, variant, chance):
        in_order.append(chance is None)
        return inventory(labels, variant, chance)

    monkeypatch.setattr(stages, "inventory", recorded)
    fit = fit_in(tmp_path)
    stages.inventories(fit, "look", tiny(), [scene(0, 32)], 4, 1e-3, 0, batch=1)
    assert in_order == [True, True, False, False]
    in_order.clear()
    stages.inventories(fit, "recall", tiny(), [scene(0, 32)], 2, 1e-3, 0, batch=1)
    assert in_order == [False] * 4             # two lists a step


def test_what_is_dark_is_not_listed(tmp_path, monkeypatch):
    dark_at_the_end = scene(0, 32)
    dark_at_the_end.labels[5:] = 0
    listed = []
    inventory = stages.inventory

    def recorded(labels, *variant):
        listed.append(labels)
        return inventory(labels, *variant)

    monkeypatch.setattr(stages, "inventory", recorded)
    for stage in ("look", "recall"):
        stages.inventories(fit_in(tmp_path), stage, tiny(), [dark_at_the_end], 2, 1e-3, 0, batch=4)
    assert len(listed) == 2 * 4 + 2 * 4 * 2    # steps, rows of a batch, lists of a row
    assert all(labels.any() for labels in listed)


# ------------------------------------------------------------- look, taken over

@pytest.fixture
def one_step(monkeypatch):
    monkeypatch.setattr(stages, "STEPS", {"look": 1, "recall": 1})


@pytest.mark.parametrize("memory", ["clam", "recent"])
def test_look_is_taken_over(tmp_path, one_step, memory):
    """LoRA and connector of another training, whatever its memory; the own memory stays."""
    videos = [scene(0, 32)]
    first = tiny()
    stages_of_first = []

    def fit_only_look(stage, *arguments):
        stages_of_first.append(stage)
        fit_in(tmp_path)(stage, *arguments)

    stages.before_narrating(fit_only_look, first, videos, tmp_path, 1e-3, 0, recall=False)
    assert stages_of_first == ["look"]
    second = tiny(memory=memory)
    memory_before = {name: p.clone() for name, p in second.memory.named_parameters()}
    stages_of_second = []

    def no_fit(stage, *arguments):
        stages_of_second.append(stage)

    look = str(tmp_path / stages.LOOK)
    stages.before_narrating(no_fit, second, videos, tmp_path, 1e-3, 0, look)
    assert stages_of_second == ["recall"]
    expected = stages.look_parameters(first)
    parameters = stages.look_parameters(second)
    lora = 2 * (7 * second.llm.config.num_hidden_layers + 1)   # A and B of each layer, and lm_head
    assert len(parameters) == 4 + lora
    for name, parameter in parameters.items():
        assert torch.equal(parameter, expected[name].bfloat16().float())
    for name, parameter in second.memory.named_parameters():
        assert torch.equal(parameter, memory_before[name])


def test_look_of_an_unlike_narrator_is_refused(tmp_path):
    file = tmp_path / stages.LOOK

    def take_over(model):
        stages.before_narrating(None, model, [], tmp_path, 1e-3, 0, look=str(file))

    with pytest.raises(BadData, match="look.safetensors is not the look.safetensors of a training"):
        take_over(tiny())
    parameters = stages.look_parameters(tiny(lora_rank=2))
    save_file({name: p.detach() for name, p in parameters.items()}, file)
    with pytest.raises(BadData, match="has the wrong shape for 58 tensors"):
        take_over(tiny(lora_rank=4))
    save_file({"other": torch.zeros(1)}, file)
    with pytest.raises(BadData, match="is of another narrator: it lacks .*connector"):
        take_over(tiny())


# ------------------------------------------------------------- the training videos

class Brightness(torch.nn.Module):
    """An encoder of pictures: each token is the mean of the picture, multiplied by `times`."""

    def __init__(self, times=1.0):
        super().__init__()
        self.register_buffer("times", torch.tensor(times))

    def forward(self, frames):
        mean = frames.float().mean((1, 2, 3), keepdim=True)[..., 0]            # [T, 1, 1]
        return self.times * mean.expand(-1, 10, 1)


def make_scenes(cache, limit, name="plain", times=1.0):
    layout = SimpleNamespace(encode=lambda text: [len(text)])
    kitchens = list(world.kitchens("train", limit, world=world.WORLDS[name]))
    return stages.scenes(Brightness(times), layout, kitchens, cache)


def test_kept_features_are_not_written_again(tmp_path):
    cache = tmp_path / "x.safetensors"
    make_scenes(cache, 1)
    written = cache.stat().st_ino              # a new file replaces the old one
    make_scenes(cache, 1)
    assert cache.stat().st_ino == written
    make_scenes(cache, 2)
    assert cache.stat().st_ino != written


def test_damaged_features_are_named(tmp_path):
    cache = tmp_path / "features.safetensors"
    cache.write_text("text")
    with pytest.raises(BadData, match="features.safetensors: is damaged .*; delete it"):
        make_scenes(cache, 1)


def test_scenes_of_two_worlds_share_a_file(tmp_path):
    """Frame tokens kept for one world or encoder are not used for another world or encoder."""
    cache = tmp_path / "x.safetensors"
    plain = make_scenes(cache, 2)
    night = make_scenes(cache, 2, "night")
    again = make_scenes(cache, 2)
    for first, dark, second in zip(plain, night, again):
        assert torch.equal(first.x, second.x)
        assert len(dark.x) == len(dark.labels) == len(first.x) + 240
        assert dark.variant.kinds == ("dark",)
        lit = dark.x[:, 0, 0] > 10
        assert (dark.labels.flatten(1).any(1) == lit).all()
    twice = make_scenes(cache, 2, times=2.0)
    assert torch.allclose(twice[0].x, 2 * plain[0].x, rtol=1e-2)
