"""python train.py: its options, the data set and the model, and what is printed."""
import argparse
import shlex
from collections.abc import Sequence
from dataclasses import Field, fields
from pathlib import Path

import torch
import torch.distributed as dist

import data
from baselines import variants
from narrator import Config, Narrator
from support.common.devices import device_and_dtype, rank
from support.common.disk import check_writable
from support.common.errors import BadData, command_line
from support.common.options import DATASETS, Parser
from support.common.progress import say
from support.engine import checkpoint
from support.engine.cpu import speed_up
from support.engine.run_options import ToyOptions, flag_of
from support.engine.training import check_settings_of_state, portable_path, settings_of_run
from support.files import own_videos
from toy import stages
from toy.train import train_toy
from train import (
    Example, Recipe, begin, mean_loss, new_config, pretrained, save, train_narrator,
)

NOT_TOY = {"root", "dtype", "max_frames", "val_limit", "device"}
# what only a new narrator has, or learns in the toy before the paper's training
ONLY_NEW = {"start", "look", "freeze_memory", "freeze_lora", "recall", "recall_steps",
            "llm_width"}

# Own videos (--data FOLDER): with the paper's batches of 64, a few videos would give only a handful
# of steps. Epochs and rate: see `length_of_training`.
BATCH_OF_OWN_VIDEOS = 2
RATE = 2e-4                                    # the paper's
EPOCHS = 10.0
LEAST_STEPS = 150                              # to learn new words
NEW_WORDS = 2.0                                # loss of a token, in nats


# ------------------------------------------------------------------ options

def parse() -> Recipe:
    """Options from the command line: the fields of Recipe."""
    parser = Parser(description="Train a narrator.", argument_default=argparse.SUPPRESS)
    for kind in Recipe.__mro__[:-1]:                    # each class is a group; the paper's first
        group = parser.add_argument_group(kind.__doc__.splitlines()[0].rstrip("."))
        for f in fields(kind):
            if f.name in kind.__annotations__ and f.metadata:
                add_option(group, f)
    options = options_from(**vars(parser.parse_args()))

    for name in sorted(options.given):
        flag = flag_of(name, getattr(Recipe, name))
        if options.data == "toy" and name in NOT_TOY:
            parser.error(f"{flag}: the toy renders its videos, and trains on the CPU in float32")
        if options.data != "toy" and name in ToyOptions.__annotations__:
            parser.error(f"{flag}: only for the toy")
        if options.init and name in ONLY_NEW:
            parser.error(f"{flag} is for a new narrator; --init brings one")
    if options.llm and "llm_width" in options.given:
        parser.error("--llm-width is of a language model that is trained; --llm brings one, and "
                     "so does --quick")
    if options.memory == "none" and "memory_tokens" in options.given:
        parser.error("--memory none has no --memory-tokens")
    return options


def add_option(group, f: Field):
    """Add a field of Recipe to the parser's options."""
    flag = flag_of(f.name, f.default)
    text = f.metadata["help"]
    if isinstance(f.default, bool):
        action = "store_false" if f.default else "store_true"
        group.add_argument(flag, help=text, action=action, dest=f.name)
        return
    if f.default is not None:
        text += f"; default {f.default}"
    if f.name in stages.DEFAULTS:
        text += f" (toy: {stages.DEFAULTS[f.name]})"
    kind = f.metadata["kind"]
    values = {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
    group.add_argument(flag, help=text, **values)


def options_from(**given) -> Recipe:
    """All options, of those that were given: the toy and own videos have defaults of their own."""
    values = {}
    data_set = given.get("data", Recipe.data)
    if data_set == "toy":
        values |= stages.DEFAULTS
        if given.get("quick"):
            values |= stages.QUICK
    elif data_set not in DATASETS:
        values["batch"] = BATCH_OF_OWN_VIDEOS
        values["start"] = "mimetic"
    if given.get("narration_memory"):
        values["last_k"] = 0                   # the second memory stands for past narrations
    if given.get("prune") is False:
        values["last_k"] = None
    values |= given
    if values.get("last_k") == "all":
        values["last_k"] = None
    for name in ("root", "llm", "vision", "look", "init"):
        if values.get(name):
            values[name] = portable_path(values[name])
    return Recipe(**values, given=frozenset(given))


# ------------------------------------------------------------------ a training

def train(options: Recipe):
    """Check the output folder, and train."""
    torch.manual_seed(options.seed)
    output = Path(options.output)
    finished = output / checkpoint.ADAPTER
    check_writable(finished)
    states = list(output.glob("*-state.safetensors"))
    if states and not options.resume:
        raise BadData(f"{states[0]} is of an interrupted training; "
                      f"give --resume to go on, or delete it")
    if finished.exists() and not states:
        raise BadData(f"{output} holds a finished narrator; delete it, or choose another --output")
    for state in states:
        # before anything is loaded; epochs and rate of own videos are chosen only then
        chosen = () if options.data in DATASETS else {"epochs", "lr"} - options.given
        check_settings_of_state(state, settings_of_run(options), chosen)
    process, processes = rank()
    if options.resume and not states and process == 0:
        say(f"--resume: {output} holds no interrupted training; it starts from the beginning")

    if options.data != "toy":
        train_annotated(options)
    elif processes == 1:
        train_toy(options)
    else:
        raise BadData("the toy trains in one process: start it without torchrun")
    if process == 0:
        for state in output.glob("*-state.safetensors"):
            state.unlink()
        root = ["--root", options.root] if options.root else []
        words = ["--data", options.data, *root, "--model", options.output]
        say(f"done: {output}; next: python evaluate.py stream {shlex.join(words)}")


def train_annotated(options: Recipe):
    """The paper's training on a data set, on one process or several."""
    process, processes = rank()
    device, dtype = device_and_dtype(options.device, options.dtype)
    samples = load_samples(options, "train", options.limit)
    held_out = load_samples(options, "val", options.val_limit) if options.val_limit else []
    if device.startswith("cuda:"):                              # under torchrun: this process's GPU
        torch.cuda.set_device(device)
    if processes > 1:
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")

    narrator = narrator_for(samples[0], options, dtype)
    examples = Annotated(samples, narrator)
    held_out = Annotated(held_out, narrator)
    if not options.init:
        begin(narrator, options, examples)
    narrator.to(device)
    speed_up(narrator, learns=True)
    if processes > 1:                                           # all start from the same weights
        for p in narrator.trainable().values():
            dist.broadcast(p.data, 0)
    if options.data not in DATASETS:
        choose_length(narrator, examples, options)
    train_narrator(narrator, examples, options, held_out)
    if process == 0:
        save(narrator, options)
    if processes > 1:
        dist.destroy_process_group()


def load_samples(options: Recipe, split: str, limit: int | None) -> list[data.Sample]:
    samples = data.load_dataset(options.data, options.root, split, limit)
    return [data.shorten(sample, options.max_frames) for sample in samples]


def narrator_for(sample: data.Sample, options: Recipe, dtype: torch.dtype) -> Narrator:
    """The narrator that is trained: that of --init, or a new one for features like the sample's."""
    vision = Config.vision                                      # of published features
    if options.data not in DATASETS:
        vision = own_videos.encoder_of(options.data, sample.name)
    if not options.init:
        J, width = sample.read(0, 1).shape[1:]
        llm = options.llm or Config.llm
        config = new_config(options, llm, options.vision or vision, J, width)
        config.fps = sample.fps
        return variants.new_narrator(*checkpoint.load_llm(llm, dtype), config)
    narrator = pretrained(options, dtype)
    looks_through = narrator.config.vision
    if options.data not in DATASETS and Path(vision).resolve() != Path(looks_through).resolve():
        # no error: a folder and a hub id can be the same model
        say(f"the features were made by {vision}, and the narrator looks through {looks_through}: "
            f"unless these are the same, encode the videos again (data.py encode --model)")
    return narrator


class Annotated(Sequence):
    """Samples of a data set as examples; an example's features are read when it is indexed, and
    only its range. BadData if the frames of a sample are not what the narrator needs.
    """

    def __init__(self, samples: list[data.Sample], narrator: Narrator):
        for sample in samples:
            data.check_sample(sample, narrator.config)
        self.samples = samples
        self.layout = narrator.layout

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Example:
        sample = self.samples[index]
        narrations = [(frame, self.layout.encode(" " + text)) for frame, text in sample.narrations]
        return Example(sample.read(0, sample.num_frames), narrations)


def choose_length(narrator: Narrator, examples: Sequence[Example], options: Recipe):
    """Set epochs and learning rate for own videos, unless they are given."""
    first = [examples[i] for i in range(min(8, len(examples)))]
    loss = mean_loss(narrator, first)
    width = narrator.llm.config.hidden_size
    chosen = length_of_training(loss, len(examples), options.batch, width)
    for name in chosen.keys() - options.given:
        setattr(options, name, chosen[name])
    if rank()[0] == 0:
        say(f"loss before training: {loss:.2f}; {options.epochs:.3g} epochs, peak learning rate "
            f"{options.lr:.2g}")


def length_of_training(loss: float, videos: int, batch: int, width: int) -> dict[str, float]:
    """Epochs and peak learning rate for own videos.

    loss        of the narrator before training, a token. Known words (below NEW_WORDS) need little:
                10 epochs at the paper's rate. New ones need some hundred steps, however few the
                videos are, and a language model that is narrower than the paper's a higher rate, in
                proportion to 1 / sqrt(width)
    width       of the language model
    """
    if loss < NEW_WORDS:
        return {"epochs": EPOCHS, "lr": RATE}
    return {
        "epochs": max(EPOCHS, LEAST_STEPS * batch / videos),
        "lr": RATE * max(1, (2048 / width) ** 0.5),
    }


def main():
    command_line(lambda: train(parse()))
