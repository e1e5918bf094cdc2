"""Training (paper §3.5, App. B.6): cross entropy on narration tokens and the trigger, of LoRA,
connector and memory. Language model and vision encoder are frozen.

    python train.py --data ego4d --output out/ego4d    on frame features, from data/ego4d
    python train.py --data ek100 --init out/ego4d ...  fine-tuning: options that are given replace
                                                       the checkpoint's settings
    torchrun --nproc-per-node 4 train.py ...           batches are shared between processes
    python train.py --data toy --output out/toy        a narrator like the bundled one (toy/stages.py)

A killed training goes on (`--resume`) as if it had not been interrupted: the videos of a step
depend only on seed and step.

Does not include: sharded weights. (A rank-128 LoRA of an 8B model fits one 80 GB GPU with
`--checkpointing`: 34 GB for the longest video, of 19,107 tokens, and 200 GB without.)
"""
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import cos, pi

import torch
from torch import Tensor

import data
import narrator as nar
from support.common.iterate import next_one_ready
from support.common.options import DATASETS, FILES, LEAST, setting
from support.common.processes import my_share, sum_of
from support.engine.checkpoint import narrator_on_llm
from support.engine.frozen import find_model
from support.engine.registry import make_config


@dataclass
class Recipe:
    """The paper's recipe (§3.5, §4.1, App. B.6).

    Each field is an option, `--batch 64`, and so are many settings of the narrator (narrator.py:
    Config). The others, of how a training runs and of what the paper has not, are added in
    beyond/commands/train_command.py.
    """
    # not an option: the narrator's settings where they are not Config's; with --init, where they
    # are not the checkpoint's
    narrator: dict = field(default_factory=dict)

    # what is trained, on what
    data: str = setting("ego4d",
        " | ".join(DATASETS) + " | FOLDER of your own videos (support/files/own_videos.py)",
        compared=False)
    root: str | None = setting(None, "folder of the data set; default data/NAME",
        needs=FILES, compared=False)
    limit: int | None = setting(None, "use at most this many training samples")
    max_frames: int = setting(1200, "longer videos are cut", needs=FILES)
    init: str | None = setting(None,
        "start from this checkpoint (the paper: EgoExo4D and EK100 from Ego4D's)", compared=False)
    output: str = setting("out/narrator", "folder of the checkpoint, the log and the loss curve",
        compared=False)
    # AdamW
    batch: int = setting(64, "videos per step, by gradient accumulation")
    epochs: float = setting(2.0,
        "passes through the videos (own videos: 10, or more where the words are new)", (LEAST, 1e6))
    lr: float = setting(2e-4, "peak learning rate")
    warmup: float = setting(0.05, "fraction of the steps in which the learning rate rises", (0, 1))
    clip: float = setting(1.0, "gradients are clipped to this norm")


# ------------------------------------------------------ videos


@dataclass
class Example:
    """A training video."""
    x: Tensor                                  # frame tokens [T, J, D]
    narrations: nar.Narrations

    def loss(self, narrator: nar.Narrator) -> tuple[Tensor, int]:
        """The sum over its learned tokens, and how many these are."""
        return narrator.loss(self.x, self.narrations)


# A video is read when its turn comes.
Read = Callable[[], Example]


def read_example(sample: data.Sample, layout: nar.Layout) -> Example:
    """A sample's range of its feature file, and its narrations as tokens."""
    x = sample.read(0, sample.num_frames)
    return Example(x, layout.encode_narrations(sample.narrations))


def in_order(videos: Sequence[Read], batch: int, seed: int) -> Callable[[int], list[Read]]:
    """A function of a step that gives its videos. Each epoch has a new random order, the same in
    every run with the same seed.
    """
    def videos_of(step: int) -> list[Read]:
        return [videos[i] for i in order(len(videos), batch, step, seed)]

    return videos_of


def order(count: int, batch: int, step: int, seed: int) -> list[int]:
    """The examples (of `count`) of a step. Each epoch has a new random order.

    The result depends on seed and step alone, so that training can be resumed at any step.
    """
    examples = []
    for position in range(step * batch, (step + 1) * batch):
        epoch, index = divmod(position, count)
        examples.append(permutation(count, epoch, seed)[index])
    return examples


@lru_cache(2)                          # a batch can end one epoch and begin the next
def permutation(count: int, epoch: int, seed: int) -> list[int]:
    """The order of an epoch."""
    # another number for each seed and epoch, below a million epochs
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(count, generator=generator).tolist()


def number_of_steps(recipe: Recipe, videos: int) -> int:
    return max(1, round(recipe.epochs * videos / recipe.batch))


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
def mean_loss(narrator: nar.Narrator, videos: Sequence[Read]) -> float:
    """The mean loss of the learned tokens of all videos, without dropout. (The loss of a training
    step is the mean of the videos' means.) Each process computes a part of it.
    """
    def of_this_process() -> tuple[float, int]:
        losses = [video.loss(narrator) for video in next_one_ready(my_share(videos))]
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


def fit(
    parameters: dict[str, Tensor],
    backward: Callable[[int], float],
    steps: int,
    lr: float,
    recipe: Recipe,
    run,
) -> None:
    """The loop (App. B.6): AdamW, linear warm-up, then cosine, clipped gradients.

    backward    backward(step) runs forward and backward of a batch, or of this process's share of
                it -> its loss
    run         what is not the paper's: states, several processes, the log
                (beyond/training/run.py: Run)
    """
    # as in the authors' code: without weight decay, on which the paper is silent
    optimizer = torch.optim.AdamW(parameters.values(), lr=lr, weight_decay=0.0, fused=True)
    for step in run.steps(parameters, optimizer, steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * schedule(step, steps, recipe.warmup)
        optimizer.zero_grad(set_to_none=False)
        loss = run.sum(backward(step))                  # loss and gradients of all processes
        run.clip(recipe.clip)
        optimizer.step()
        run.done(loss)


def train(
    narrator: nar.Narrator,
    videos_of: Callable[[int], list[Read]],
    steps: int,
    recipe: Recipe,
    run,
) -> None:
    """Train LoRA, connector and memory on narrated videos; videos_of(step) gives those of a step."""
    narrator.train()

    def backward(step: int) -> float:
        videos = run.share(videos_of(step))             # this process's part
        return loss_of_batch(narrator, videos, recipe.batch)

    fit(narrator.trainable(), backward, steps, recipe.lr, recipe, run)
    narrator.eval()


# ------------------------------------------------------ load, make


def load_samples(recipe: Recipe, split: str, limit: int | None) -> list[data.Sample]:
    samples = data.load_dataset(recipe.data, recipe.root, split, limit)
    return data.shorten(samples, recipe.max_frames)


def narrator_for(recipe: Recipe, sample: data.Sample, dtype: torch.dtype) -> nar.Narrator:
    """A narrator for features like the sample's; its first weights are still to be set."""
    J, width = sample.read(0, 1).shape[1:]
    of_features = {"grid": round((J - 1) ** 0.5), "width": width, "fps": sample.fps}
    config = make_config(**recipe.narrator | of_features)
    return narrator_on_llm(config, find_model(config.llm, "llm"), dtype)


def pretrained(recipe: Recipe, dtype: torch.dtype = torch.float32) -> nar.Narrator:
    """The narrator of --init, with the settings that are given."""
    given = dict(recipe.narrator)
    # a model that is given may be another one: there is a training
    if "llm" in given:
        given["llm_mark"] = find_model(given["llm"], "llm").mark
    if "vision" in given:
        given["vision_mark"] = None
    return nar.load(recipe.init, dtype=dtype, **given)


if __name__ == "__main__":
    from beyond.commands.train_command import main
    main()
