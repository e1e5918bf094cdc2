"""The toy's own stages (toy/stages.py): what they learn from, and that they learn."""
import random

import pytest
import torch
from safetensors.torch import save_file

from beyond.commands.train_command import Options
from helpers import tiny
from support.common.errors import BadData
from toy import stages, world


def options_in(folder, **options):
    """Options of train.py, with an output folder."""
    return Options(output=str(folder), lr=1e-3, recall=False, recall_steps=1, **options)


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


def test_last_seen_by_hand():
    labels = torch.zeros(4, 9, 2, dtype=torch.long)
    labels[0, 3] = torch.tensor([1, 2])
    labels[2, 3] = torch.tensor([4, 6])
    labels[1, 5] = torch.tensor([2, 2])
    last = stages.last_seen(labels)
    assert last[:, 3].tolist() == [[1, 2], [1, 2], [4, 6], [4, 6]]
    assert last[:, 5].tolist() == [[0, 0], [2, 2], [2, 2], [2, 2]]
    assert not last[:, 0].any()


def test_inventory():
    labels = torch.zeros(9, 2, dtype=torch.long)
    labels[0] = torch.tensor([1, 1])
    labels[6] = torch.tensor([2, 2])
    in_order = " the shelf: red cup\nthe drawer: green bowl"
    assert stages.inventory(labels) == in_order
    chance = random.Random(0)
    lists = {stages.inventory(labels, chance) for _ in range(20)}
    assert lists == {in_order, " the drawer: green bowl\nthe shelf: red cup"}


def test_recall_teaches_the_memory_what_to_keep(tmp_path):
    """Gradients reach the frames before those that are shown."""
    model = tiny()
    video = scene(0, 32)
    assert model.state_after(video.x[:5], []).requires_grad
    gate = model.memory.w_gate[0].weight
    before = gate.clone()
    stages.inventories(options_in(tmp_path), "recall", model, [video])
    assert not torch.equal(gate, before)


@pytest.mark.parametrize("memory", ["clam", "recent"])
def test_look_is_taken_over(tmp_path, monkeypatch, memory):
    """LoRA and connector of another training, whatever its memory; the own memory stays."""
    monkeypatch.setattr(stages, "LOOK_STEPS", 1)
    videos = [scene(0, 32)]
    first = tiny()
    stages.before_narrating(options_in(tmp_path), first, videos)
    second = tiny(memory=memory)
    memory_before = {name: p.clone() for name, p in second.memory.named_parameters()}
    look = str(tmp_path / stages.LOOK)
    stages.before_narrating(options_in(tmp_path, look=look), second, videos)
    assert {log.name for log in tmp_path.glob("*.jsonl")} == {"look-log.jsonl"}

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
        stages.before_narrating(options_in(tmp_path, look=str(file)), model, [])

    with pytest.raises(BadData, match="look.safetensors is not the look.safetensors of a training"):
        take_over(tiny())
    save_file({"other": torch.zeros(1)}, file)
    with pytest.raises(BadData, match="look.safetensors lacks 62 tensors: .*connector"):
        take_over(tiny())
