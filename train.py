"""Training (paper §3.5, App. B.6): cross entropy on narration tokens and the trigger, of LoRA,
connector and CLAM.

The paper's recipe is the default: AdamW, 2e-4, cosine with 5 % warm-up, gradients clipped at 1,
LoRA of rank 128 and alpha 256 on all linear layers, an effective batch of 64 videos, 2 epochs.
Language model and vision encoder are frozen.

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

A new narrator starts (`--start`) as in the published code, with weights N(0, 0.02) and no learned
targets in CLAM; the toy from statistics of training features, as small models need it
(`Narrator.initialise`). The memory is read after the whole frame, as in the paper; the published
code reads it after the frame's first token (`--readout cls`).

Training can be resumed (`--resume`) exactly as if it had not been interrupted: parameters,
optimizer, random state and settings are in one file, and which videos a step sees depends only on
seed and step.

Does not include: training the encoder or the language model of a full-size narrator, sharded
weights (a rank-128 LoRA of an 8B model fits one 80 GB GPU).
"""
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from math import cos, pi
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import data
import narrator as nar
from baselines import variants
from support.common.devices import device_and_dtype, rank
from support.common.errors import BadData
from support.common.iterate import prefetch
from support.common.options import (
    dataset, in_range, kept_narrations, positive_float, positive_int, probability, non_negative_int,
)
from support.engine import checkpoint
from support.engine.training import Run, portable_path, order, sum_gradients, summed
from support.files import own_videos
from toy import stages


def option(default, text: str, kind: Callable | tuple = str):
    """A field of Options with its help and its argparse type, or the values that it can have."""
    return field(default=default, metadata={"help": text, "kind": kind})


@dataclass(init=False)
class Options:
    """The options of the command line: first the paper's recipe, then all others.

    given       names of the options that were given. With --init, only these replace the settings
                of the checkpoint
    """
    # The paper's recipe (§3.5, App. B.6).
    data: str = option("ego4d",
        " | ".join(data.DATASETS) + " | FOLDER of your own videos (support/files/own_videos.py)",
        dataset,
    )
    llm: str | None = option(None,
        "frozen language model: hub id, folder or .gguf (toy: trained, if not given)",
    )
    vision: str | None = option(None,
        "frozen vision encoder: hub id or folder (toy: trained, if not given)",
    )
    init: str | None = option(None,
        "start from this checkpoint (the paper: EgoExo4D and EK100 from Ego4D's)",
    )
    output: str = option("out/narrator", "folder of the checkpoint, the log and the loss curve")
    memory: str = option("clam", "the visual memory", tuple(nar.MEMORIES))
    memory_tokens: int = option(20, "memory tokens, M", positive_int)
    readout: str = option("frame",
        "the memory is read after the whole frame (the paper) or after its first token (the "
        "published code)",
        ("frame", "cls"),
    )
    last_k: int | None = option(None,
        'narrations kept in context (FlowNar-C: 10; 0: none), or "all"',
        kept_narrations,
    )
    lr: float = option(2e-4, "peak learning rate", positive_float)
    warmup: float = option(0.05,
        "fraction of the steps in which the learning rate rises",
        probability,
    )
    clip: float = option(1.0, "gradients are clipped to this norm", positive_float)
    batch: int = option(64, "videos per step, by gradient accumulation", positive_int)
    epochs: float = option(2.0,
        "passes through the videos (own videos: 10, or more where the words are new)",
        in_range(float, 1e-9, 1e6, "above 0, up to a million"),
    )
    lora_rank: int = option(128, "rank of the LoRA matrices", positive_int)
    lora_alpha: int = option(256, "scale of LoRA times its rank", positive_int)

    # In the published code, but not in the paper.
    start: str = option("published",
        "first weights: as in the published code, or from statistics of training features with "
        "learned targets in CLAM (not the paper's)",
        ("published", "statistics"),
    )
    memory_heads: int = option(8,
        "heads of the memory, if it has any (published, not in the paper)",
        positive_int,
    )
    lora_dropout: float = option(0.05,
        "dropout on LoRA's input (published, not in the paper)",
        probability,
    )
    memory_dropout: float = option(0.1,
        "dropout in CLAM's self-attention (published, not in the paper)",
        probability,
    )
    max_frames: int = option(1200,
        "longer videos are cut (published, not in the paper)",
        positive_int,
    )

    # Baselines, and variants of the method.
    no_prune: bool = option(False,
        "nothing is removed from the context; with --memory none, the baseline VideoLLM-online",
    )
    mod_keep: float | None = option(None,
        "VideoLLM-MoD, with --memory none --no-prune: share of a frame's tokens kept",
        probability,
    )
    width_second: int = option(0,
        "LION-FS: width of a second encoder's features, which follow the first one's in each "
        "frame token (toy: a stand-in's, which is trained); 0: none",
        non_negative_int,
    )
    narration_memory: int = option(0,
        "tokens of a second CLAM, on narrations, which are then not kept; 0: none",
        non_negative_int,
    )
    long: float = option(0.0,
        "fraction of the videos trained on as if late in a long stream (not in the paper)",
        probability,
    )

    # How the training runs.
    root: str | None = option(None, "folder of the data set; default data/NAME")
    limit: int | None = option(None, "use at most this many training videos", positive_int)
    val_limit: int = option(256,
        "videos for the validation loss after each epoch; 0: none",
        non_negative_int,
    )
    resume: bool = option(False, "continue an interrupted run in --output")
    overwrite: bool = option(False,
        "train anew where --output holds a finished narrator, which is then lost",
    )
    save_every: int = option(50, "steps between saved states (see --resume)", positive_int)
    seed: int = option(0,
        "of first weights, order of the videos, dropout and --long",
        in_range(int, 0, 2 ** 32 - 1, "0 to 2^32 - 1"),
    )
    checkpointing: bool = option(False,
        "recompute activations in the backward pass: less memory, more time",
    )
    device: str = option("auto", "cpu | cuda | mps | auto (the toy: always the CPU)")
    dtype: str = option("auto",
        "of the frozen language model; auto: bfloat16 on CUDA",
        ("auto", "float32", "bfloat16"),
    )

    # Only for the toy.
    quick: bool = option(False,
        "a narrator of the toy in minutes: the bundled encoder and language model, few videos, few "
        "steps",
    )
    look: str | None = option(None,
        "the toy starts with LoRA and connector of this look.safetensors, which another training "
        "has written",
    )
    grid: int = option(3,
        "pooled tokens per side of a toy's frame; 0: CLS only",
        in_range(int, 0, 100, "0 to 100"),
    )
    world: str = option("plain",
        "kind of the toy's videos (toy/world.py)",
        tuple(stages.world.WORLDS),
    )
    idle: float | None = option(None,
        "share of the toy's videos that have idle time; default the world's",
        probability,
    )
    llm_width: int = option(128, "width of the toy's own language model", positive_int)
    no_recall: bool = option(False,
        "the toy has no stage `recall`: the memory learns from the paper's loss alone",
    )

    def __init__(self, **given):
        defaults = {f.name: f.default for f in fields(self)}
        unknown = given.keys() - defaults
        if unknown:
            raise TypeError(f"no such options: {', '.join(unknown)}")
        self.given = set(given)
        # An option that is not given has the value of the toy, of own videos, or its default.
        values = dict(defaults)
        data_set = given.get("data", self.data)
        if data_set == "toy":
            values |= stages.DEFAULTS
            if given.get("quick"):
                values |= stages.QUICK
        elif data_set not in data.DATASETS:
            values |= own_videos.DEFAULTS
        if given.get("narration_memory"):
            # the second memory stands for past narrations
            values["last_k"] = 0
        values |= given
        if values["last_k"] == "all":
            values["last_k"] = None
        for name in ("root", "llm", "vision", "look", "init"):
            if values[name]:
                values[name] = portable_path(values[name])
        for name, value in values.items():
            setattr(self, name, value)

    def config(self, names: set[str]) -> dict:
        """The fields of narrator.py's Config that the options in `names` set."""
        settings = {f.name: getattr(self, f.name) for f in fields(self)
                    if f.name in names and f.name in variants.SETTINGS}
        if self.no_prune and "last_k" not in self.given:        # the toy's default is for pruning
            settings.pop("last_k", None)
        if "no_prune" in names:
            settings["prune"] = not self.no_prune
        return settings


# ------------------------------------------------------ one training loop for all stages


def schedule(step: int, steps: int, warmup: float) -> float:
    """Fraction of the peak learning rate at a step: linear warm-up, then cosine to zero."""
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + cos(pi * (step - rising) / max(1, steps - rising)))


# options that may differ from those of the state, on --resume
MAY_CHANGE = {"output", "device", "resume", "overwrite", "save_every", "val_limit", "checkpointing"}


def fit(stage: str, parameters: dict[str, Tensor], backward: Callable[[int], tuple[float, int]],
        steps: int, lr: float, options: Options,
        validate: Callable[[int], dict] = lambda step: {}):
    """AdamW, linear warm-up, then cosine (App. B.6).

    backward    backward(step) runs forward and backward of a batch -> its loss, and the number of
                its frame tokens and learned tokens. Under torchrun each process runs its part of
                the batch; gradients, losses and numbers are summed
    validate    validate(step) gives further entries for the log
    """
    optimizer = torch.optim.AdamW(parameters.values(), lr=lr, weight_decay=0.0, fused=True)
    settings = {name: value for name, value in asdict(options).items() if name not in MAY_CHANGE}
    with Run(stage, Path(options.output), parameters, optimizer, steps, settings, options.resume,
             options.save_every, validate) as run:
        for step in run:
            for group in optimizer.param_groups:
                group["lr"] = lr * schedule(step, steps, options.warmup)
            optimizer.zero_grad()
            loss, tokens = summed(*backward(step))
            sum_gradients(parameters)
            norm = nn.utils.clip_grad_norm_(parameters.values(), options.clip)
            if not norm.isfinite():
                raise BadData(f"{stage}: the gradient is not finite at step {step}; lower --lr")
            run.update(step)
            run.after(step, loss, tokens)


# ------------------------------------------------------ stage narrator (§3.5)


@dataclass
class Example:
    """One training video: x [T, J, D] and its narrations (frame, token ids without EOT)."""
    x: Tensor
    narrations: list[tuple[int, list[int]]]


def train_narrator(narrator: nar.Narrator, examples: Sequence[Example], options: Options,
                   held_out: Sequence[Example] = (), show: Callable | None = None):
    """Train LoRA, connector and memory on the examples. After each epoch, log the loss on held-out
    ones, and call show(narrator, held_out, steps that are done).
    """
    process, processes = rank()
    narrator.train()
    if options.checkpointing:
        narrator.llm.gradient_checkpointing_enable({"use_reentrant": False})
    steps = max(1, round(options.epochs * len(examples) / options.batch))
    steps_per_epoch = max(1, round(len(examples) / options.batch))
    # After each epoch; if there are many, about ten times.
    steps_to_validation = steps_per_epoch * max(1, round(options.epochs / 10))
    coming = None                               # this process's examples, from the present step on

    def examples_from(first_step: int) -> Iterator[tuple[Example, list[Example], int]]:
        """This process's examples: (video, earlier videos, number of earlier tokens); [] and 0
        unless the video is trained on as if late in a stream (--long).
        """
        for step in range(first_step, steps):
            chance = random.Random(f"{options.seed} {step}")
            for i, index in enumerate(order(len(examples), options.batch, step, options.seed)):
                # drawn for the examples of other processes, too: all draw the same
                earlier, before = [], 0
                if chance.random() < options.long:
                    earlier, before = earlier_videos(len(examples), chance)
                if i % processes == process:
                    yield examples[index], [examples[j] for j in earlier], before

    def backward(step: int) -> tuple[float, int]:
        nonlocal coming
        if coming is None:
            coming = prefetch(examples_from(step), 1)
        # each process has its own dropout
        torch.manual_seed((options.seed * 1_000_003 + step) * processes + process)
        share_of_batch = len(range(process, options.batch, processes))
        total = 0.0
        tokens = 0
        for example, earlier, before in islice(coming, share_of_batch):
            past = nar.Past(memory_after(narrator, earlier) if earlier else None, before)
            loss, learned = narrator.loss(example.x, example.narrations, past)
            # as published: the mean over a video's learned tokens, then over the batch's videos
            (loss / learned / options.batch).backward()
            total += loss.item() / learned / options.batch
            T, J, _ = example.x.shape
            tokens += T * J + learned
        return total, tokens

    def validate(step: int) -> dict:
        steps_done = step + 1
        is_due = steps_done % steps_to_validation == 0 or steps_done == steps
        if not len(held_out) or not is_due:
            return {}
        if show and process == 0:
            show(narrator, held_out, steps_done)
        return {"val_loss": mean_loss(narrator, held_out)}

    fit("narrator", narrator.trainable(), backward, steps, options.lr, options, validate)
    narrator.eval()


@torch.no_grad()
def mean_loss(narrator: nar.Narrator, examples: Sequence[Example]) -> float:
    """The mean loss of the learned tokens of all videos, without dropout. (The loss of a training
    step is the mean of the videos' means.) Each process computes a part of it."""
    process, processes = rank()
    narrator.eval()
    loss = 0
    learned = 0
    for example in prefetch((examples[i] for i in range(process, len(examples), processes)), 1):
        loss_of_video, learned_of_video = narrator.loss(example.x, example.narrations)
        loss += loss_of_video.item()
        learned += learned_of_video
    narrator.train()
    loss, learned = summed(loss, learned)
    return loss / learned


def earlier_videos(count: int, chance: random.Random) -> tuple[list[int], int]:
    """A random past of a long stream: one to three of `count` earlier videos, and how far the
    position counter has advanced (1 to 100,000, log-uniform).
    """
    videos = [chance.randrange(count) for _ in range(chance.randint(1, 3))]
    tokens = round(10 ** chance.uniform(0, 5))
    return videos, tokens


@torch.no_grad()
def memory_after(narrator: nar.Narrator, videos: list[Example]):
    """The state of the memory after these videos, one after the other."""
    x = torch.cat([video.x for video in videos])
    # for Table 15, which reads their words; their frames count from the start of each video
    narrations = []
    for video in videos:
        narrations += video.narrations
    return narrator.state_after(x, narrations)


# ------------------------------------------------------ how a training begins and ends


def new_config(options: Options, llm: str, vision: str, J: int, width: int) -> nar.Config:
    """The settings of a new narrator (no --init), for frame tokens [J, width]."""
    settings = options.config({f.name for f in fields(options)})
    settings |= {"llm": llm, "vision": vision, "grid": round((J - 1) ** 0.5), "width": width}
    settings["memory_target"] = options.start == "statistics"
    return variants.make_config(**settings)


def pretrained(options: Options, dtype: torch.dtype = torch.float32) -> nar.Narrator:
    """The narrator of --init with the options that were given; BadData if they contradict its
    weights.
    """
    given = options.config(options.given)
    free = {}                                               # what does not depend on the weights
    for name in ("llm", "vision", "last_k", "readout", "memory_dropout", "lora_dropout"):
        if name in given:
            free[name] = given.pop(name)
    narrator = variants.load_narrator(options.init, dtype=dtype, **free)
    for name, value in given.items():
        trained = getattr(narrator.config, name)
        if value != trained:
            used = "--no-prune" if name == "prune" else f"--{name.replace('_', '-')} {value}"
            raise BadData(f"{used} contradicts --init {options.init}, where {name} = {trained}; "
                          "leave one of them out")
    return narrator


def begin(narrator: nar.Narrator, options: Options, examples: Sequence[Example]):
    """Set the first weights of a new narrator (--start); statistics are of the first 128 frames of
    each of at most 64 videos.
    """
    if options.start == "published":
        narrator.start_published()
    else:
        videos = range(min(64, len(examples)))
        # clones: a slice would keep all frames of its video in memory
        narrator.initialise(torch.cat([examples[i].x[:128].clone() for i in videos]))


def check_features(config: nar.Config, J: int, width: int, fps: float):
    if (J, width, fps) != (config.J, config.width, config.fps):
        raise BadData(f"the features are {width} wide with {J} tokens a frame, "
                      f"{fps:g} frames a second; the narrator needs {config.width}, {config.J} "
                      f"and {config.fps:g}; use its vision model, {config.vision}")


def save(narrator: nar.Narrator, options: Options, dtype: torch.dtype | None = None):
    """Write a checkpoint that can be moved: models inside its folder have relative paths, others
    absolute ones.
    """
    models = {}
    for name in narrator.config.MODELS:
        model = getattr(narrator.config, name)
        models[name] = portable_path(model, options.output) if model else model
    narrator.save(options.output, dtype, **models)


# ------------------------------------------------------ Ego4D, EgoExo4D, EPIC-Kitchens-100


class Annotated(Sequence):
    """Samples of a data set as examples; an example's features are read when it is indexed, and
    only its range.
    """

    def __init__(self, samples: list[data.Sample], narrator: nar.Narrator):
        self.samples = samples
        self.layout = narrator.layout
        self.shape = narrator.config.J, narrator.config.width

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Example:
        sample = self.samples[index]
        narrations = [(frame, self.layout.encode(" " + text)) for frame, text in sample.narrations]
        x = sample.read(0, sample.num_frames)
        if x.shape[1:] != self.shape:
            raise BadData(f"{sample.name}: has frame tokens {list(x.shape[1:])}, not "
                          f"{list(self.shape)}; encode its video as the others")
        return Example(x, narrations)


def train_annotated(options: Options, choose_length: Callable | None = None,
                    show: Callable | None = None):
    """The paper's training, on one process or several.

    choose_length(narrator, examples, options) sets how long a training on own videos is; `show` is
    that of train_narrator.
    """
    process, processes = rank()
    device, dtype = device_and_dtype(options.device, options.dtype)

    def load(split: str, limit: int | None) -> list[data.Sample]:
        samples = data.load_dataset(options.data, options.root, split, limit)
        return [data.shorten(sample, options.max_frames) for sample in samples]

    samples = load("train", options.limit)
    held_out = load("val", options.val_limit) if options.val_limit else []
    if device.startswith("cuda:"):                              # under torchrun: this process's GPU
        torch.cuda.set_device(device)
    if processes > 1:
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    J, width = samples[0].read(0, 1).shape[1:]
    is_own_folder = options.data not in data.DATASETS
    encoder = nar.Config.vision                                 # of published features
    if is_own_folder:
        encoder = own_videos.encoder_of(options.data, samples[0].name)
    if options.init:
        narrator = pretrained(options, dtype)
        if is_own_folder:
            own_videos.warn_of_encoder(encoder, narrator.config.vision)
    else:
        llm = options.llm or nar.Config.llm
        vision = options.vision or encoder
        config = new_config(options, llm, vision, J, width)
        config.fps = samples[0].fps
        llm, tokenizer = checkpoint.load_llm(config.llm, dtype, device)
        narrator = variants.new_narrator(llm, tokenizer, config)
    check_features(narrator.config, J, width, samples[0].fps)
    examples = Annotated(samples, narrator)
    if not options.init:
        begin(narrator, options, examples)
    narrator.to(device)
    if processes > 1:                                           # all start from the same weights
        for p in narrator.trainable().values():
            dist.broadcast(p.data, 0)
    if choose_length and is_own_folder:
        choose_length(narrator, examples, options)
    train_narrator(narrator, examples, options, Annotated(held_out, narrator), show)
    if process == 0:
        save(narrator, options)
    if processes > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    from commands.train import main
    main()
