"""Training (paper §3.5, App. B.6): cross entropy on narration tokens and the trigger, of LoRA,
connector and memory. Language model and vision encoder are frozen.

    Recipe          the paper's options, with its values
    loss_of_batch   the loss
    schedule, fit   the learning rate, and the loop
    train_narrator  the loop on narrated videos, with the loss on held-out ones
    train           all of it: load, make, train, save

    python train.py --data ego4d --output out/ego4d    on frame features (data.py encode), from
                                                       data/ego4d
    python train.py --data ek100 --init out/ego4d ...  fine-tuning: options that are given replace
                                                       the checkpoint's settings; what contradicts
                                                       its weights is refused
    torchrun --nproc-per-node 4 train.py ...           the same training, its batches shared between
                                                       processes
    python train.py --data toy --output out/toy        a narrator like the bundled one: the
                                                       stages of toy/stages.py, then the paper's
                                                       training

A killed training goes on (`--resume`) as if it had not been interrupted: the state has parameters,
optimizer, random state and settings, and the videos of a step depend only on seed and step.

Does not include: training the encoder or the language model of a full-size narrator, sharded
weights. (A rank-128 LoRA of an 8B model fits one 80 GB GPU with `--checkpointing`: 34 GB for the
longest video, of 19,107 tokens, and 200 GB without.)
"""
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from math import cos, isfinite, pi

import torch
from torch import Tensor, nn

import data
import narrator as nar
from support.common.devices import device_and_dtype, is_first_here, rank
from support.common.iterate import prefetch
from support.common.options import (
    DATASETS, in_range, kept_narrations, positive_float, positive_int, probability,
)
from support.common.processes import my_share, sum_of
from support.common.progress import say_as_one
from support.engine import checkpoint
from support.engine.run import (
    Run, begin_together, check_weights, order, paths_of_models, seed_each,
)
from support.engine.run_options import option
from support.engine.start import start_as_authors


@dataclass
class Recipe:
    """The paper's recipe (§3.5, §4.1, App. B.6).

    Each field is an option: `--memory-tokens 20`. The others, of how a training runs and of what
    the paper has not, are added in commands/train_command.py.
    """
    # what is trained, on what
    data: str = option("ego4d",
        " | ".join(DATASETS) + " | FOLDER of your own videos (support/files/own_videos.py)",
    )
    init: str | None = option(None,
        "start from this checkpoint (the paper: EgoExo4D and EK100 from Ego4D's)",
    )
    llm: str | None = option(None,
        "frozen language model: hub id, folder or .gguf (toy: the bundled one)",
    )
    vision: str | None = option(None,
        "frozen vision encoder: hub id or folder (toy: the bundled one)",
    )
    # FlowNar (§3.3, §3.4)
    memory: str = option("clam", "the visual memory")
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


# ------------------------------------------------------ videos


@dataclass
class Example:
    """A training video."""
    x: Tensor                                  # frame tokens [T, J, D]
    narrations: nar.Narrations

    def loss(self, narrator: nar.Narrator) -> tuple[Tensor, int]:
        """The sum over its learned tokens, and how many these are."""
        return narrator.loss(self.x, self.narrations)


class Examples(Sequence):
    """Samples of a data set as examples; an example's features are read when it is indexed, and
    only its range. BadData if the frames of a sample are not what the narrator needs.
    """

    def __init__(self, samples: list[data.Sample], narrator: nar.Narrator):
        if is_first_here():                     # one process looks at the files of a machine
            for sample in samples:
                data.check_sample(sample, narrator.config)
        self.samples = samples
        self.layout = narrator.layout

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Example:
        return self.example_of(self.samples[index])

    def example_of(self, sample: data.Sample) -> Example:
        narrations = self.layout.encode_narrations(sample.narrations)
        return Example(sample.read(0, sample.num_frames), narrations)


class Batches:
    """The videos of each step: the same in every run with the same seed."""

    def __init__(self, examples: Sequence[Example], options: Recipe):
        self.examples = examples
        self.options = options

    def of_step(self, step: int) -> list[Callable[[], Example]]:
        """What reads each video of a step, on whichever process."""
        numbers = order(len(self.examples), self.options.batch, step, self.options.seed)
        return [partial(self.examples.__getitem__, i) for i in numbers]

    def videos(self, step: int) -> Iterator[Example]:
        """This process's part of a step."""
        mine = my_share(self.of_step(step))
        return prefetch((read() for read in mine), 1)              # a thread reads the next file


# ------------------------------------------------------ §3.5 the loss


def loss_of_batch(narrator: nar.Narrator, videos: Iterable[Example], batch: int) -> float:
    """Forward and backward passes of a batch's videos, one after the other; gradients add up.

    The loss (§3.5) is the mean over a video's learned tokens, of narrations and trigger alike, then
    over the batch (as in the authors' code).
    """
    total = 0.0
    for video in videos:
        loss, learned = video.loss(narrator)
        loss = loss / learned / batch
        loss.backward()
        total += loss.item()
    return total


@torch.no_grad()
def mean_loss(narrator: nar.Narrator, examples: Sequence[Example]) -> float:
    """The mean loss of the learned tokens of all videos, without dropout. (The loss of a training
    step is the mean of the videos' means.) Each process computes a part of it.
    """
    def of_this_process() -> tuple[float, int]:
        mine = my_share(range(len(examples)))
        losses = [example.loss(narrator) for example in prefetch((examples[i] for i in mine), 1)]
        return sum(loss.item() for loss, _ in losses), sum(learned for _, learned in losses)

    narrator.eval()
    total, tokens = sum_of(of_this_process)
    narrator.train()
    return total / tokens


# ------------------------------------------------------ App. B.6 the loop


def schedule(step: int, steps: int, warmup: float) -> float:
    """Fraction of the peak learning rate at a step: linear warm-up, then cosine to zero."""
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    fallen = (step - rising) / (steps - rising)                     # 0 .. 1
    return 0.5 * (1 + cos(pi * fallen))


def fit(stage: str, parameters: dict[str, Tensor], backward: Callable[[int], float], steps: int,
        lr: float, options: Recipe, validate: Callable[[int], dict] = lambda step: {}):
    """The loop (App. B.6): AdamW, linear warm-up, then cosine, clipped gradients.

    backward    backward(step) runs forward and backward of a batch, or of this process's share of
                it -> its loss
    validate    validate(step) gives further entries for the log
    """
    # as in the authors' code: without weight decay, on which the paper is silent
    optimizer = torch.optim.AdamW(parameters.values(), lr=lr, weight_decay=0.0, fused=True)
    with Run(stage, parameters, optimizer, steps, options) as run:
        for step in run.steps():
            for group in optimizer.param_groups:
                group["lr"] = lr * schedule(step, steps, options.warmup)
            optimizer.zero_grad(set_to_none=False)
            loss = run.backward(backward, step)         # loss and gradients of all processes
            run.clip_gradients(options.clip)
            optimizer.step()
            run.done(step, loss, validate)


def train_narrator(narrator: nar.Narrator, examples: Sequence[Example], options: Recipe,
                   held_out: Sequence[Example] = (), batches: type[Batches] = Batches):
    """Train LoRA, connector and memory on the examples. After each epoch, log the loss on held-out
    ones.
    """
    narrator.train()
    parameters = narrator.trainable()
    if options.checkpointing:
        narrator.llm.gradient_checkpointing_enable({"use_reentrant": False})
    of_training = batches(examples, options)
    steps_per_epoch = max(1, round(len(examples) / options.batch))
    steps = max(1, round(options.epochs * len(examples) / options.batch))
    # after each epoch; if there are many, about ten times
    steps_to_validation = steps_per_epoch * max(1, round(options.epochs / 10))

    def backward(step: int) -> float:
        videos = seed_each(of_training.videos(step), options.seed, step * options.batch)
        return loss_of_batch(narrator, videos, options.batch)

    def validate(step: int) -> dict:
        steps_done = step + 1
        if steps_done % steps_to_validation and steps_done != steps:
            return {}
        check_weights(parameters, step)                 # all processes must still have the same
        if not len(held_out):
            return {}
        loss = mean_loss(narrator, held_out)
        if not isfinite(loss):
            say_as_one("the loss on held-out videos is not finite; look at their features")
            return {}
        return {"val_loss": loss}

    fit("narrator", parameters, backward, steps, options.lr, options, validate)
    narrator.eval()


# ------------------------------------------------------ load, make, train, save


def load_samples(options: Recipe, split: str, limit: int | None) -> list[data.Sample]:
    samples = data.load_dataset(options.data, options.root, split, limit)
    return [data.shorten(sample, options.max_frames) for sample in samples]


def settings_of(options: Recipe) -> dict:
    """The settings of a narrator that are options of its training."""
    names = {f.name for config_class in nar.NARRATORS for f in fields(config_class)}
    return {f.name: getattr(options, f.name) for f in fields(options) if f.name in names}


def new_config(options: Recipe, J: int, width: int, **others) -> nar.Config:
    """The settings of a new narrator for frame tokens [J, width]; `others` replace options."""
    settings = settings_of(options)
    for kind in nar.Config.MODEL_NAMES:
        if settings[kind] is None:              # not given: those of the paper
            del settings[kind]
    settings |= {"grid": round((J - 1) ** 0.5), "width": width}
    return nar.make_config(**settings | others)


def narrator_for(options: Recipe, sample: data.Sample, dtype: torch.dtype) -> nar.Narrator:
    """A narrator for features like the sample's; its first weights are still to be set."""
    J, width = sample.read(0, 1).shape[1:]
    config = new_config(options, J, width, fps=sample.fps)
    return nar.new_narrator(*checkpoint.load_llm(config.llm, dtype), config)


def pretrained(options: Recipe, dtype: torch.dtype = torch.float32) -> nar.Narrator:
    """The narrator of --init, with the options that were given."""
    given = {name: value for name, value in settings_of(options).items() if name in options.given}
    return nar.load(options.init, dtype=dtype, **given)


def save(narrator: nar.Narrator, options: Recipe, dtype: torch.dtype | None = None):
    """Write a checkpoint that can be moved, with its models if they are in the same folder."""
    narrator.save(options.output, dtype, **paths_of_models(narrator.config, options.output))


def train(options: Recipe, start: Callable = start_as_authors, learn: Callable = train_narrator):
    """Load, make, train, save. Under torchrun, all processes do this together, in a `process_group`
    (support/common/processes.py).

    options     the recipe, and how the training runs (commands/train_command.py: Options)
    start       start(narrator, examples, options) sets the first weights of a new narrator;
                default: those of the authors' code
    learn       in place of `train_narrator`
    """
    torch.manual_seed(options.seed)
    device, dtype = device_and_dtype(options.device, options.dtype)

    # load
    samples = load_samples(options, "train", options.limit)
    held_out = []
    if options.val_limit:
        held_out = load_samples(options, "val", options.val_limit)

    # make
    if options.init:
        narrator = pretrained(options, dtype)
    else:
        narrator = narrator_for(options, samples[0], dtype)
    examples = Examples(samples, narrator)
    if not options.init:
        start(narrator, examples, options)
    narrator.to(device)
    begin_together(narrator, samples, held_out, options)

    # train
    learn(narrator, examples, options, Examples(held_out, narrator))

    # save
    if rank()[0] == 0:
        save(narrator, options)


if __name__ == "__main__":
    from commands.train_command import main
    main()
