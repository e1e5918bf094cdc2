"""Training (paper §3.5, App. B.6): cross entropy on narration tokens and the trigger, through LoRA, connector and CLAM.

The paper's recipe is the default: AdamW, 2e-4, cosine with 5 % warm-up, gradients clipped at 1, LoRA of rank 128 and
alpha 256 on all linear layers, an effective batch of 64 videos, 2 epochs. Language model and vision encoder are frozen.

    python train.py --data toy --output out/toy        the bundled narrator again, from nothing: first the stages of
                                                       toy/stages.py, which make its models, then the paper's training

Everything is resumable (`--resume`) and goes on exactly as if it had not been interrupted: parameters, optimizer and
random state are in one file, and which videos a step sees depends on seed and step alone.
"""
import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from math import cos, pi
from pathlib import Path

import torch
from einops import rearrange
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

import data
import narrator as nar
from toy import stages


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
    long: float = option(0.0, "share of the videos that are trained on as if they came late in a long stream")
    max_frames: int = option(1200, "a longer video is cut")
    checkpointing: bool = option(False, "recompute activations in the backward pass: less memory, more time")
    limit: int | None = option(None, "use only so many training videos")
    seed: int = option(0, "of the initialisation and of the order of the videos")
    save_every: int = option(50, "steps between two states that --resume can go on from")


# What differs for the miniature world: small models, one narration model for videos of any length (FlowNar-C).
TOY = {"output": "out/toy", "lr": 7e-4, "batch": 4, "epochs": 4.0, "lora_dropout": 0.0, "memory_dropout": 0.0,
       "memory_tokens": 10, "memory_heads": 4, "last_k": 10, "long": 0.5, "limit": 800}
LOOK, REMEMBER, RECALL = 900, 900, 600  # steps of the toy's own stages


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
    plt = nar.pyplot()
    losses = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
    width = max(1, len(losses) // 50)
    smooth = [sum(losses[max(0, i - width + 1):i + 1]) / min(i + 1, width) for i in range(len(losses))]
    figure, axes = plt.subplots(figsize=(6, 3.5))
    axes.plot(losses, color="#c0c0c0", linewidth=0.8)
    axes.plot(smooth, color="#2060a0")
    axes.set(xlabel="step", ylabel="loss", title=log.stem, yscale="log")
    nar.save_figure(figure, png)


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
        total, tokens, chance = 0.0, 0, random.Random(f"{options.seed} {step}")
        for index in order(len(examples), options.batch, step, options.seed):
            example = examples[index]
            state, before = past(narrator, examples, chance) if chance.random() < options.long else (None, 0)
            loss, learned = narrator.loss(example.x, example.narrations, state, before)
            (loss / learned / options.batch).backward()
            total, tokens = total + loss.item() / learned / options.batch, tokens + example.x[..., 0].numel() + learned
        return total, tokens

    fit("narrator", narrator.trainable(), backward, steps, options.lr, options)
    narrator.eval()


@torch.no_grad()
def past(narrator: nar.Narrator, examples: list[Example], chance: random.Random) -> tuple[Tensor, int]:
    """What a long stream has left behind: the memory's state after one to three other videos, and a number of tokens,
    from 1 to 100,000, that were fed and pruned."""
    x = torch.cat([chance.choice(examples).x for _ in range(chance.randint(1, 3))]).to(narrator.device)
    _, state = narrator.memory(rearrange(x, "t j d -> 1 (t j) d"), torch.zeros(1, 0, dtype=torch.long))
    return state, round(10 ** chance.uniform(0, 5))


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

def train_toy(options: Options):
    """The stages one after the other; encoder and language are not run again if their result is there."""
    output, train = Path(options.output), partial(fit, options=options)
    llm, vision = options.llm or str(output / "llm"), options.vision or str(output / "vision")
    for folder, stage in ((vision, stages.encoder), (llm, stages.language)):
        if not (Path(folder) / "model.safetensors").exists():
            torch.manual_seed(options.seed)
            stage(train, Path(folder), options.seed)
    encoder = nar.VisionEncoder(vision)
    torch.manual_seed(options.seed)
    narrator = build(options, llm, vision, encoder.width)
    videos = stages.scenes(encoder, narrator.layout, options.limit, Path(vision).parent / "features.safetensors")
    if not options.init:
        narrator.initialise(torch.cat([video.x for video in videos[:64]]))
    stages.inventories(train, "look", narrator, videos, LOOK, options.lr, options.seed)
    if options.memory == "clam":
        stages.remember(train, narrator.memory, videos, REMEMBER, options.seed)
    stages.inventories(train, "recall", narrator, videos, RECALL, options.lr, options.seed)
    train_narrator(narrator, videos, options)
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
