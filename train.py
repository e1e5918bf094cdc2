"""Training (paper §3.5, App. B.6): cross entropy on narration tokens and the trigger, through LoRA, connector and CLAM.

The paper's recipe is the default: AdamW, 2e-4, cosine with 5 % warm-up, gradients clipped at 1, LoRA of rank 128 and
alpha 256 on all linear layers, an effective batch of 64 videos, 2 epochs. Language model and vision encoder are frozen.

    python train.py --data ego4d --output out/ego4d    on frame features (data.py encode), from data/ego4d
    torchrun --nproc-per-node 4 train.py ...           the same training, its batches shared between processes
    python train.py --data toy --output out/toy        the bundled narrator again, from nothing: first the stages of
                                                       toy/stages.py, which make its models, then the paper's training

Everything is resumable (`--resume`) and goes on exactly as if it had not been interrupted: parameters, optimizer and
random state are in one file, and which videos a step sees depends on seed and step alone.

Does not include: training the encoder or the language model of a full-size narrator, sharded weights (a rank-128 LoRA of
an 8B model fits one 80 GB GPU).
"""
import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from math import cos, pi
from pathlib import Path

import torch
import torch.distributed as dist
from einops import rearrange
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

import data
import narrator as nar
from narrator import MEMORIES
from support import checkpoint
from support.common import BadData, choose, command_line, pyplot, rank, replacing, save_figure, write_text
from toy import stages


def option(default, text: str):
    return field(default=default, metadata={"help": text})


@dataclass
class Options:
    data: str = option("ego4d", "toy | ego4d | egoexo4d | ek100")
    root: str | None = option(None, "folder of the data set; default data/NAME")
    output: str = option("out/narrator", "folder of the checkpoint, the log and the loss curve")
    llm: str | None = option(None, "frozen language model: hub id, folder or .gguf (toy: trained, if not given)")
    vision: str | None = option(None, "frozen vision encoder: hub id or folder (toy: trained, if not given)")
    init: str | None = option(None, "start from this checkpoint (the paper: EgoExo4D and EK100 from Ego4D's)")
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
    val_limit: int = option(256, "videos of the validation loss after each epoch; 0: none")
    device: str = option("auto", "cpu | cuda | mps | auto (the toy: always the CPU)")
    dtype: str = option("auto", "of the frozen language model: float32 | bfloat16 | auto (bfloat16 on CUDA)")
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
        options: Options, validate: Callable[[int], dict] = lambda step: {}):
    """Minimise: backward(step) runs forward and backward of a batch and returns its loss and number of tokens.

    Under torchrun each process runs its part of the batch; gradients, losses and tokens are summed over processes.
    `validate(step)` gives further entries of the log.
    """
    me, world = rank()
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    state, log = folder / f"{stage}-state.safetensors", folder / f"{stage}-log.jsonl"
    optimizer = torch.optim.AdamW(parameters.values(), lr=lr, weight_decay=0.0)
    start = restore(state, parameters, optimizer) if options.resume and state.exists() else 0
    kept = log.read_text().splitlines()[:start] if start else []
    if me == 0:
        write_text(log, "".join(line + "\n" for line in kept))
    progress = tqdm(range(start, steps), initial=start, total=steps, desc=stage, unit="step", mininterval=1, disable=me > 0)
    for step in progress:
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = lr * schedule(step, steps, options.warmup)
        optimizer.zero_grad()
        loss, tokens = backward(step)
        if world > 1:
            loss, tokens = share(parameters, loss, tokens)
        norm = nn.utils.clip_grad_norm_(parameters.values(), options.clip)
        if not norm.isfinite():
            raise BadData(f"{stage}: the gradient is not finite at step {step}; lower --lr")
        optimizer.step()
        entry = {"step": step, "loss": loss, "tokens_per_s": round(tokens / (time.perf_counter() - began))} | validate(step)
        progress.set_postfix(loss=f"{loss:.3f}", tok_s=entry["tokens_per_s"])
        if me == 0:
            with log.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            if (step + 1) % options.save_every == 0 or step + 1 == steps:
                snapshot(state, step + 1, parameters, optimizer)
    if me == 0:
        curve(log, folder / f"{stage}-loss.png")


def share(parameters: dict[str, Tensor], loss: float, tokens: int) -> tuple[float, int]:
    """Sum gradients, loss and tokens over all processes (data parallelism; once a step, after the accumulation).

    A parameter that no video of this process has reached counts as zero: all processes talk about the same tensors.
    """
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters.values()]
    device = gradients[0].device
    flat = torch.cat([g.flatten().float() for g in gradients] + [torch.tensor([loss, float(tokens)], device=device)])
    dist.all_reduce(flat)
    *pieces, totals = flat.split([g.numel() for g in gradients] + [2])
    for p, piece in zip(parameters.values(), pieces):
        p.grad = piece.view_as(p).to(p.dtype)
    return totals[0].item(), int(totals[1].item())


def snapshot(path: Path, step: int, parameters: dict[str, Tensor], optimizer: torch.optim.Optimizer):
    """All that `restore` needs, in one file that appears whole or not at all."""
    tensors = {"random": torch.get_rng_state()}
    for name, p in parameters.items():
        tensors[f"{name}|value"] = p.detach()
        if p in optimizer.state:                # what a stage does not reach has none
            tensors |= {f"{name}|m": optimizer.state[p]["exp_avg"], f"{name}|v": optimizer.state[p]["exp_avg_sq"]}
    tensors = {name: t.cpu().contiguous() for name, t in tensors.items()}
    with replacing(path) as part:
        save_file(tensors, part, metadata={"step": str(step)})


@torch.no_grad()
def restore(path: Path, parameters: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> int:
    """Put a snapshot back; returns the step to go on with."""
    with safe_open(path, "pt") as file:
        step = int(file.metadata()["step"])
        keys = set(file.keys())
        stored = {key.removesuffix("|value") for key in keys if key.endswith("|value")}
        if stored != set(parameters) or any(list(file.get_slice(f"{n}|value").get_shape()) != list(p.shape)
                                            for n, p in parameters.items()):
            raise BadData(f"{path} comes from a run with other settings: use them again, or another --output")
        for name, p in parameters.items():
            p.copy_(file.get_tensor(f"{name}|value"))
            if f"{name}|m" in keys:
                optimizer.state[p] = {"step": torch.tensor(float(step)), "exp_avg": file.get_tensor(f"{name}|m").to(p),
                                      "exp_avg_sq": file.get_tensor(f"{name}|v").to(p)}
        torch.set_rng_state(file.get_tensor("random"))
    return step


def curve(log: Path, png: Path):
    """The loss curve as a picture: every step, and a running mean."""
    plt = pyplot()
    losses = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
    width = max(1, len(losses) // 50)
    smooth = [sum(losses[max(0, i - width + 1):i + 1]) / min(i + 1, width) for i in range(len(losses))]
    figure, axes = plt.subplots(figsize=(6, 3.5))
    axes.plot(losses, color="#c0c0c0", linewidth=0.8)
    axes.plot(smooth, color="#2060a0")
    axes.set(xlabel="step", ylabel="loss", title=log.stem, yscale="log")
    save_figure(figure, png)


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


def train_narrator(narrator: nar.Narrator, examples: Sequence[Example], options: Options, held_out: Sequence[Example] = ()):
    """LoRA, connector and memory on the examples; the loss on held-out ones after each epoch."""
    me, world = rank()
    narrator.train()
    if options.checkpointing:
        narrator.llm.gradient_checkpointing_enable({"use_reentrant": False})
    steps = max(1, round(options.epochs * len(examples) / options.batch))
    epoch = max(1, round(len(examples) / options.batch))

    def backward(step: int) -> tuple[float, int]:
        total, tokens, chance = 0.0, 0, random.Random(f"{options.seed} {step}")
        torch.manual_seed((options.seed * 1_000_003 + step) * world + me)           # dropout: its own on each process
        for i, index in enumerate(order(len(examples), options.batch, step, options.seed)):
            earlier, before = gone_by(len(examples), chance) if chance.random() < options.long else ([], 0)
            if i % world != me:
                continue
            example, state = examples[index], past(narrator, [examples[j] for j in earlier]) if earlier else None
            loss, learned = narrator.loss(example.x, example.narrations, state, before)
            (loss / learned / options.batch).backward()
            total, tokens = total + loss.item() / learned / options.batch, tokens + example.x[..., 0].numel() + learned
        return total, tokens

    @torch.no_grad()
    def validate(step: int) -> dict:
        if not len(held_out) or (step + 1) % epoch and step + 1 != steps or me:
            return {}
        narrator.eval()
        sums = [narrator.loss(example.x, example.narrations) for example in held_out]
        narrator.train()
        return {"val_loss": sum(loss.item() for loss, _ in sums) / sum(learned for _, learned in sums)}

    fit("narrator", narrator.trainable(), backward, steps, options.lr, options, validate)
    narrator.eval()


def gone_by(count: int, chance: random.Random) -> tuple[list[int], int]:
    """What a long stream has behind it: one to three of `count` videos, and from 1 to 100,000 tokens fed and pruned."""
    return [chance.randrange(count) for _ in range(chance.randint(1, 3))], round(10 ** chance.uniform(0, 5))


@torch.no_grad()
def past(narrator: nar.Narrator, videos: list[Example]) -> Tensor:
    """The memory's state after these videos, one after the other."""
    x = rearrange(torch.cat([video.x for video in videos]), "t j d -> 1 (t j) d").to(narrator.device)
    return narrator.memory(x, torch.zeros(1, 0, dtype=torch.long, device=narrator.device))[1]


def build(options: Options, llm: str | None, vision: str, width: int, device: str = "cpu",
          dtype: torch.dtype = torch.float32) -> nar.Narrator:
    """A narrator at its start: from --init (llm None: the checkpoint's), or anew.

    What is trained is fp32, whatever the language model's dtype.
    """
    changes = {"last_k": options.last_k, "memory_dropout": options.memory_dropout, "lora_dropout": options.lora_dropout}
    if options.init:
        return nar.Narrator.load(options.init, llm, device, dtype, **changes)
    config = nar.Config(llm=llm, vision=vision, width=width, lora_rank=options.lora_rank, lora_alpha=options.lora_alpha,
                        memory=options.memory, memory_tokens=options.memory_tokens, memory_heads=options.memory_heads,
                        prune=not options.no_prune, **changes)
    return nar.Narrator(*checkpoint.load_llm(llm, dtype), config).to(device)


# ---------------------------------------------------------------------- Ego4D, EgoExo4D, EPIC-Kitchens-100

class Annotated(Sequence):
    """Samples of a data set as examples; the features of one are read when it is asked for, and only its range."""

    def __init__(self, samples: list[data.Sample], layout: nar.Layout):
        self.samples, self.layout = samples, layout

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Example:
        sample = self.samples[index]
        narrations = [(frame, self.layout.encode(" " + text)) for frame, text in sample.narrations]
        return Example(sample.read(0, sample.num_frames), narrations)


def train_annotated(options: Options):
    """The paper's training, on one process or several."""
    me, world = rank()
    load = partial(data.load_dataset, options.data, options.root, max_frames=options.max_frames)
    samples = list(load("train", options.limit))
    held_out = list(load("val", options.val_limit)) if options.val_limit and me == 0 else []
    device, dtype = choose(options.device, options.dtype)
    if device.startswith("cuda:"):                                                # under torchrun: this process's GPU
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    default = nar.Config()
    llm = options.llm or (None if options.init else default.llm)
    width = samples[0].read(0, 1).shape[-1]
    narrator = build(options, llm, options.vision or default.vision, width, device, dtype)
    if width != narrator.config.width:
        raise BadData(f"the features are {width} wide, {options.init} needs {narrator.config.width}; use its vision model")
    train_narrator(narrator, Annotated(samples, narrator.layout), options, Annotated(held_out, narrator.layout))
    if me == 0:
        narrator.save(options.output)
    if world > 1:
        dist.destroy_process_group()


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
    narrator.save(output, llm=None if options.llm else "llm", vision=None if options.vision else "vision",
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
    options = Options(**(TOY if given.get("data") == "toy" else {}) | given)
    for name in ("batch", "epochs", "lr", "clip", "lora_rank", "memory_tokens", "memory_heads", "max_frames", "save_every",
                 "last_k", "limit"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            parser.error(f"--{name.replace('_', '-')} must be greater than 0, not {value}")
    if options.memory not in MEMORIES:
        parser.error(f"--memory must be one of {', '.join(MEMORIES)}, not {options.memory}")
    return options


def train(options: Options):
    torch.manual_seed(options.seed)
    began = time.perf_counter()
    if options.data == "toy":
        if rank()[1] > 1:
            raise BadData("the toy trains in one process; without torchrun, please")
        train_toy(options)
    else:
        train_annotated(options)
    print(f"done in {(time.perf_counter() - began) / 60:.1f} minutes: {options.output}", file=sys.stderr)


if __name__ == "__main__":
    options = parse()
    command_line(lambda: train(options))
