"""A linear probe of a memory's tokens: what did each place show last, and when? (not in the paper)

`stream.py --explain` and the page say what it reads. It is never used to narrate. (It was trained at
commit 3373641, by experiments.knowledge.)
"""
from hashlib import sha256
from pathlib import Path

import torch
from einops import rearrange
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from support.common.errors import BadData, first_line
from support.common.marks import refuse_if_changed
from support.engine.checkpoint import WEIGHTS
from toy import world

TYPES = 1 + len(world.TYPES)                   # with 0: nothing
COLOURS = 1 + len(world.COLOURS)
PLACES = 9
FILE = "probe.safetensors"                     # in the folder of the narrator
GUESS = 0.3                                    # what is less probable is not said


class Probe(nn.Module):
    """A linear probe: a map of memory tokens to each place's thing and age."""

    def __init__(self, numbers: int):
        """numbers: M * D, of all memory tokens."""
        super().__init__()
        self.register_buffer("mean", torch.zeros(numbers))
        self.register_buffer("deviation", torch.ones(numbers))
        self.linear = nn.Linear(numbers, PLACES * (TYPES + COLOURS + 1))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """tokens [N, M * D] -> logits of types [N, 9, 7], logits of colours [N, 9, 7], and log2 of
        the ages in seconds [N, 9]."""
        answers = self.linear((tokens - self.mean) / self.deviation)
        answers = rearrange(answers, "n (p a) -> n p a", p=PLACES)
        types, colours, ages = answers.split([TYPES, COLOURS, 1], dim=-1)
        return types, colours, ages[..., 0]


def load_probe(model: str) -> Probe:
    """That of a narrator's folder. BadData if its file is damaged, or if it was made for other
    weights."""
    file = Path(model) / FILE
    try:
        with safe_open(file, "pt") as kept:
            about = kept.metadata() or {}
            tensors = {name: kept.get_tensor(name) for name in kept.keys()}
        probe = Probe(len(tensors["mean"]))
        probe.load_state_dict(tensors)
    except (OSError, SafetensorError, LookupError, RuntimeError) as error:
        raise BadData(f"{file} is damaged ({first_line(error)}); delete it") from error
    weights = (Path(model) / WEIGHTS).read_bytes()
    refuse_if_changed(str(file), about, {"narrator": sha256(weights).hexdigest()}, "delete it")
    return probe.requires_grad_(False)


def recalled(probe: Probe, memory: Tensor) -> list[tuple[str, float, float]]:
    """Memory tokens [M, D] -> what each place showed last: a thing ("" for nothing), how sure that
    is, and how many seconds ago it was. The probe is on the CPU, the memory on any device."""
    tokens = memory.float().cpu().flatten()[None]
    type_logits, colour_logits, log_ages = (answers[0] for answers in probe(tokens))
    type_sure, types = type_logits.softmax(-1).max(-1)                         # [9], [9]
    colour_sure, colours = colour_logits.softmax(-1).max(-1)                   # [9], [9]
    sure = type_sure * colour_sure
    seconds = log_ages.exp2()
    rows = zip(types.tolist(), colours.tolist(), sure.tolist(), seconds.tolist())
    return [(world.name_of_thing(kind, colour), round(p, 2), round(age, 1))
            for kind, colour, p, age in rows]


def in_words(probe: Probe, memory: Tensor) -> list[str]:
    """Memory tokens [M, D] -> "drawer: green bowl (0.93, 12 s)", ..., the surest place first."""
    known = []
    for place, (thing, sure, seconds) in zip(world.PLACES, recalled(probe, memory)):
        if thing and sure >= GUESS:
            known.append((sure, f"{place}: {thing} ({sure:.2f}, {seconds:.0f} s)"))
    known.sort(key=lambda one: -one[0])
    return [text for _, text in known]
