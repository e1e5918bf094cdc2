"""python train.py: its options, what must hold before a training, and what is printed."""
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

import beyond.baselines                        # adds its narrators to narrator.py's
import narrator as nar
from data import check_sample, header_of_all
from narrator import Narrator
from support.common.devices import device_and_dtype, is_alone, is_first
from support.common.disk import check_apart, check_writable
from support.common.errors import BadData, command_line
from support.common.locks import locked
from support.common.options import (
    DATASETS, DEFAULT_MODEL, FILES, Parser, add_settings, dataset_folder, names_of,
    needs_of, refuse_without_effect,
)
from support.common.processes import process_group, together
from support.common.progress import say, say_as_one
from support.engine import checkpoint
from support.engine.cpu import speed_up
from support.engine.family import warn_of_longest
from support.engine.folders import portable_path
from support.engine.frozen import find_model
from support.engine.registry import NARRATORS
from beyond.training.run import Run, begin_together, recompute_activations
from beyond.training.options import FurtherOptions, RunOptions, ToyOptions
from support.engine.first_weights import first_weights
from support.files.features import Header, encoder_mark
from beyond.training.card import write_card
from beyond.training.late import late
from beyond.training.learned import tell_learned
from beyond.training.anywhere import from_anywhere
from train import (
    Read, Recipe, in_order, load_samples, mean_loss, narrator_for, number_of_steps, pretrained,
    read_example, train,
)

# the settings of a narrator that are options
SETTINGS = (
    "llm", "vision", "memory", "memory_tokens", "memory_heads", "memory_dropout", "readout",
    "prune", "last_k", "lora_rank", "lora_alpha", "lora_dropout", "grid", "mod_keep", "narration_memory",
)

# The toy (--data toy): small models with a smaller LoRA, and FlowNar-C, for videos of any length.
TOY = {
    "output": "out/toy",
    "lr": 7e-4,
    "warmup": 0.2,             # trainings differ less with it (beyond/experiments/README.md)
    "batch": 4,
    "epochs": 3.0,
    "lora_dropout": 0.0,
    "memory_dropout": 0.0,
    "memory_tokens": 10,
    "memory_heads": 4,
    "lora_rank": 16,
    "last_k": 10,
    "start": "mimetic",
    "connector_start": "mimetic",
    "long": 0.5,
    "limit": 800,
}
# The encoder and the language model of the toy are those of the bundled narrator.
TOY_MODELS = {
    "vision": str(Path(DEFAULT_MODEL) / "vision"),
    "llm": str(Path(DEFAULT_MODEL) / "llm"),
}
# With --quick: stage `look` of another narrator, no stage `recall`, few videos.
QUICK = {
    "look": str(Path(__file__).parents[1] / "experiments" / "base" / "look.safetensors"),
    "recall": False,
    "limit": 300,
    "batch": 2,
    "epochs": 2.0,
}
# Own videos (--data FOLDER): with the paper's batches of 64, a few videos would give only a handful
# of steps. Epochs and rate: see `length_of_training`.
OWN = {"batch": 2, "start": "mimetic"}
RATE = Recipe.lr
EPOCHS = 10.0
LEAST_STEPS = 600                              # to learn new words
NEW_WORDS = 2.0                                # loss of a token, in nats


# ------------------------------------------------------------------ options

@dataclass
class Options(Recipe, FurtherOptions, RunOptions, ToyOptions):
    """All options of python train.py: the paper's first. Each base is a group of --help."""
    # not an option: {name: value} of those that are given
    given: dict = field(default_factory=dict)


def parse() -> Options:
    """Options from the command line."""
    parser = Parser(description="Train a narrator.")
    for table in (*NARRATORS, *Options.__mro__[1:-1]):
        group = parser.add_argument_group(table.__doc__.splitlines()[0].rstrip("."))
        names = table.__annotations__.keys()
        if issubclass(table, nar.Config):
            names &= set(SETTINGS)
        add_settings(group, table, names, defaults=TOY)
    return options_from(**vars(parser.parse_args()))


def options_from(**given) -> Options:
    """All options, of those that are given: the toy and own videos have defaults of their own."""
    values = {}
    data_set = given.get("data", Options.data)
    if data_set == "toy":
        values |= TOY | TOY_MODELS
        if given.get("quick"):
            values |= QUICK
    elif data_set not in DATASETS:
        values |= OWN
    if given.get("narration_memory"):
        values["last_k"] = 0                   # the second memory stands for past narrations
    if given.get("prune") is False:
        values["last_k"] = None
    values |= given
    for name in ("root", "llm", "vision", "look", "init"):
        if values.get(name):
            values[name] = portable_path(values[name])

    narrator = {name: values.pop(name) for name in values.keys() - names_of(Options)}
    if given.get("init"):
        narrator = {name: narrator[name] for name in narrator if name in given}
    else:
        narrator["memory_target"] = values.get("start", Options.start) == "mimetic"
    return Options(**values, narrator=narrator, given=given)


def check_given(options: Options) -> None:
    """BadData if an option that is given would have no effect."""
    settings = nar.Config()
    if options.init:
        settings = checkpoint.open_checkpoint(options.init).config
    name = options.narrator.get("memory", settings.memory)
    memory = nar.MEMORIES[name].from_config(settings)
    refuse_without_effect(options.given, needs_of(Options, *NARRATORS), {
        "--data toy": options.data == "toy",
        FILES: options.data != "toy",
        "a new narrator": not options.init,
        "a connector of its own": not options.look,
        "the stage recall": options.recall,
        "a memory": memory.M > 0,
        "a memory with heads": memory.HAS_HEADS,
        "a memory that is read within frames": memory.READ_WITHIN_FRAMES,
        "a memory that learns": any(True for _ in memory.parameters()),
    })


def stages_of(options: Options) -> list[str]:
    """What is trained: a new narrator of the toy has stages of its own (toy/stages.py)."""
    stages = ["narrator"]
    if options.data != "toy" or options.init:
        return stages
    if options.recall:
        stages.append("recall")
    if not options.look:
        stages.append("look")
    return stages


def check_output(options: Options) -> None:
    """BadData if the folder --output holds something else than this training, interrupted."""
    output = Path(options.output)
    states = list(output.glob("*-state.safetensors"))
    if states and not options.resume:
        raise BadData(f"{states[0]} is of an interrupted training; "
                      f"give --resume to go on, or delete it")
    for state in states:
        stage, _, _ = state.name.rpartition("-")
        if stage not in stages_of(options):
            raise BadData(f"{state} is of a stage that this training has not; give the options of "
                          f"the interrupted one, or delete it")
    if (output / checkpoint.ADAPTER).exists() and not states:
        raise BadData(f"{output} holds a finished narrator; delete it, or choose another --output")
    if (output / "config.json").exists():
        raise BadData(f"{output} holds a model; a narrator has a folder of its own")
    if options.resume and not states:
        say(f"--resume: {output} holds no interrupted training; it starts from the beginning")


# ------------------------------------------------------------------ a training

@process_group()
def check_and_train(options: Options) -> None:
    """A training, from its options to its checkpoint, and a word on what can be done next."""
    with ExitStack() as until_the_end:
        together(check, options, until_the_end)
        if options.data == "toy":
            from toy.stages import train_toy
            train_toy(options)
        else:
            train_on_files(options)
        if is_first():
            for state in Path(options.output).glob("*-state.safetensors"):
                state.unlink()
    root = ["--root", options.root] if options.root else []
    words = ["--data", options.data, *root, "--model", options.output]
    say_as_one(f"done: {options.output}; next: python evaluate.py stream {shlex.join(words)}")


def check(options: Options, until_the_end: ExitStack) -> None:
    """BadData if an option or --output does not suit. One run at a time writes into --output, its first
    process alone.
    """
    check_given(options)
    if options.data == "toy" and not is_alone():
        raise BadData("the toy trains in one process: start it without torchrun")
    if is_first():
        check_writable(Path(options.output) / checkpoint.ADAPTER)
        until_the_end.enter_context(locked(options.output))
        check_output(options)
        data = dataset_folder(options.data, options.root)
        read = [data, options.init, options.narrator.get("llm"), options.narrator.get("vision")]
        check_apart(read, [options.output])


def train_on_files(options: Options) -> None:
    """Load, make, train, save. Under torchrun, all processes do this together."""
    torch.manual_seed(options.seed)
    device, dtype = device_and_dtype(options.device, options.dtype)
    has_own_videos = options.data not in DATASETS

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
    for sample in [*samples, *held_out]:
        check_sample(sample, narrator.config)
    videos = [partial(read_example, sample, narrator.layout) for sample in samples]
    if not options.init:
        first_weights(narrator, options.start, options.connector_start, videos)
    warn_of_longest(narrator, samples)
    narrator.to(device)
    look_through(narrator, header_of_all([*samples, *held_out]), options)
    begin_together(narrator, samples, held_out, options)
    speed_up(narrator, learns=True)
    if options.checkpointing:
        recompute_activations(narrator.llm)

    # train
    videos_of = in_order(videos, options.batch, options.seed)
    if has_own_videos:
        choose_length(narrator, videos, options)
        videos_of = from_anywhere(samples, narrator.layout, options.batch, options.seed)
    if options.long:
        videos_of = late(videos_of, videos, options.long, options.seed)
    validate = None
    if held_out:
        of_validation = [partial(read_example, sample, narrator.layout) for sample in held_out]
        validate = partial(mean_loss, narrator, of_validation)
    steps = number_of_steps(options, len(videos))
    every = steps_to_validation(options, len(videos))
    with Run("narrator", options, validate, every) as run:
        train(narrator, videos_of, steps, options, run)

    # save
    if is_first():
        narrator.save(options.output)
        write_card(narrator.config, len(videos), options)
    if has_own_videos:
        tell_learned(narrator, samples, "training videos")
        if held_out:
            tell_learned(narrator, held_out, "held-out videos")


def steps_to_validation(options: Options, videos: int) -> int:
    """After how many steps the loss on held-out videos is measured: an epoch; if there are many, so
    many that it is measured about ten times.
    """
    steps_per_epoch = max(1, round(videos / options.batch))
    return steps_per_epoch * max(1, round(options.epochs / 10))


def look_through(narrator: Narrator, header: Header, options: Options) -> None:
    """The vision model of a new narrator is that of the features. --vision says where it is.

    header      what the features say of it
    """
    config = narrator.config
    given = options.narrator.get("vision")
    if not options.init:
        config.vision = given or header.get("vision") or config.vision
        config.vision_mark = header.get("vision_mark")
    if given and Path(given).is_absolute():     # of this machine; a hub id may not be fetched yet
        config.vision_mark = find_model(given, "vision").mark
    if header:                                  # that there is none was told
        config.vision_mark = encoder_mark(header, config)


def choose_length(narrator: Narrator, videos: Sequence[Read], options: Options) -> None:
    """Set epochs and learning rate for own videos, unless they are given, and say how long it takes.
    """
    measured = videos[::max(1, len(videos) // 8)]          # some of all, be they old or new
    begin = perf_counter()
    loss = max(mean_loss(narrator, [video]) for video in measured)
    seconds = (perf_counter() - begin) / len(measured)
    width = narrator.llm.config.hidden_size
    chosen = length_of_training(loss, len(videos), options.batch, width)
    for name in chosen.keys() - options.given.keys():
        setattr(options, name, chosen[name])
    steps = number_of_steps(options, len(videos))
    # a backward pass takes about twice as long as a forward pass
    minutes = 3 * seconds * options.batch * steps / 60
    say_as_one(f"loss before training: up to {loss:.2f}; {steps} steps ({options.epochs:.4g} epochs), "
               f"about {minutes:.1f} minutes, peak learning rate {options.lr:.2g}")


def length_of_training(loss: float, videos: int, batch: int, width: int) -> dict[str, float]:
    """Epochs and peak learning rate for own videos.

    loss        of the narrator before training, a token, of the worst video. Known words (below
                NEW_WORDS) need little: 10 epochs at the paper's rate. New ones need some hundred
                steps, however few the videos are, and a language model that is narrower than the
                paper's a higher rate, in proportion to 1 / sqrt(width)
    width       of the language model
    """
    if loss < NEW_WORDS:
        return {"epochs": EPOCHS, "lr": RATE}
    return {
        "epochs": max(EPOCHS, LEAST_STEPS * batch / videos),
        "lr": RATE * max(1, (2048 / width) ** 0.5),
    }


def main():
    command_line(lambda: check_and_train(parse()))
