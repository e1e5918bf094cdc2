"""The stages of the toy's training that come before the paper's own.

Small models first have to learn what large pretrained models already know. train.py runs the stages
in this order and then trains the narrator.

    encoder     a small SigLIP learns to see, from the labels of training frames
    language    a small Llama learns to read: the world's sentences, and to look up facts in its
                context
    look        LoRA and connector learn to name what a frame shows, place by place; from here on
                the encoders and the Llama's own weights are frozen
    recall      memory and language model learn to list what each place showed last, from the memory
                tokens

All labels are those of training videos; labels of test videos are never used. Each stage is one
function, and is trained by train.py's loop, `fit`.
"""
from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

import narrator as nar
from streams.late import Past
from support.common.disk import write_json, write_tensors
from support.common.errors import BadData, first_line
from support.common.progress import progress
from support.engine.checkpoint import load_parameters
from support.files.features import encode_pictures
from toy import world
from train import Example, Recipe, fit

# Steps of the stages before `recall`
STEPS = {"encoder": 2400, "language": 500, "look": 1400}


# ------------------------------------------------------------------------- encoder

WIDTH = 128                                    # of the encoder, D


class Heads(nn.Module):
    """What stage encoder predicts from a frame's tokens: all labels of each cell, and where the hand
    is and what it does.

    `code` is a plain linear map, trained by squared error, to the one-hot vectors of a token's slot
    and of its cell's type and colour. Keys, values and gates of CLAM are linear in the token, and
    the part of a key that belongs to other slots adds up over a thousand tokens. So it is not
    enough that a token can be classified: what CLAM is to remember has to be coded linearly.
    """

    FRAME = (                                  # classes of what is predicted once for each frame
        1 + 9,                                 # place of your hand; 0: none
        world.SIZES[world.HAND],               # its pose
        world.SIZES[world.EFFECT],
        2,                                     # does it carry something?
    )

    def __init__(self, width: int):
        super().__init__()
        self.cell = nn.Linear(width, sum(world.SIZES))
        self.frame = nn.Linear(width, sum(self.FRAME))
        self.code = nn.Linear(width, 10 + 6 + 6)

    def loss(self, x: Tensor, labels: Tensor, weights: list[Tensor]) -> Tensor:
        """x [B, J, D], labels [B, 9, A] -> cross entropy and squared error; `weights` for the
        classes of a label."""
        # The first token is of the whole frame, the others are of the nine cells.
        cells = self.cell(x[:, 1:]).split(world.SIZES, dim=-1)     # [B, 9, classes] for each label
        total = 0
        for label, logits in enumerate(cells):
            logits = rearrange(logits, "b n c -> (b n) c")
            total = total + F.cross_entropy(logits, labels[..., label].flatten(), weights[label])

        hand = labels[..., world.HAND]                         # [B, 9]
        carries = labels[..., world.HELD] == world.YOURS       # [B, 9]
        targets = (
            torch.where(hand.any(1), hand.argmax(1) + 1, 0),
            hand.amax(1),
            labels[..., world.EFFECT].amax(1),
            carries.any(1).long(),
        )
        frame = self.frame(x[:, 0]).split(self.FRAME, dim=-1)  # [B, classes] for each target
        losses = [F.cross_entropy(logits, target) for logits, target in zip(frame, targets)]

        slot, thing = self.code(x).split([10, 12], dim=-1)     # [B, J, 10], [B, J, 12]
        # One-hot vectors of type and colour; class 0, none, is all zero.
        kind = F.one_hot(labels[..., world.TYPE], 7)[..., 1:]
        colour = F.one_hot(labels[..., world.COLOUR], 7)[..., 1:]
        shown = torch.cat([kind, colour], dim=-1)              # [B, 9, 12]
        slot_error = (slot - torch.eye(10)).square().sum(-1).mean()
        thing_error = (thing[:, 1:] - shown).square().sum(-1).mean()
        return total + 0.3 * sum(losses) + 30 * slot_error + 3 * thing_error


def augment(frames: Tensor) -> Tensor:
    """uint8 [B, H, W, 3] -> normalised [B, 3, H, W], as varied as the pictures of real files are.

    Brightness, sharpness and noise vary, and half of the batches have coarse colours.
    """
    # Without `contiguous`, everything below is slow.
    x = rearrange(frames, "b h w c -> b c h w").contiguous() / 255
    # One brightness for each picture.
    x = x * (0.9 + 0.2 * torch.rand(len(x), 1, 1, 1))
    if torch.rand(()) < 0.5:
        # Half the colour resolution, as in yuv420p.
        grey = x.mean(1, keepdim=True)
        coarse = F.avg_pool2d(x - grey, 2)
        x = grey + F.interpolate(coarse, scale_factor=2, mode="bilinear")
    if torch.rand(()) < 0.5:
        blurred = F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)
        x = x.lerp(blurred, 0.5 * torch.rand(()))
    x = x + 0.01 * torch.rand(()) * torch.randn_like(x)
    return (x.clamp(0, 1) - 0.5) / 0.5


def encoder(options: Recipe, folder: Path, variant: world.World, batch: int = 32,
            videos: int = 1600, each: int = 12):
    """Train a small SigLIP on `each` frames of each of a world's first training videos.

    The model is written to `folder`.
    """
    from transformers import SiglipVisionConfig, SiglipVisionModel
    config = SiglipVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=world.SIZE,
        patch_size=16,
    )
    model = SiglipVisionModel(config)
    heads = Heads(WIDTH)
    frames, labels = training_pictures(options.seed, variant, videos, each)
    # A class counts by the root of its frequency: rare classes have larger weights.
    weights = []
    for label, size in enumerate(world.SIZES):
        counts = torch.bincount(labels[..., label].flatten(), minlength=size)
        counts = counts.clamp_min(1).float()
        weights.append(counts.rsqrt() * counts.sum() / counts.sqrt().sum())

    def backward(step: int) -> float:
        rows = torch.randint(len(frames), (batch,))
        x = nar.frame_tokens(model, augment(frames[rows]), 3)  # [B, J, D]
        loss = heads.loss(x, labels[rows], weights)
        loss.backward()
        return loss.item()

    both = nn.ModuleDict({"model": model, "heads": heads})
    fit("encoder", dict(both.named_parameters()), backward, STEPS["encoder"], 1.5e-3,
        options)
    model.to(torch.bfloat16).save_pretrained(folder)
    processor = {
        "image_processor_type": "SiglipImageProcessor",
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": {"height": world.SIZE, "width": world.SIZE},
        "do_resize": True,
        "do_normalize": True,
    }
    write_json(folder / "preprocessor_config.json", processor)


def training_pictures(seed: int, variant: world.World, videos: int,
                      each: int) -> tuple[Tensor, Tensor]:
    """Pictures for a vision model, uint8 [N, H, W, 3], and their labels [N, 9, A].

    There are `each` of each video. Up to half of them show you carrying something: at random,
    hardly any would.
    """
    chance = random.Random(seed)
    pictures = []
    labels = []
    for number in progress(world.SEEDS["train"][:videos], "rendering", unit="video"):
        kitchen = world.Kitchen(number, world=variant)
        cells = kitchen.labels()                               # [T, 9, A]
        carrying = (cells[..., world.HELD] == world.YOURS).any(1)
        carried = np.flatnonzero(carrying).tolist()
        others = np.flatnonzero(~carrying).tolist()
        chosen = carried[:each // 2]
        chosen = chosen + chance.sample(others, each - len(chosen))
        pictures.extend(map(kitchen.render, chosen))
        labels.extend(cells[chosen])
    return torch.from_numpy(np.stack(pictures)), torch.from_numpy(np.stack(labels)).long()


# ------------------------------------------------------------------------- language

def token_batches(tokenizer, steps: int, batch: int, length: int, seed: int,
                  variant: world.World) -> Tensor:
    """A world's documents, one after the other, as tokens [steps, batch, length]."""
    documents = world.documents(seed, variant)
    count = steps * batch * length
    ids = []
    while len(ids) < count:
        text = tokenizer(next(documents), add_special_tokens=False)["input_ids"]
        ids += [tokenizer.bos_token_id, *text, tokenizer.eos_token_id]
    return torch.tensor(ids[:count]).view(steps, batch, length)


def make_tokenizer(folder: Path, seed: int, variant: world.World):
    """Byte-level BPE that splits text as Llama 3 does; written to `folder`.

    It learns from a world's documents and from the pieces of the token layout.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    split = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                  r"|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(split, "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=640,
        special_tokens=["<|begin_of_text|>", "<|eot_id|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    documents = world.documents(seed, variant)
    texts = [next(documents) for _ in range(2000)]
    prompt = [nar.SYSTEM + "\n\n", f"User: {nar.INSTRUCTION}\n"]
    pieces = [*prompt, "[", "]\n", ",", "Assistant:", "\n"]
    tokenizer.train_from_iterator(texts + pieces * 50, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        clean_up_tokenization_spaces=False,
    )
    wrapped.save_pretrained(folder)
    return wrapped


def language(options: Recipe, folder: Path, variant: world.World, batch: int = 8,
             length: int = 256):
    """Train a small Llama on a world's documents (next-token prediction).

    The model and its tokenizer are written to `folder`.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    tokenizer = make_tokenizer(folder, options.seed, variant)
    width = options.llm_width
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    llm = LlamaForCausalLM(config)
    # The library's 0.02 is for wide models: with small widths, attention would start flat.
    for module in llm.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.7 * module.in_features ** -0.5)
    nn.init.normal_(llm.get_input_embeddings().weight, std=0.1)

    steps = STEPS["language"]
    batches = token_batches(tokenizer, steps, batch, length, options.seed, variant)

    def backward(step: int) -> float:
        ids = batches[step]
        loss = llm(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.item()

    fit("language", dict(llm.named_parameters()), backward, steps, 2e-3, options)
    llm.to(torch.bfloat16).save_pretrained(folder)


# ------------------------------------------------------------------------- the training videos

@dataclass
class Scene(Example):
    """A training video with its labels."""
    labels: Tensor                             # [T, 9, 2]: type, colour; 0: none
    variant: world.World = world.WORLDS["plain"]


def scenes(vision: nar.VisionEncoder, layout: nar.Layout,
           kitchens: Iterable[world.Kitchen]) -> list[Scene]:
    """Videos as they are trained on."""
    videos = []
    for kitchen in progress(list(kitchens), "encoding", unit="video"):
        pictures = map(kitchen.render, range(len(kitchen)))
        x = torch.stack(list(encode_pictures(pictures, vision, 64)))           # [T, J, D]
        x = x.half().float()                   # all results are of tokens in half precision
        labels = torch.from_numpy(kitchen.labels()[..., :2]).long()
        said = [(narration.frame, narration.text) for narration in kitchen.narrations]
        narrations = layout.encode_narrations(said)
        videos.append(Scene(x, narrations, labels, kitchen.world))
    return videos


def last_sight(labels: Tensor) -> Tensor:
    """The last frame up to each one at which each place showed a thing; -1 if there is none.

    labels [T, 9, 2] -> [T, 9]
    """
    frame = torch.arange(len(labels))[:, None]                                 # [T, 1]
    return torch.where(labels[..., 0] > 0, frame, -1).cummax(0).values


def last_seen(labels: Tensor) -> Tensor:
    """What each place showed last, up to and including each frame.

    labels [T, 9, 2] -> [T, 9, 2]; 0: nothing so far
    """
    last = last_sight(labels).clamp_min(0)     # where there is none, frame 0 shows nothing, too
    return labels[last, torch.arange(9)]


# ------------------------------------------------------------------------- look, recall

def inventory(labels: Tensor, variant: world.World = world.WORLDS["plain"],
              chance: random.Random | None = None) -> str:
    """labels [9, 2] -> ' the shelf: red cup\\nthe drawer: green bowl', in the order of the places;
    with `chance`, in random order.
    """
    lines = []
    for place, (kind, colour) in zip(variant.places, labels.tolist()):
        if kind:
            lines.append(f"the {place}: {' '.join(variant.words(kind, colour))}")
    if chance:
        chance.shuffle(lines)
    return " " + "\n".join(lines)


def inventories(options: Recipe, stage: str, narrator: nar.Narrator, videos: list[Scene],
                batch: int = 8):
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
    steps = options.recall_steps if stage == "recall" else STEPS[stage]

    def backward(step: int) -> float:
        chance = random.Random(f"{stage} {options.seed} {step}")
        in_order = stage == "look" and step < steps // 2
        total = 0
        learned = 0
        for video in chance.choices(videos, k=batch):
            loss, count = loss_of_lists(narrator, stage, video, chance, in_order)
            total = total + loss
            learned += count
        loss = total / learned
        loss.backward()
        return loss.item()

    parameters = narrator.trainable()
    if stage == "recall" and options.freeze_lora:
        parameters = {name: p for name, p in parameters.items() if ".lora_" not in name}
    fit(stage, parameters, backward, steps, options.lr, options)


def loss_of_lists(narrator: nar.Narrator, stage: str, video: Scene, chance: random.Random,
                  in_order: bool = False) -> tuple[Tensor, int]:
    """The lists of one or two frames of a video, drawn by `chance`: the sum of the loss over their
    tokens, and how many these are.
    """
    encode = narrator.layout.encode
    # Neither the first nor the last frame: stage recall needs one before and one after.
    with_things = video.labels[1:-1].flatten(1).any(1).nonzero().flatten()
    t = 1 + chance.choice(with_things.tolist())
    order = None if in_order else chance
    lists = [(0, encode(inventory(video.labels[t], video.variant, order)))]
    if stage == "look":
        return narrator.loss(video.x[t:], lists)
    known = last_seen(video.labels[:t + 2])[-1]
    lists.append((1, encode(inventory(known, video.variant, order))))
    past = Past(narrator.state_after(video.x[:t], []), tokens=0)
    return past.loss(narrator, video.x[t:], lists)


def look_parameters(narrator: nar.Narrator) -> dict[str, nn.Parameter]:
    """What stage look trains: LoRA and connector."""
    parameters = {}
    for name, parameter in narrator.trainable().items():
        if ".lora_" in name or ".connector." in name:
            parameters[name] = parameter
    return parameters


def take_over(narrator: nar.Narrator, path: Path):
    """Set LoRA and connector to those of a file LOOK.

    Raises BadData if it is no such file, or of another size.
    """
    parameters = look_parameters(narrator)
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise BadData(f"--look: {path} is not the {LOOK} of a training "
                      f"({first_line(error)})") from error
    missing = parameters.keys() - weights.keys()
    if missing:
        raise BadData(f"--look: {path} is of another narrator: it lacks {min(missing)}")
    with torch.no_grad():
        load_parameters(parameters, weights, path)


# ------------------------------------------------------------------------- the order

LOOK = "look.safetensors"                      # in the output folder: what stage look has learned


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
