"""The training of a toy narrator (python train.py --data toy), on the encoder and the language model
of toy/checkpoint.

Small models have to learn first what large pretrained ones can do. So there are two stages before the
paper's own training.

    look        LoRA and connector learn to name what a frame shows, place by place
    recall      memory and language model learn to list what each place showed last, from the memory
                tokens

All labels are those of training videos; labels of test videos are never used. Both stages are
trained by train.py's loop, `fit`.
"""
from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

import narrator as nar
from beyond.training.card import write_card
from beyond.training.late import Past, late
from support.common.disk import write_tensors
from support.common.errors import BadData, first_line
from support.common.progress import progress
from support.engine.checkpoint import load_parameters, narrator_on_llm
from support.engine.frozen import find_model
from support.engine.registry import make_config
from beyond.training.run import Run, identity_of_training
from support.engine.first_weights import first_weights
from toy import world
from toy.files import rendered
from train import (
    Example, Recipe, fit, in_order, number_of_steps, pretrained, train,
)

LOOK_STEPS = 1400                              # of stage look
LISTS = 8                                      # videos of a step, in both stages
LOOK = "look.safetensors"                      # in the output folder: what stage look has learned


# ------------------------------------------------------------------------- the order

def train_toy(options: Recipe):
    """Both stages, then the paper's training; with --init, this alone."""
    torch.manual_seed(options.seed)
    kitchens = world.kitchens("train", options.limit, world.World(idle=options.idle))
    if options.init:
        narrator = pretrained(options)
        videos = scenes(narrator.vision_encoder(), narrator.layout, kitchens)
    else:
        narrator, videos = new_toy(options, kitchens)
    options.identity = identity_of_training(narrator, options)
    if not options.init:
        before_narrating(options, narrator, videos)
    reads = [video.read for video in videos]
    videos_of = in_order(reads, options.batch, options.seed)
    videos_of = late(videos_of, reads, options.long, options.seed)
    with Run("narrator", options) as run:
        train(narrator, videos_of, number_of_steps(options, len(videos)), options, run)
    narrator.save(options.output, torch.bfloat16)
    write_card(narrator.config, len(videos), options)


def new_toy(options: Recipe,
            kitchens: Iterable[world.Kitchen]) -> tuple[nar.Narrator, list[Scene]]:
    """A narrator with first weights, and its training videos."""
    # what would stop it later, before anything is loaded
    settings = options.narrator
    llm = find_model(settings["llm"], "llm")
    vision = find_model(settings["vision"], "vision")
    if options.look and not Path(options.look).is_file():
        raise BadData(f"--look: {options.look}: no such file")

    encoder = nar.VisionEncoder(vision, settings.get("grid", nar.Config.grid))
    config = make_config(**settings, width=encoder.width, vision_mark=vision.mark)
    narrator = narrator_on_llm(config, llm, torch.float32)
    videos = scenes(encoder, narrator.layout, kitchens)
    reads = [video.read for video in videos]
    first_weights(narrator, options.start, options.connector_start, reads)
    if options.freeze_memory:
        narrator.memory.requires_grad_(False)
    return narrator, videos


def before_narrating(options: Recipe, narrator: nar.Narrator, videos: list[Scene]):
    """What a new narrator learns before the paper's training. Stage look writes LOOK into the output
    folder.

    With --look, another training's LOOK stands for that stage: narrators that are compared see
    equally well.
    """
    if options.look:
        take_over(narrator, Path(options.look))
    else:
        inventories(options, "look", narrator, videos)
        learned = look_parameters(narrator)
        weights = {name: p.detach().to(torch.bfloat16) for name, p in learned.items()}
        write_tensors(Path(options.output) / LOOK, weights)
    if options.recall:
        inventories(options, "recall", narrator, videos)


def look_parameters(narrator: nar.Narrator) -> dict[str, nn.Parameter]:
    """What stage look trains: LoRA and connector."""
    return {name: p for name, p in narrator.trainable().items()
            if ".lora_" in name or ".connector." in name}


def take_over(narrator: nar.Narrator, path: Path):
    """Set LoRA and connector to those of a file LOOK. BadData if it is no such file, or of another
    narrator."""
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise BadData(f"--look: {path} is not the {LOOK} of a training "
                      f"({first_line(error)})") from error
    load_parameters(look_parameters(narrator), weights, path)


# ------------------------------------------------------------------------- the training videos

@dataclass
class Scene(Example):
    """A training video with its labels."""
    labels: Tensor                             # [T, 9, 2]: type, colour; 0: none

    def read(self) -> Scene:
        """As what reads a video from a file: this one is in memory."""
        return self


def scenes(vision: nar.VisionEncoder, layout: nar.Layout,
           kitchens: Iterable[world.Kitchen]) -> list[Scene]:
    """Videos as they are trained on."""
    videos = []
    for kitchen in progress(list(kitchens), "encoding", unit="video"):
        sample = rendered(kitchen)
        x = torch.stack(list(sample.tokens(vision, batch=64)))                 # [T, J, D]
        x = x.half().float()                   # all results are of tokens in half precision
        labels = torch.from_numpy(kitchen.labels()[..., :2]).long()
        narrations = layout.encode_narrations(sample.narrations)
        videos.append(Scene(x, narrations, labels))
    return videos


def last_seen(labels: Tensor) -> Tensor:
    """What each place showed last, up to and including each frame.

    labels [T, 9, 2] -> [T, 9, 2]; 0: nothing so far
    """
    frame = torch.arange(len(labels))[:, None]                                 # [T, 1]
    # the last frame that showed a thing; where there is none, frame 0 shows nothing, too
    last = torch.where(labels[..., 0] > 0, frame, 0).cummax(0).values          # [T, 9]
    return labels[last, torch.arange(9)]


# ------------------------------------------------------------------------- look, recall

def inventory(labels: Tensor, chance: random.Random | None = None) -> str:
    """labels [9, 2] -> ' the shelf: red cup\\nthe drawer: green bowl', in the order of the places;
    with `chance`, in random order.
    """
    lines = []
    for place, (kind, colour) in zip(world.PLACES, labels.tolist()):
        if kind:
            lines.append(f"the {place}: {world.name_of_thing(kind, colour)}")
    if chance:
        chance.shuffle(lines)
    return " " + "\n".join(lines)


def inventories(options: Recipe, stage: str, narrator: nar.Narrator, videos: list[Scene]):
    """Train a narrator to name what it is shown, as large pretrained language models can.

    look      one frame, and the list of what is visible in it
    recall    two frames with the memory of all frames before them, and the list of what is, or was
              last, at each place

    A frame that shows no thing (in the dark) is never listed.

    In the first half of stage look, lists have the order of the places, so that nothing has to be
    guessed: from random orders alone, it depended on the seed whether a narrator learned to see.
    All later lists have a random order. Otherwise entry n could be read off token n, without
    looking for the token of the place that is named, and narrations would hardly use the memory.
    """
    narrator.train()
    steps = options.recall_steps if stage == "recall" else LOOK_STEPS

    def backward(step: int) -> float:
        chance = random.Random(f"{stage} {options.seed} {step}")
        in_order = stage == "look" and step < steps // 2
        total = 0
        learned = 0
        for video in chance.choices(videos, k=LISTS):
            loss, count = loss_of_lists(narrator, stage, video, chance, in_order)
            total = total + loss
            learned += count
        loss = total / learned
        loss.backward()
        return loss.item()

    parameters = narrator.trainable()
    if stage == "recall" and options.freeze_lora:
        parameters = {name: p for name, p in parameters.items() if ".lora_" not in name}
    with Run(stage, options) as run:
        fit(parameters, backward, steps, options.lr, options, run)


def loss_of_lists(narrator: nar.Narrator, stage: str, video: Scene, chance: random.Random,
                  in_order: bool) -> tuple[Tensor, int]:
    """The lists of one or two frames of a video, drawn by `chance`: the sum of the loss over their
    tokens, and how many these are.
    """
    encode = narrator.layout.encode
    # Neither the first nor the last frame: stage recall needs one before and one after.
    with_things = video.labels[1:-1].flatten(1).any(1).nonzero().flatten()
    t = 1 + chance.choice(with_things.tolist())
    order = None if in_order else chance
    lists = [(0, encode(inventory(video.labels[t], order)))]
    if stage == "look":
        return narrator.loss(video.x[t:], lists)
    known = last_seen(video.labels[:t + 2])[-1]
    lists.append((1, encode(inventory(known, order))))
    past = Past(narrator.state_after(video.x[:t], []), tokens=0)
    return past.loss(narrator, video.x[t:], lists)
