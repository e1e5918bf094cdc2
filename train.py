"""Training (paper §3.5, App. B.6): cross entropy on narration tokens and the trigger, through LoRA, connector and CLAM.

The paper's recipe is the default: AdamW, 2e-4, cosine with 5 % warm-up, gradients clipped at 1, LoRA of rank 128 and
alpha 256 on all linear layers, an effective batch of 64 videos, 2 epochs. Language model and vision encoder are frozen.

    python train.py --data toy --output out/toy        the bundled narrator again, from nothing, in five stages:
        encoder     a small SigLIP learns to see: what is in each cell of a frame (supervised, labels of the world)
        language    a small Llama learns to read: the world's sentences, and to look facts up in its context
        look        both are frozen from here on; LoRA and connector learn to list what a frame shows
        recall      with CLAM: what was last seen at a place, too
        narrator    the paper's training

Everything is resumable (`--resume`) and goes on exactly as if it had not been interrupted: parameters, optimizer and
random state are in one file, and which videos a step sees depends on seed and step alone.
"""
import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from math import cos, pi
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

import data
import narrator as nar
from toy import world


def option(default, text: str):
    return field(default=default, metadata={"help": text})


@dataclass
class Options:
    data: str = option("ego4d", "toy | ego4d | egoexo4d | ek100")
    root: str | None = option(None, "folder of the data set")
    output: str = option("out/narrator", "folder of the checkpoint, the log and the loss curve")
    llm: str | None = option(None, "frozen language model: hub id or folder (toy: trained, if not given)")
    vision: str | None = option(None, "frozen vision encoder: hub id or folder (toy: trained, if not given)")
    init: str | None = option(None, "start from this checkpoint's weights")
    resume: bool = option(False, "go on where an interrupted run in --output stopped")
    memory: str = option("clam", "clam | recent | none")
    memory_tokens: int = option(20, "M")
    memory_heads: int = option(8, "heads of CLAM")
    last_k: int | None = option(None, "narrations kept in context (FlowNar-C: 10); default all")
    no_prune: bool = option(False, "the baseline VideoLLM-online: nothing is removed from the context")
    lr: float = option(2e-4, "peak learning rate")
    warmup: float = option(0.05, "share of the steps in which the learning rate rises")
    clip: float = option(1.0, "largest norm of the gradient")
    batch: int = option(64, "videos per step, by gradient accumulation")
    epochs: float = option(2.0, "passes through the training videos")
    lora_rank: int = option(128, "rank of the LoRA matrices")
    lora_alpha: int = option(256, "their scale times the rank")
    lora_dropout: float = option(0.05, "dropout on their input")
    memory_dropout: float = option(0.1, "dropout in CLAM's self-attention")
    max_frames: int = option(1200, "a longer video is cut")
    checkpointing: bool = option(False, "recompute activations in the backward pass: less memory, more time")
    limit: int | None = option(None, "use only so many training videos")
    seed: int = option(0, "of the initialisation and of the order of the videos")
    save_every: int = option(50, "steps between two states that --resume can go on from")


# What differs for the miniature world: small models, one narration model for videos of any length (FlowNar-C).
TOY = {"output": "out/toy", "lr": 7e-4, "batch": 4, "epochs": 3.0, "lora_dropout": 0.0, "memory_dropout": 0.0,
       "memory_tokens": 10, "memory_heads": 4, "last_k": 10, "limit": 800}
LOOK, RECALL = 900, 600  # steps of the toy's inventories


# ---------------------------------------------------------------------- one training loop for all stages

def schedule(step: int, steps: int, warmup: float) -> float:
    """Share of the peak learning rate at a step: linear warm-up, then cosine to zero."""
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + cos(pi * (step - rising) / max(1, steps - rising)))


def fit(stage: str, parameters: dict[str, Tensor], backward: Callable[[int], tuple[float, int]], steps: int, lr: float,
        options: Options):
    """Minimise: backward(step) runs forward and backward of a batch and returns its loss and number of tokens."""
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    state, log = folder / f"{stage}-state.safetensors", folder / f"{stage}-log.jsonl"
    optimizer = torch.optim.AdamW(parameters.values(), lr=lr, weight_decay=0.0)
    start = restore(state, parameters, optimizer) if options.resume and state.exists() else 0
    kept = log.read_text().splitlines()[:start] if start else []
    progress = tqdm(range(start, steps), initial=start, total=steps, desc=stage, unit="step", mininterval=1)
    with log.open("w") as file:
        file.writelines(line + "\n" for line in kept)
        for step in progress:
            began = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = lr * schedule(step, steps, options.warmup)
            optimizer.zero_grad()
            loss, tokens = backward(step)
            norm = nn.utils.clip_grad_norm_(parameters.values(), options.clip)
            if not norm.isfinite():
                raise FloatingPointError(f"{stage}: the gradient is not finite at step {step}; lower --lr")
            optimizer.step()
            speed = tokens / (time.perf_counter() - began)
            file.write(json.dumps({"step": step, "loss": loss, "tokens_per_s": round(speed)}) + "\n")
            file.flush()
            progress.set_postfix(loss=f"{loss:.3f}", tok_s=f"{speed:.0f}")
            if (step + 1) % options.save_every == 0 or step + 1 == steps:
                snapshot(state, step + 1, parameters, optimizer)
    curve(log, folder / f"{stage}-loss.png")


def snapshot(path: Path, step: int, parameters: dict[str, Tensor], optimizer: torch.optim.Optimizer):
    """All that `restore` needs, in one file that appears whole or not at all."""
    tensors = {"random": torch.get_rng_state()}
    for name, p in parameters.items():
        tensors[f"{name}|value"] = p.detach()
        if p in optimizer.state:                # what a stage does not reach has none
            tensors |= {f"{name}|m": optimizer.state[p]["exp_avg"], f"{name}|v": optimizer.state[p]["exp_avg_sq"]}
    tensors = {name: t.cpu().contiguous() for name, t in tensors.items()}
    nar.write(path, lambda file: save_file(tensors, file, metadata={"step": str(step)}))


@torch.no_grad()
def restore(path: Path, parameters: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> int:
    """Put a snapshot back; returns the step to go on with."""
    with safe_open(path, "pt") as file:
        step = int(file.metadata()["step"])
        keys = set(file.keys())
        stored = {key.removesuffix("|value") for key in keys if key.endswith("|value")}
        if stored != set(parameters) or any(list(file.get_slice(f"{n}|value").get_shape()) != list(p.shape)
                                            for n, p in parameters.items()):
            raise data.BadData(f"{path} comes from a run with other settings: use them again, or another --output")
        for name, p in parameters.items():
            p.copy_(file.get_tensor(f"{name}|value"))
            if f"{name}|m" in keys:
                optimizer.state[p] = {"step": torch.tensor(float(step)), "exp_avg": file.get_tensor(f"{name}|m").to(p),
                                      "exp_avg_sq": file.get_tensor(f"{name}|v").to(p)}
        torch.set_rng_state(file.get_tensor("random"))
    return step


def curve(log: Path, png: Path):
    """The loss curve as a picture: every step, and a running mean."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    losses = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
    width = max(1, len(losses) // 50)
    smooth = [sum(losses[max(0, i - width + 1):i + 1]) / min(i + 1, width) for i in range(len(losses))]
    figure, axes = plt.subplots(figsize=(6, 3.5))
    axes.plot(losses, color="#c0c0c0", linewidth=0.8)
    axes.plot(smooth, color="#2060a0")
    axes.set(xlabel="step", ylabel="loss", title=log.stem, yscale="log")
    figure.savefig(png, dpi=100, bbox_inches="tight")
    plt.close(figure)


# ---------------------------------------------------------------------- stage narrator (§3.5)

@dataclass
class Example:
    """One training video: x [T, J, D] and its narrations (frame, token ids without EOT)."""
    x: Tensor
    narrations: list[tuple[int, list[int]]]


def order(count: int, batch: int, step: int, seed: int) -> list[int]:
    """Which examples a step sees: epoch after epoch in a new random order, from seed and step alone."""
    chosen = []
    for position in range(step * batch, (step + 1) * batch):
        epoch, index = divmod(position, count)
        permutation = torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
        chosen.append(int(permutation[index]))
    return chosen


def train_narrator(narrator: nar.Narrator, examples: list[Example], options: Options):
    """LoRA, connector and memory on the examples."""
    narrator.train()
    if options.checkpointing:
        narrator.llm.gradient_checkpointing_enable({"use_reentrant": False})
    steps = max(1, round(options.epochs * len(examples) / options.batch))

    def backward(step: int) -> tuple[float, int]:
        total, tokens = 0.0, 0
        for index in order(len(examples), options.batch, step, options.seed):
            example = examples[index]
            loss, learned = narrator.loss(example.x, example.narrations)
            (loss / learned / options.batch).backward()
            total, tokens = total + loss.item() / learned / options.batch, tokens + example.x[..., 0].numel() + learned
        return total, tokens

    fit("narrator", narrator.trainable(), backward, steps, options.lr, options)
    narrator.eval()


def build(options: Options, llm: str, vision: str, width: int) -> nar.Narrator:
    """A narrator at its start: from --init, or anew."""
    changes = {"memory": options.memory, "memory_tokens": options.memory_tokens, "memory_heads": options.memory_heads,
               "memory_dropout": options.memory_dropout, "last_k": options.last_k, "prune": not options.no_prune}
    if options.init:
        return nar.load(options.init, llm=llm, **changes)
    config = nar.Config(llm=llm, vision=vision, width=width, lora_rank=options.lora_rank, lora_alpha=options.lora_alpha,
                        lora_dropout=options.lora_dropout, **changes)
    return nar.Narrator(*nar.load_llm(llm), config)


# ---------------------------------------------------------------------- the miniature world, from nothing

def language_batches(tokenizer, length: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Endless token batches [batch, length] of the world's documents."""
    documents, ids = world.documents(seed), []
    while True:
        while len(ids) < batch * length:
            text = next(documents)
            ids += [tokenizer.bos_token_id] + tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        yield torch.tensor(ids[:batch * length]).view(batch, length)
        ids = ids[batch * length:]


def train_tokenizer(folder: Path, seed: int):
    """Byte-level BPE with Llama 3's way of splitting, learned on the world's documents and the layout's pieces."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    split = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(split, "isolated"),
                                                       pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=640, special_tokens=["<|begin_of_text|>", "<|eot_id|>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    documents = world.documents(seed)
    pieces = [nar.SYSTEM + "\n\n", f"User: {nar.INSTRUCTION}\n", "[", "]\n", ",", "Assistant:", "\n"]
    tokenizer.train_from_iterator([next(documents) for _ in range(2000)] + pieces * 50, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>",
                                      clean_up_tokenization_spaces=False)
    wrapped.save_pretrained(folder)
    return wrapped


def train_language(folder: Path, options: Options, steps: int = 500, batch: int = 16, length: int = 256):
    """Stage language: a small Llama on the world's documents (next-token prediction)."""
    from transformers import LlamaConfig, LlamaForCausalLM
    tokenizer = train_tokenizer(folder, options.seed)
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=4,
                         num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=131072,
                         rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, tie_word_embeddings=True,
                         bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    llm = LlamaForCausalLM(config)
    for module in llm.modules():   # the library's 0.02 is for wide models: at width 128 attention would start all but flat
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.7 * module.in_features ** -0.5)
    nn.init.normal_(llm.get_input_embeddings().weight, std=0.1)
    batches = language_batches(tokenizer, length, batch, options.seed)
    pool = [next(batches) for _ in range(steps)]

    def backward(step: int) -> tuple[float, int]:
        loss = llm(input_ids=pool[step], labels=pool[step]).loss
        loss.backward()
        return loss.item(), pool[step].numel()

    fit("language", dict(llm.named_parameters()), backward, steps, 2e-3, options)
    llm.to(torch.bfloat16).save_pretrained(folder)


@dataclass
class Scene(Example):
    """A training video of the world: also what can be seen in each of the nine places, by frame."""
    shown: list[dict[int, str]] = field(default_factory=list)


def toy_scenes(vision: nar.VisionEncoder, layout: nar.Layout, options: Options, cache: Path) -> list[Scene]:
    """The toy's training videos; their frame tokens are encoded once and kept in a file beside the encoder."""
    stored = load_file(cache) if cache.exists() else {}
    scenes = []
    samples = zip(data.TOY_SEEDS["train"], data.toy_samples("train", options.limit))
    for seed, sample in tqdm(samples, total=options.limit, desc="encoding", unit="video"):
        name = str(seed)
        if name not in stored:
            frames = map(torch.from_numpy, sample.frames())
            stored[name] = torch.cat([vision(torch.stack(chunk)) for chunk in chunks(frames, 64)]).half()
        labels = world.Kitchen(seed, len(sample.narrations) - 1).labels()[..., :2].tolist()
        shown = [{place: f"{world.COLOURS[colour - 1]} {world.TYPES[kind - 1]}" for place, (kind, colour) in enumerate(row)
                  if kind} for row in labels]
        scenes.append(Scene(stored[name].float(), [(f, layout.encode(" " + text)) for f, text in sample.narrations], shown))
    nar.write(cache, lambda file: save_file(stored, file))
    return scenes


def inventory(things: dict[int, str], most: int, chance: random.Random) -> str:
    """' the drawer: green bowl\\nthe shelf: red cup', for some of the places in random order."""
    places = chance.sample(sorted(things), min(most, len(things)))
    return " " + "\n".join(f"the {world.PLACES[place]}: {things[place]}" for place in places)


def train_inventories(stage: str, narrator: nar.Narrator, scenes: list[Scene], steps: int, options: Options):
    """What a language model knows before it meets a narrator's data, in miniature: to name what an image shows.

    look      one frame, and the list of what is visible in it
    recall    two frames with the memory of all before them, and the list of what is, or was last, at some places
    """
    narrator.train()
    batch = 8

    def backward(step: int) -> tuple[float, int]:
        chance, total, tokens = random.Random(f"{stage} {options.seed} {step}"), 0.0, 0
        for _ in range(batch):
            scene, state, last = chance.choice(scenes), None, 0
            t = chance.randrange(2, len(scene.x))
            narrations = [(0, narrator.layout.encode(inventory(scene.shown[t - 1], 9, chance)))]
            if stage == "recall":
                known = {place: thing for shown in scene.shown[:t + 1] for place, thing in shown.items()}
                narrations.append((1, narrator.layout.encode(inventory(known, 6, chance))))
                before = rearrange(scene.x[:t - 1], "t j d -> 1 (t j) d")
                state, last = narrator.memory(before, torch.zeros(1, 0, dtype=torch.long))[1], 1
            loss, learned = narrator.loss(scene.x[t - 1:t + last], narrations, state)
            (loss / learned / batch).backward()
            total, tokens = total + loss.item() / learned / batch, tokens + learned + 10 * (1 + last)
        return total, tokens

    fit(stage, narrator.trainable(), backward, steps, options.lr, options)


def chunks(items: Iterator, size: int) -> Iterator[list]:
    chunk = []
    for item in items:
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


class CellHeads(nn.Module):
    """What stage encoder reads off a frame's tokens: the labels of each cell, and where and what the hand is doing."""

    def __init__(self, width: int):
        super().__init__()
        self.cell = nn.Linear(width, sum(world.SIZES) + 9)      # and which cell it is
        self.frame = nn.Linear(width, 10 + world.SIZES[4] + world.SIZES[3])

    def loss(self, x: Tensor, labels: Tensor, weights: list[Tensor]) -> Tensor:
        """x [B, J, D], labels [B, 9, A] -> cross entropy, rare classes weighted up."""
        *cells, which = self.cell(x[:, 1:]).split([*world.SIZES, 9], dim=-1)
        total = sum(F.cross_entropy(rearrange(y, "b n c -> (b n) c"), labels[..., i].flatten(), weights[i])
                    for i, y in enumerate(cells))
        total = total + 0.3 * F.cross_entropy(which.flatten(0, 1), torch.arange(9).repeat(len(x)))
        hand = labels[..., 4]
        targets = torch.where(hand.any(1), hand.argmax(1) + 1, 0), hand.amax(1), labels[..., 3].amax(1)
        frame = self.frame(x[:, 0]).split([10, world.SIZES[4], world.SIZES[3]], dim=-1)
        return total + 0.3 * sum(F.cross_entropy(y, target) for y, target in zip(frame, targets))


def augment(frames: Tensor) -> Tensor:
    """uint8 [B, H, W, 3] -> normalised [B, 3, H, W], with the brightness, blur and coarse colour of real files."""
    x = rearrange(frames.float() / 255, "b h w c -> b c h w")
    x = x * (0.9 + 0.2 * torch.rand(len(x), 1, 1, 1))
    if torch.rand(()) < 0.5:                                    # half the colour resolution, as in yuv420p
        grey = x.mean(1, keepdim=True)
        x = grey + F.interpolate(F.avg_pool2d(x - grey, 2), scale_factor=2, mode="bilinear")
    if torch.rand(()) < 0.5:
        x = x.lerp(F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False), 0.5 * torch.rand(()))
    x = x + 0.01 * torch.rand(()) * torch.randn_like(x)
    return (x.clamp(0, 1) - 0.5) / 0.5


def train_encoder(folder: Path, options: Options, steps: int = 2400, batch: int = 32, videos: int = 1600, each: int = 12):
    """Stage encoder: a small SigLIP, supervised with the labels of training frames."""
    from transformers import SiglipVisionConfig, SiglipVisionModel
    model = SiglipVisionModel(SiglipVisionConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=3,
                                                 num_attention_heads=4, image_size=world.SIZE, patch_size=16))
    heads, chance = CellHeads(128), random.Random(options.seed)
    frames, labels = [], []
    for seed in tqdm(data.TOY_SEEDS["train"][:videos], desc="rendering", unit="video"):
        kitchen = world.Kitchen(seed)
        chosen = chance.sample(range(len(kitchen)), each)
        frames.extend(kitchen.render(frame) for frame in chosen)
        labels.extend(kitchen.labels()[chosen])
    frames, labels = torch.from_numpy(np.stack(frames)), torch.from_numpy(np.stack(labels)).long()
    weights = []
    for i, size in enumerate(world.SIZES):
        counts = torch.bincount(labels[..., i].flatten(), minlength=size).clamp_min(1).float()
        weights.append(counts.rsqrt() * counts.sum() / counts.sqrt().sum())
    parameters = {f"model.{n}": p for n, p in model.named_parameters()} | {f"heads.{n}": p for n, p in heads.named_parameters()}

    def backward(step: int) -> tuple[float, int]:
        rows = torch.randint(len(frames), (batch,))
        loss = heads.loss(nar.frame_tokens(model, augment(frames[rows]), 3), labels[rows], weights)
        loss.backward()
        return loss.item(), batch * 10

    fit("encoder", parameters, backward, steps, 1.5e-3, options)
    model.to(torch.bfloat16).save_pretrained(folder)
    processor = {"image_processor_type": "SiglipImageProcessor", "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
                 "size": {"height": world.SIZE, "width": world.SIZE}, "do_resize": True, "do_normalize": True}
    nar.write(folder / "preprocessor_config.json", lambda file: file.write_text(json.dumps(processor, indent=1)))


def train_toy(options: Options):
    """The stages one after the other; encoder and language are not run again if their result is there."""
    output = Path(options.output)
    llm, vision = options.llm or str(output / "llm"), options.vision or str(output / "vision")
    for folder, stage in ((vision, train_encoder), (llm, train_language)):
        if not (Path(folder) / "model.safetensors").exists():
            torch.manual_seed(options.seed)
            stage(Path(folder), options)
    encoder = nar.VisionEncoder(vision)
    torch.manual_seed(options.seed)
    narrator = build(options, llm, vision, encoder.width)
    scenes = toy_scenes(encoder, narrator.layout, options, Path(vision).parent / "features.safetensors")
    if not options.init:
        narrator.initialise(torch.cat([scene.x for scene in scenes[:64]]))
    train_inventories("look", narrator, scenes, LOOK, options)
    train_inventories("recall", narrator, scenes, RECALL, options)
    train_narrator(narrator, scenes, options)
    nar.save(narrator, output, llm=None if options.llm else "llm", vision=None if options.vision else "vision",
             dtype=torch.bfloat16)


def parse() -> Options:
    """Command line from the fields of Options; --data toy brings its own defaults."""
    parser = argparse.ArgumentParser(description="Train a narrator.", argument_default=argparse.SUPPRESS)
    for f in fields(Options):
        kind = {"int | None": int, "str | None": str, "int": int, "float": float, "str": str}.get(str(f.type), f.type)
        toy = f" (toy: {TOY[f.name]})" if f.name in TOY else ""
        action = {"action": "store_true"} if isinstance(f.default, bool) else {"type": kind, "metavar": f.name.upper()}
        parser.add_argument("--" + f.name.replace("_", "-"), help=f"{f.metadata['help']}; default {f.default}{toy}", **action)
    given = vars(parser.parse_args())
    return Options(**(TOY if given.get("data") == "toy" else {}) | given)


def train(options: Options):
    torch.manual_seed(options.seed)
    began = time.perf_counter()
    if options.data == "toy":
        train_toy(options)
    else:
        data.load_dataset(options.data, options.root, "train", options.limit)
    print(f"done in {(time.perf_counter() - began) / 60:.1f} minutes: {options.output}", file=sys.stderr)


if __name__ == "__main__":
    options = parse()
    data.run(lambda: train(options), (nar.BadCheckpoint, FloatingPointError))
