"""The stages of the toy's training that come before the paper's own: what large pretrained models already know, small
ones have to learn first. train.py runs the stages in this order and then trains the narrator.

    encoder     a small SigLIP learns to see, supervised with the labels of training frames
    egocentric  with --width-second: another one, for LION-FS, learns from pairs of frames what hands do
    language    a small Llama learns to read: the world's sentences, and to look facts up in its context
    look        (both stay frozen from here on) LoRA and connector learn to name what a frame shows, place by place
    remember    the memory learns, without the language model, to keep what was last seen in the places that hide it now
    recall      the language model learns to name that, from the memory tokens

All labels are those of training videos; labels of test videos are never used. Each stage is one function; `fit(name,
parameters, backward, steps, lr)` is train.py's loop, where backward(step) runs forward and backward of one batch and
returns its loss and number of tokens.
"""
from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import narrator as nar
from baselines.lionfs import TwoEncoders, motion
from support.checkpoint import fill
from support.common import BadData, chunks, first_line, write_json, write_tensors
from support.features import pairs
from support.predictions import digest
from toy import world

# Options of train.py whose defaults differ: small models, smaller LoRA, and FlowNar-C, for videos of any length.
DEFAULTS = {"output": "out/toy", "lr": 7e-4, "batch": 4, "epochs": 3.0, "lora_dropout": 0.0, "memory_dropout": 0.0,
            "memory_tokens": 10, "memory_heads": 4, "lora_rank": 16, "last_k": 10, "start": "statistics", "long": 0.5,
            "limit": 800}


# ---------------------------------------------------------------------------------------------- encoder

WIDTH = 128                                                                     # of the encoder, D


class HandHeads(nn.Module):
    """What stage egocentric predicts from a frame's tokens: what hands do in each cell, and where and what yours does.
    """

    CELL = world.EFFECT, world.HAND, world.HELD                           # labels of each cell
    FRAME = 1 + 9, world.SIZES[world.HAND], world.SIZES[world.EFFECT], 2  # your hand's place and pose, effect, carries

    def __init__(self, width: int):
        super().__init__()
        self.cell = nn.Linear(width, sum(world.SIZES[i] for i in self.CELL))
        self.frame = nn.Linear(width, sum(self.FRAME))

    def loss(self, x: Tensor, labels: Tensor, weights: list[Tensor]) -> Tensor:
        """x [B, J, D], labels [B, 9, A] -> cross entropy, rare classes weighted up."""
        cells = self.cell(x[:, 1:]).split([world.SIZES[i] for i in self.CELL], dim=-1)
        total = sum(F.cross_entropy(rearrange(y, "b n c -> (b n) c"), labels[..., i].flatten(), weights[i])
                    for i, y in zip(self.CELL, cells))
        hand, carries = labels[..., world.HAND], labels[..., world.HELD] == world.YOURS
        targets = (torch.where(hand.any(1), hand.argmax(1) + 1, 0), hand.amax(1), labels[..., world.EFFECT].amax(1),
                   carries.any(1).long())
        frame = self.frame(x[:, 0]).split(self.FRAME, dim=-1)
        return total + 0.3 * sum(F.cross_entropy(y, target) for y, target in zip(frame, targets))


class CellHeads(HandHeads):
    """What stage encoder predicts: all labels of each cell, and where and what the hand does.

    `code` is a plain linear map, trained by squared error, to the one-hot vectors of a token's slot and of its cell's
    type and colour. Keys, values and gates of CLAM are linear in the token, and the part of a key that belongs to other
    slots adds up over a thousand tokens. So it is not enough that a token can be classified: what CLAM is to remember
    has to be coded linearly.
    """

    CELL = range(len(world.SIZES))

    def __init__(self, width: int):
        super().__init__(width)
        self.code = nn.Linear(width, 10 + 6 + 6)

    def loss(self, x: Tensor, labels: Tensor, weights: list[Tensor]) -> Tensor:
        """As above, plus the code's squared error."""
        slot, thing = self.code(x).split([10, 12], dim=-1)
        shown = torch.cat([F.one_hot(labels[..., i], 7)[..., 1:] for i in (0, 1)], dim=-1)
        return (super().loss(x, labels, weights) + 30 * (slot - torch.eye(10)).square().sum(-1).mean()
                + 3 * (thing[:, 1:] - shown).square().sum(-1).mean())


def augment(frames: Tensor) -> Tensor:
    """uint8 [B, H, W, 3] -> normalised [B, 3, H, W], with the brightness, blur and coarse colour of real files."""
    x = rearrange(frames, "b h w c -> b c h w").contiguous() / 255                    # else all below is slow
    x = x * (0.9 + 0.2 * torch.rand(len(x), 1, 1, 1))
    if torch.rand(()) < 0.5:                                    # half the colour resolution, as in yuv420p
        grey = x.mean(1, keepdim=True)
        x = grey + F.interpolate(F.avg_pool2d(x - grey, 2), scale_factor=2, mode="bilinear")
    if torch.rand(()) < 0.5:
        x = x.lerp(F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False), 0.5 * torch.rand(()))
    x = x + 0.01 * torch.rand(()) * torch.randn_like(x)
    return (x.clamp(0, 1) - 0.5) / 0.5


def encoder(fit: Callable, folder: Path, seed: int, variant: world.World, steps: int = 2400, batch: int = 32,
            videos: int = 1600, each: int = 12):
    """Train a small SigLIP on `each` frames of each of a world's first training videos; write it to folder."""
    learn_to_see(fit, "encoder", small_vision(WIDTH), CellHeads(WIDTH), sights(seed, variant, videos, each), folder,
                 steps, batch)


def egocentric(fit: Callable, folder: Path, seed: int, variant: world.World, steps: int = 1200, batch: int = 32,
               videos: int = 1600, each: int = 12, width: int = WIDTH):
    """Likewise a stand-in for an egocentric video encoder, which sees each frame with the one before it: what LION-FS
    (baselines/lionfs.py) would take from EgoVLPv2. Raises BadData unless width is a multiple of 4."""
    if width % 4:
        raise BadData(f"--width-second must be a multiple of 4, not {width}: the toy's encoders have four heads")
    learn_to_see(fit, "egocentric", small_vision(width), HandHeads(width), sights(seed, variant, videos, each, moving),
                 folder, steps, batch)


def moving(kitchen: world.Kitchen, frame: int) -> np.ndarray:
    """What the stand-in sees of a frame and of the one before it, uint8 [H, W, 3]."""
    pair = np.concatenate([kitchen.render(t) for t in (frame, max(0, frame - 1))], axis=2)
    return motion(torch.from_numpy(pair)).numpy()


def small_vision(width: int) -> nn.Module:
    from transformers import SiglipVisionConfig, SiglipVisionModel
    return SiglipVisionModel(SiglipVisionConfig(hidden_size=width, intermediate_size=2 * width, num_hidden_layers=3,
                                                num_attention_heads=4, image_size=world.SIZE, patch_size=16))


def sights(seed: int, variant: world.World, videos: int, each: int,
           see: Callable = world.Kitchen.render) -> tuple[Tensor, Tensor]:
    """What a vision model sees of `each` frames of each video, uint8 [N, H, W, 3], and their labels [N, 9, A].

    Up to half of them are frames in which you carry something: at random, hardly any would be chosen.
    """
    chance, frames, labels = random.Random(seed), [], []
    for number in tqdm(world.SEEDS["train"][:videos], desc="rendering", unit="video"):
        kitchen = world.Kitchen(number, world=variant)
        every = kitchen.labels()
        carried = np.flatnonzero((every[..., world.HELD] == world.YOURS).any(1)).tolist()
        others = sorted(set(range(len(kitchen))) - set(carried))
        chosen = carried[:each // 2] + chance.sample(others, each - len(carried[:each // 2]))
        frames.extend(see(kitchen, frame) for frame in chosen)
        labels.extend(every[chosen])
    return torch.from_numpy(np.stack(frames)), torch.from_numpy(np.stack(labels)).long()


def learn_to_see(fit: Callable, stage: str, model: nn.Module, heads: HandHeads, examples: tuple[Tensor, Tensor],
                 folder: Path, steps: int, batch: int):
    """Train a vision model with its heads on frames [N, H, W, 3] and labels [N, 9, A]; write the model to folder."""
    (frames, labels), weights = examples, []
    for i, size in enumerate(world.SIZES):
        counts = torch.bincount(labels[..., i].flatten(), minlength=size).clamp_min(1).float()
        weights.append(counts.rsqrt() * counts.sum() / counts.sqrt().sum())
    parameters = dict(nn.ModuleDict({"model": model, "heads": heads}).named_parameters())

    def backward(step: int) -> tuple[float, int]:
        rows = torch.randint(len(frames), (batch,))
        loss = heads.loss(nar.frame_tokens(model, augment(frames[rows]), 3), labels[rows], weights)
        loss.backward()
        return loss.item(), batch * 10

    fit(stage, parameters, backward, steps, 1.5e-3)
    model.to(torch.bfloat16).save_pretrained(folder)
    processor = {"image_processor_type": "SiglipImageProcessor", "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
                 "size": {"height": world.SIZE, "width": world.SIZE}, "do_resize": True, "do_normalize": True}
    write_json(folder / "preprocessor_config.json", processor)


# ---------------------------------------------------------------------------------------------- language

def batches(tokenizer, length: int, batch: int, seed: int, variant: world.World) -> Iterator[Tensor]:
    """Endless token batches [batch, length] of a world's documents."""
    documents, ids = world.documents(seed, variant), []
    while True:
        while len(ids) < batch * length:
            text = tokenizer(next(documents), add_special_tokens=False)["input_ids"]
            ids += [tokenizer.bos_token_id, *text, tokenizer.eos_token_id]
        yield torch.tensor(ids[:batch * length]).view(batch, length)
        ids = ids[batch * length:]


def make_tokenizer(folder: Path, seed: int, variant: world.World):
    """Byte-level BPE with Llama 3's way of splitting, learned on a world's documents and the layout's pieces."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    split = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(split, "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=640, special_tokens=["<|begin_of_text|>", "<|eot_id|>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    documents = world.documents(seed, variant)
    pieces = [nar.SYSTEM + "\n\n", f"User: {nar.INSTRUCTION}\n", "[", "]\n", ",", "Assistant:", "\n"]
    tokenizer.train_from_iterator([next(documents) for _ in range(2000)] + pieces * 50, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>",
                                      clean_up_tokenization_spaces=False)
    wrapped.save_pretrained(folder)
    return wrapped


def language(fit: Callable, folder: Path, seed: int, variant: world.World, steps: int = 500, batch: int = 8,
             length: int = 256, width: int = 128):
    """Train a small Llama on a world's documents (next-token prediction); write it and its tokenizer to folder.

    Raises BadData unless width is a multiple of 8.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    if width % 8:
        raise BadData(f"--llm-width must be a multiple of 8, not {width}: there are four heads of even width")
    tokenizer = make_tokenizer(folder, seed, variant)
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=width, intermediate_size=3 * width, num_hidden_layers=4,
                         num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=131072,
                         rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, tie_word_embeddings=True,
                         bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    llm = LlamaForCausalLM(config)
    for module in llm.modules():    # the library's 0.02 is for wide models: at such widths attention would start flat
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.7 * module.in_features ** -0.5)
    nn.init.normal_(llm.get_input_embeddings().weight, std=0.1)
    source = batches(tokenizer, length, batch, seed, variant)
    pool = [next(source) for _ in range(steps)]

    def backward(step: int) -> tuple[float, int]:
        loss = llm(input_ids=pool[step], labels=pool[step]).loss
        loss.backward()
        return loss.item(), pool[step].numel()

    fit("language", dict(llm.named_parameters()), backward, steps, 2e-3)
    llm.to(torch.bfloat16).save_pretrained(folder)


# ---------------------------------------------------------------------------------------------- the training videos

@dataclass
class Scene:
    """A training video: x [T, J, D], narrations (frame, ids without EOT), labels [T, 9, 2] (type, colour; 0: none)."""
    x: Tensor
    narrations: list[tuple[int, list[int]]]
    labels: Tensor
    variant: world.World = world.WORLDS["plain"]


def scenes(vision: nar.VisionEncoder | TwoEncoders, layout: nar.Layout, limit: int, variant: world.World,
           cache: Path | None = None) -> list[Scene]:
    """The first `limit` training videos of a world; a file `cache` keeps their frame tokens for the next time."""
    stored, found = load_file(cache) if cache and cache.exists() else {}, []
    videos, mark = world.kitchens("train", limit, world=variant), crc32((repr(variant) + digest(vision)).encode())
    before = len(stored)
    for seed, kitchen in tqdm(videos, total=limit, desc="encoding", unit="video"):
        name = f"{seed} {mark:08x}"                             # another video in another world, or by another encoder
        if name not in stored:
            pictures = map(kitchen.render, range(len(kitchen)))
            pictures = pairs(pictures) if isinstance(vision, TwoEncoders) else pictures
            stored[name] = torch.cat([vision(torch.from_numpy(np.stack(some))) for some in chunks(pictures, 64)]).half()
        labels = torch.from_numpy(kitchen.labels()[..., :2]).long()
        narrations = [(n.frame, layout.encode(" " + n.text)) for n in kitchen.narrations]
        found.append(Scene(stored[name].float(), narrations, labels, variant))
    if cache and len(stored) > before:
        write_tensors(cache, stored)
    return found


def last_seen(labels: Tensor) -> Tensor:
    """What each place showed last, up to and including each frame: labels [T, 9, 2] -> [T, 9, 2], 0: nothing so far."""
    frame = torch.arange(len(labels))[:, None]
    last = torch.where(labels[..., 0] > 0, frame, 0).cummax(0).values                # [T, 9]
    return labels[last, torch.arange(9)]


# ---------------------------------------------------------------------------------------------- look, recall

def inventory(labels: Tensor, variant: world.World = world.WORLDS["plain"]) -> str:
    """labels [9, 2] -> ' the shelf: red cup\\nthe drawer: green bowl', in the order of the places.

    In random order nobody could tell which comes next, and it depended on the seed whether stage look learned to see.
    """
    return " " + "\n".join(f"the {place}: {' '.join(variant.words(*thing))}"
                           for place, thing in zip(variant.places, labels.tolist()) if thing[0])


def short_loss(narrator: nar.Narrator, x: list[Tensor], starts: list[int],
               narrations: list[list[tuple[int, list[int]]]]) -> tuple[Tensor, int]:
    """Narrator.loss of the ends of several videos in one pass -> sum over the learned tokens, their number.

    x [T, J, D] of each video, the frame at which its sequence starts, and its narrations (frame from there on, ids), as
    many for each; the memory sees all frames. Sequences are padded at their ends, where no other token sees it. Routers
    take one sequence at a time.
    """
    if narrator.routing.layers and len(x) > 1:
        parts = [short_loss(narrator, *([y] for y in one)) for one in zip(x, starts, narrations)]
        return sum(loss for loss, _ in parts), sum(learned for _, learned in parts)
    rows, (layout, config) = [narrator.layout.sequence(one) for one in narrations], (narrator.layout, narrator.config)
    for row in rows:
        row.add([layout.eot] * (max(map(len, rows)) - len(row)), nar.PROMPT, segment=0)
    tokens, memory, history = sum(rows, nar.Tokens()), None, None
    if layout.M and len(narrations[0]) > 1:
        read_at = torch.tensor([[narrator.read_at(start + frame) for frame, _ in one[:-1]]
                                for start, one in zip(starts, narrations)])
        memory, _ = narrator.memory(pad_sequence([y.flatten(0, 1) for y in x], batch_first=True), read_at)
    if layout.N and len(narrations[0]) > 1:
        history = torch.cat([narrator.narration_memory(*narrator.spoken(one[:-1]))[0] for one in narrations])
    e = narrator.embed(torch.tensor(tokens.ids), torch.cat([y[start:] for y, start in zip(x, starts)]),
                       narrator.embed_memory(memory, history))
    mask = torch.stack([nar.attention_mask(row, config.last_k, config.prune) for row in rows])
    hidden = narrator.llm.model(inputs_embeds=rearrange(e, "(b l) d -> b l d", b=len(rows)),
                                attention_mask=mask[:, None], use_cache=False).last_hidden_state
    learned = torch.tensor(tokens.learn[1:]).nonzero()[:, 0]
    logits = narrator.logits(hidden.flatten(0, 1).index_select(0, learned))
    return F.cross_entropy(logits, torch.tensor(tokens.ids)[learned + 1], reduction="sum"), len(learned)


def inventories(fit: Callable, stage: str, narrator: nar.Narrator, videos: list[Scene], steps: int, lr: float,
                seed: int, batch: int = 8):
    """What a pretrained language model knows before it becomes a narrator, in miniature: to name what an image shows.

    look      one frame, and the list of what is visible in it
    recall    two frames with the memory of all before them, and the list of what is, or was last, at each place

    The frame that is listed is never one that shows no thing (in the dark).
    """
    narrator.train()
    encode = narrator.layout.encode

    def backward(step: int) -> tuple[float, int]:
        chance, x, starts, narrations = random.Random(f"{stage} {seed} {step}"), [], [], []
        for video in chance.choices(videos, k=batch):
            t = 1 + chance.choice(video.labels[1:-1].flatten(1).any(1).nonzero().flatten().tolist())
            lists = [(0, encode(inventory(video.labels[t], video.variant)))]
            if stage == "recall":
                known = last_seen(video.labels[:t + 2])[-1]
                lists.append((1, encode(inventory(known, video.variant))))
            x.append(video.x[:t + len(lists)])
            starts.append(t)
            narrations.append(lists)
        loss, learned = short_loss(narrator, x, starts, narrations)
        (loss / learned).backward()
        return loss.item() / learned, learned + narrator.config.J * sum(map(len, narrations))

    fit(stage, narrator.trainable(), backward, steps, lr)


def take_over(narrator: nar.Narrator, path: Path):
    """Set LoRA and connector as in a state of train.py; BadData if it is unfinished, or of other sizes."""
    try:
        with safe_open(path, "pt") as file:
            about, weights = file.metadata(), {name: file.get_tensor(f"{name}|value") for name in sighted(narrator)}
        finished = int(about["step"]) == json.loads(about["settings"])["steps"]
    except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
        raise BadData(f"--look: {path} is not the finished stage of a like narrator ({first_line(error)})") from error
    if not finished:
        raise BadData(f"--look: {path} is of an unfinished stage; continue that training with --resume")
    with torch.no_grad():
        fill(sighted(narrator), weights, path)


def sighted(narrator: nar.Narrator) -> dict[str, nn.Parameter]:
    """What stage look trains."""
    return {name: p for name, p in narrator.trainable().items() if ".lora_" in name or ".connector." in name}


# ---------------------------------------------------------------------------------------------- remember

def remember(fit: Callable, memory: nn.Module, videos: list[Scene], steps: int, seed: int, lr: float = 1e-3,
             batch: int = 4, reads: int = 12):
    """A memory alone, with a linear head that is not kept: memory token 1 + p gives type and colour of what place p
    showed last, wherever it shows nothing now; if there are fewer, each serves several places. Up to four videos in a
    row make a long one."""
    first, shares = min(1, memory.M - 1), -(-9 // max(1, memory.M - 1))
    head, chance = nn.Linear(memory.width, shares * sum(world.SIZES[:2])), random.Random(f"remember {seed}")
    plan = [[chance.choices(range(len(videos)), k=chance.randint(1, 4)) for _ in range(batch)] for _ in range(steps)]

    def backward(step: int) -> tuple[float, int]:
        total, tokens = 0.0, 0
        for row in plan[step]:
            x, labels = (torch.cat([getattr(videos[i], name) for i in row]) for name in ("x", "labels"))
            frames = torch.randperm(len(x))[:reads * len(row)].sort().values
            known, hidden = last_seen(labels)[frames], labels[frames][..., 0] == 0
            hidden &= known[..., 0] > 0
            tokens_read, _ = memory(rearrange(x, "t j d -> 1 (t j) d"), (frames[None] + 1) * x.shape[1])
            answers = rearrange(head(tokens_read[0, :, first:]), "n m (s a) -> n (s m) a", s=shares)[:, :9]
            answers = answers.split(world.SIZES[:2], dim=-1)
            loss = sum(F.cross_entropy(y[hidden], known[hidden][:, i], reduction="sum") for i, y in enumerate(answers))
            loss = loss / batch / max(1, int(hidden.sum()))                     # nothing may be hidden in a short video
            loss.backward()
            total, tokens = total + loss.item(), tokens + x[..., 0].numel()
        return total, tokens

    fit("remember", dict(nn.ModuleDict({"memory": memory, "head": head}).named_parameters()), backward, steps, lr)


# ---------------------------------------------------------------------------------------------- the order

STEPS = {"look": 1400, "remember": 900, "recall": 600}


def before_narrating(fit: Callable, narrator: nar.Narrator, videos: list[Scene], lr: float, seed: int,
                     alone: bool = True, look: str | None = None):
    """What a new narrator learns before the paper's training; `remember` is for memories that can learn, if `alone`.
    With the folder of another training, its stage `look` is taken over: narrators that are compared see equally well.
    """
    if look:
        take_over(narrator, Path(look) / "look-state.safetensors")
    else:
        inventories(fit, "look", narrator, videos, STEPS["look"], lr, seed)
    if alone and list(narrator.memory.parameters()):
        remember(fit, narrator.memory, videos, STEPS["remember"], seed)
    inventories(fit, "recall", narrator, videos, STEPS["recall"], lr, seed)
