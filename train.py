"""Training (paper §3.5, App. B.6): cross entropy on narration tokens and the trigger, of LoRA,
connector and memory. Language model and vision encoder are frozen.

    Recipe          the paper's options, with its values
    loss_of_batch   the loss
    schedule, fit   the learning rate, and the loop
    train_narrator  all of it, on the videos of a data set

    python train.py --data ego4d --output out/ego4d    on frame features (data.py encode), from
                                                       data/ego4d
    python train.py --data ek100 --init out/ego4d ...  fine-tuning: options that are given replace
                                                       the checkpoint's settings; what contradicts
                                                       its weights is refused
    torchrun --nproc-per-node 4 train.py ...           the same training, its batches shared between
                                                       processes
    python train.py --data toy --output out/toy        a narrator like the bundled one, from
                                                       scratch: the stages of toy/stages.py, which
                                                       make its models, then the paper's training

A killed training goes on (`--resume`) as if it had not been interrupted: the state has parameters,
optimizer, random state and settings, and the videos of a step depend only on seed and step.

Does not include: training the encoder or the language model of a full-size narrator, sharded
weights (a rank-128 LoRA of an 8B model fits one 80 GB GPU).
"""
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from math import cos, pi

import torch
from torch import Tensor, nn

import narrator as nar
from baselines import variants
from streams.late import Past, late_in_a_stream
from support.common.devices import rank
from support.common.errors import BadData
from support.common.iterate import prefetch
from support.common.options import (
    DATASETS, in_range, kept_narrations, positive_float, positive_int, probability,
)
from support.engine.run_options import FurtherOptions, RunOptions, ToyOptions, flag_of, option
from support.engine.training import Run, order, portable_path, seed_dropout, sum_gradients, summed


@dataclass
class Recipe(FurtherOptions, variants.BaselineOptions, RunOptions, ToyOptions):
    """The paper's recipe (§3.5, §4.1, App. B.6).

    Each field is an option: `--memory-tokens 20`. Those that are not the paper's are in
    support/engine/run_options.py and baselines/variants.py.
    """
    # what is trained, on what
    data: str = option("ego4d",
        " | ".join(DATASETS) + " | FOLDER of your own videos (support/files/own_videos.py)",
    )
    init: str | None = option(None,
        "start from this checkpoint (the paper: EgoExo4D and EK100 from Ego4D's)",
    )
    llm: str | None = option(None,
        "frozen language model: hub id, folder or .gguf (toy: trained, if not given)",
    )
    vision: str | None = option(None,
        "frozen vision encoder: hub id or folder (toy: trained, if not given)",
    )
    # FlowNar (§3.3, §3.4)
    memory: str = option("clam", "the visual memory", tuple(nar.MEMORIES))
    memory_tokens: int = option(20, "memory tokens, M", positive_int)
    prune: bool = option(True,
        "nothing is removed from the context; with --memory none, the baseline VideoLLM-online",
    )
    last_k: int | None = option(None,
        'narrations kept in context (FlowNar-C: 10; 0: none), or "all"',
        kept_narrations,
    )
    # LoRA on all linear layers
    lora_rank: int = option(128, "rank of the LoRA matrices", positive_int)
    lora_alpha: int = option(256,
        "LoRA is scaled by alpha / rank (the paper: 256 / 128)",
        positive_int,
    )
    # AdamW
    batch: int = option(64, "videos per step, by gradient accumulation", positive_int)
    epochs: float = option(2.0,
        "passes through the videos (own videos: 10, or more where the words are new)",
        in_range(float, 1e-9, 1e6, "above 0, up to a million"),
    )
    lr: float = option(2e-4, "peak learning rate", positive_float)
    warmup: float = option(0.05,
        "fraction of the steps in which the learning rate rises",
        probability,
    )
    clip: float = option(1.0, "gradients are clipped to this norm", positive_float)


@dataclass
class Example:
    """A training video."""
    x: Tensor                                  # frame tokens [T, J, D]
    narrations: nar.Narrations
    past: Past | None = None                   # --long (streams/late.py); not in the paper


def loss_of_batch(narrator: nar.Narrator, videos: Iterable[Example], batch: int) -> float:
    """Forward and backward passes of a batch's videos, one after the other; gradients add up.

    The loss (§3.5) is the mean over a video's learned tokens, of narrations and trigger alike, then
    over the batch (as published).
    """
    total = 0.0
    for video in videos:
        loss, learned = narrator.loss(video.x, video.narrations, video.past)
        loss = loss / learned / batch
        loss.backward()
        total += loss.item()
    return total


def schedule(step: int, steps: int, warmup: float) -> float:
    """Fraction of the peak learning rate at a step: linear warm-up, then cosine to zero."""
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    fallen = (step - rising) / max(1, steps - rising)               # 0 .. 1
    return 0.5 * (1 + cos(pi * fallen))


def fit(stage: str, parameters: dict[str, Tensor], backward: Callable[[int], float], steps: int,
        lr: float, options: Recipe, validate: Callable[[int], dict] = lambda step: {}):
    """The loop (App. B.6): AdamW, linear warm-up, then cosine, clipped gradients.

    backward    backward(step) runs forward and backward of a batch, or of this process's share of
                it -> its loss
    validate    validate(step) gives further entries for the log
    """
    # as published: without weight decay, on which the paper is silent
    optimizer = torch.optim.AdamW(parameters.values(), lr=lr, weight_decay=0.0, fused=True)
    with Run(stage, parameters, optimizer, steps, options) as run:
        for step in run:
            for group in optimizer.param_groups:
                group["lr"] = lr * schedule(step, steps, options.warmup)
            # zeros instead of None: all processes have the same gradients to sum
            for p in parameters.values():
                p.grad = torch.zeros_like(p)
            loss, = summed(backward(step))
            sum_gradients(parameters)
            norm = nn.utils.clip_grad_norm_(parameters.values(), options.clip)
            if not norm.isfinite():
                raise BadData(f"{stage}: the gradient is not finite at step {step}: are features "
                              f"or weights damaged (NaN)? If they are not, lower --lr")
            with run.update(step):              # if it is cut off here, no state is saved
                optimizer.step()
            run.after(step, loss, validate)


def train_narrator(narrator: nar.Narrator, examples: Sequence[Example], options: Recipe,
                   held_out: Sequence[Example] = ()):
    """Train LoRA, connector and memory on the examples. After each epoch, log the loss on held-out
    ones.
    """
    narrator.train()
    if options.checkpointing:
        narrator.llm.gradient_checkpointing_enable({"use_reentrant": False})
    process, processes = rank()
    steps_per_epoch = max(1, round(len(examples) / options.batch))
    steps = max(1, round(options.epochs * len(examples) / options.batch))
    # after each epoch; if there are many, about ten times
    steps_to_validation = steps_per_epoch * max(1, round(options.epochs / 10))

    def backward(step: int) -> float:
        seed_dropout(options.seed, step)
        of_batch = order(len(examples), options.batch, step, options.seed)
        mine = of_batch[process::processes]
        videos = prefetch((examples[i] for i in mine), 1)          # a thread reads the next file
        if options.long:
            videos = late_in_a_stream(narrator, videos, examples, options, step)
        return loss_of_batch(narrator, videos, options.batch)

    def validate(step: int) -> dict:
        steps_done = step + 1
        is_due = steps_done % steps_to_validation == 0 or steps_done == steps
        if is_due and len(held_out):
            return {"val_loss": mean_loss(narrator, held_out)}
        return {}

    fit("narrator", narrator.trainable(), backward, steps, options.lr, options, validate)
    narrator.eval()


@torch.no_grad()
def mean_loss(narrator: nar.Narrator, examples: Sequence[Example]) -> float:
    """The mean loss of the learned tokens of all videos, without dropout. (The loss of a training
    step is the mean of the videos' means.) Each process computes a part of it.
    """
    process, processes = rank()
    narrator.eval()
    loss = 0.0
    learned = 0
    mine = range(process, len(examples), processes)
    for example in prefetch((examples[i] for i in mine), 1):
        loss_of_video, learned_of_video = narrator.loss(example.x, example.narrations)
        loss += loss_of_video.item()
        learned += learned_of_video
    narrator.train()
    loss, learned = summed(loss, learned)
    return loss / learned


# ------------------------------------------------------ how a training begins and ends

# what --init may change: it does not depend on the weights
FREE = ("llm", "vision", "last_k", "readout", "memory_dropout", "lora_dropout")


def settings_of(options: Recipe) -> dict:
    """The settings of a narrator that are options of its training."""
    return {f.name: getattr(options, f.name) for f in fields(options)
            if f.name in variants.SETTINGS}


def new_config(options: Recipe, llm: str, vision: str, J: int, width: int) -> nar.Config:
    """The settings of a new narrator (no --init), for frame tokens [J, width]."""
    settings = settings_of(options)
    settings |= {"llm": llm, "vision": vision, "width": width}
    settings["grid"] = round((J - 1) ** 0.5)
    settings["memory_target"] = options.start == "mimetic"
    return variants.make_config(**settings)


def pretrained(options: Recipe, dtype: torch.dtype = torch.float32) -> nar.Narrator:
    """The narrator of --init with the options that were given; BadData if they contradict its
    weights.
    """
    given = {name: value for name, value in settings_of(options).items() if name in options.given}
    free = {name: given.pop(name) for name in FREE if name in given}
    narrator = variants.load_narrator(options.init, dtype=dtype, **free)
    for name, value in given.items():
        trained = getattr(narrator.config, name, getattr(Recipe, name))
        if value != trained:
            flag = flag_of(name, getattr(Recipe, name))
            raise BadData(f"{flag} ({name} = {value}) contradicts --init {options.init}, where "
                          f"{name} = {trained}; leave one of them out")
    return narrator


def begin(narrator: nar.Narrator, options: Recipe, examples: Sequence[Example]):
    """Set the first weights of a new narrator (--start); mimetic ones are made from the first 128
    frames of each of at most 64 videos.
    """
    if options.start == "published":
        narrator.start_published()
    else:
        videos = range(min(64, len(examples)))
        # clones: a slice would keep all frames of its video in memory
        frames = [examples[i].x[:128].clone() for i in videos]
        narrator.initialise(torch.cat(frames))


def save(narrator: nar.Narrator, options: Recipe, dtype: torch.dtype | None = None):
    """Write a checkpoint that can be moved: models inside its folder have relative paths, others
    absolute ones.
    """
    config = narrator.config
    models = {name: portable_path(getattr(config, name), options.output)
              for name in config.MODEL_NAMES}
    narrator.save(options.output, dtype, **models)


if __name__ == "__main__":
    from commands.train import main
    main()
