"""Training (paper §3.5, App. B.6): cross entropy on narration tokens and the trigger, through LoRA, connector and CLAM.

The paper's recipe is the default: AdamW, 2e-4, cosine with 5 % warm-up, gradients clipped at 1, LoRA of rank 128 and
alpha 256 on all linear layers, an effective batch of 64 videos, 2 epochs. Language model and vision encoder are frozen.

    python train.py --data ego4d --output out/ego4d    on frame features (data.py encode), from data/ego4d
    python train.py --data ek100 --init out/ego4d ...  fine-tuning: options that are given replace the checkpoint's
                                                       settings; what contradicts its weights is refused
    torchrun --nproc-per-node 4 train.py ...           the same training, its batches shared between processes
    python train.py --data toy --output out/toy        a narrator like the bundled one, from scratch: the stages of
                                                       toy/stages.py, which make its models, then the paper's training

A new narrator starts (`--start`) as in the published code, with weights N(0, 0.02) and no learned targets in CLAM; the
toy from statistics of training features, as small models need it (`Narrator.initialise`). The memory is read after the
whole frame, as in the paper; the published code reads it after the frame's first token (`--readout cls`).

Training can be resumed (`--resume`) exactly as if it had not been interrupted: parameters, optimizer, random state and
settings are in one file, and which videos a step sees depends only on seed and step.

Does not include: training the encoder or the language model of a full-size narrator, sharded weights (a rank-128 LoRA
of an 8B model fits one 80 GB GPU).
"""
import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from itertools import islice
from math import cos, pi
from pathlib import Path

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor, nn

import data
import narrator as nar
from support import checkpoint, own
from support.common import (BadData, ahead, check_writable, choose, command_line, in_range,
                            positive_float, positive_int, probability, progress, rank, whole)
from support.options import Parser, dataset, kept_narrations
from support.training import (append_log, curve, cut_log, located, order, random_restarts, restore, snapshot,
                              sum_gradients, summed, unfinished)
from toy import stages


def option(default, text: str, kind: Callable | tuple = str):
    """A field of Options with its help and its argparse type, or the values that it can have."""
    return field(default=default, metadata={"help": text, "kind": kind})


@dataclass(init=False)
class Options:
    """The options, and which of them were `given`: with --init, only those replace the checkpoint's settings."""
    data: str = option("ego4d", " | ".join(data.DATASETS) + " | FOLDER of your own videos (support/own.py)", dataset)
    root: str | None = option(None, "folder of the data set; default data/NAME")
    output: str = option("out/narrator", "folder of the checkpoint, the log and the loss curve")
    llm: str | None = option(None, "frozen language model: hub id, folder or .gguf (toy: trained, if not given)")
    vision: str | None = option(None, "frozen vision encoder: hub id or folder (toy: trained, if not given)")
    look: str | None = option(None, "the toy starts with LoRA and connector of this training's stage `look`")
    init: str | None = option(None, "start from this checkpoint (the paper: EgoExo4D and EK100 from Ego4D's)")
    start: str = option("published", "first weights: as in the published code, or from statistics of training features "
                        "with learned targets in CLAM (not the paper's)", ("published", "statistics"))
    resume: bool = option(False, "continue an interrupted run in --output")
    overwrite: bool = option(False, "train anew where --output holds a finished narrator, which is then lost")
    memory: str = option("clam", "the visual memory", tuple(nar.MEMORIES))
    memory_tokens: int = option(20, "memory tokens, M", positive_int)
    memory_heads: int = option(8, "heads of the memory, if it has any (published, not in the paper)", positive_int)
    readout: str = option("frame", "the memory is read after the whole frame (the paper) or after its first token (the "
                          "published code)", ("frame", "cls"))
    last_k: int | None = option(None, 'narrations kept in context (FlowNar-C: 10; 0: none), or "all"', kept_narrations)
    narration_memory: int = option(0, "tokens of a second CLAM, on narrations, which are then not kept; 0: none", whole)
    no_prune: bool = option(False, "the baseline VideoLLM-online: nothing is removed from the context")
    mod_keep: float | None = option(None, "VideoLLM-MoD, with --no-prune: share of a frame's tokens kept", probability)
    width_second: int = option(0, "LION-FS: width of a second encoder's features, which follow the first one's in each "
                               "frame token (toy: a stand-in's, which is trained); 0: none", whole)
    lr: float = option(2e-4, "peak learning rate", positive_float)
    warmup: float = option(0.05, "fraction of the steps in which the learning rate rises", probability)
    clip: float = option(1.0, "gradients are clipped to this norm", positive_float)
    batch: int = option(64, "videos per step, by gradient accumulation", positive_int)
    epochs: float = option(2.0, "passes through the videos", in_range(float, 1e-9, 1e6, "above 0, up to a million"))
    lora_rank: int = option(128, "rank of the LoRA matrices", positive_int)
    lora_alpha: int = option(256, "scale of LoRA times its rank", positive_int)
    lora_dropout: float = option(0.05, "dropout on LoRA's input (published, not in the paper)", probability)
    memory_dropout: float = option(0.1, "dropout in CLAM's self-attention (published, not in the paper)", probability)
    long: float = option(0.0, "fraction of the videos trained on as if late in a long stream", probability)
    restart: float = option(0.0, "fraction of the videos whose segments are restarted now and then", probability)
    max_frames: int = option(1200, "longer videos are cut (published, not in the paper)", positive_int)
    checkpointing: bool = option(False, "recompute activations in the backward pass: less memory, more time")
    val_limit: int = option(256, "videos for the validation loss after each epoch; 0: none", whole)
    device: str = option("auto", "cpu | cuda | mps | auto (the toy: always the CPU)")
    dtype: str = option("auto", "of the frozen language model; auto: bfloat16 on CUDA", ("auto", "float32", "bfloat16"))
    limit: int | None = option(None, "use at most this many training videos", positive_int)
    grid: int = option(3, "pooled tokens per side of a toy's frame; 0: CLS only", in_range(int, 0, 100, "0 to 100"))
    world: str = option("plain", "kind of the toy's videos (toy/world.py)", tuple(stages.world.WORLDS))
    idle: float | None = option(None, "share of the toy's videos that have idle time; default the world's", probability)
    llm_width: int = option(128, "width of the toy's own language model", positive_int)
    no_remember: bool = option(False, "the toy's memory has no stage `remember`, and starts from the published first "
                               "weights")
    seed: int = option(0, "of first weights and order of the videos", in_range(int, 0, 2 ** 32 - 1, "0 to 2^32 - 1"))
    save_every: int = option(50, "steps between saved states (see --resume)", positive_int)

    def __init__(self, **given):
        defaults = {f.name: f.default for f in fields(self)}
        if unknown := given.keys() - defaults:
            raise TypeError(f"no such options: {', '.join(unknown)}")
        self.given = set(given)
        values = defaults | {"toy": stages.DEFAULTS}.get(given.get("data"), {})
        values |= own.DEFAULTS if given.get("data", "ego4d") not in data.DATASETS else {}
        values |= ({"last_k": 0} if given.get("narration_memory") else {}) | given
        values["last_k"] = None if values["last_k"] == "all" else values["last_k"]
        for name, value in values.items():
            path = name in ("root", "llm", "vision", "look", "init") and value
            setattr(self, name, located(value) if path else value)

    def config(self, names: set[str]) -> dict:
        """The fields of narrator.py's Config that the options in `names` set."""
        settings = {f.name: getattr(self, f.name) for f in fields(nar.Config) if f.name in names}
        if self.no_prune and "last_k" not in self.given:                          # the toy's default is for pruning
            settings.pop("last_k", None)
        return settings | ({"prune": not self.no_prune} if "no_prune" in names else {})


# ---------------------------------------------------------------------- one training loop for all stages

def schedule(step: int, steps: int, warmup: float) -> float:
    """Fraction of the peak learning rate at a step: linear warm-up, then cosine to zero."""
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + cos(pi * (step - rising) / max(1, steps - rising)))


# options, on --resume
MAY_CHANGE = {"output", "device", "resume", "overwrite", "save_every", "val_limit", "checkpointing"}


def fit(stage: str, parameters: dict[str, Tensor], backward: Callable[[int], tuple[float, int]], steps: int, lr: float,
        options: Options, validate: Callable[[int], dict] = lambda step: {}):
    """Minimise: backward(step) runs forward and backward of a batch and returns its loss and number of tokens.

    Under torchrun each process runs its part of the batch; gradients, losses and tokens are summed over processes.
    `validate(step)` gives further entries for the log. Ctrl-C writes the state after the last complete step.
    """
    me, folder = rank()[0], Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    saved, log = folder / f"{stage}-state.safetensors", folder / f"{stage}-log.jsonl"
    settings = {name: value for name, value in asdict(options).items() if name not in MAY_CHANGE}
    settings |= {"steps": steps, "weights": sum(p.numel() for p in parameters.values())}
    optimizer = torch.optim.AdamW(parameters.values(), lr=lr, weight_decay=0.0, fused=True)
    start = restore(saved, parameters, optimizer, settings) if options.resume and saved.exists() else 0
    if options.resume and not start and me == 0:
        print(f"{stage}: starts from the beginning, {saved} is not there", file=sys.stderr)
    cut_log(log, start, validate)
    bar = progress(range(start, steps), stage, steps, "step", start, mininterval=1)
    done = start, torch.get_rng_state()
    try:
        for step in bar:
            began = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = lr * schedule(step, steps, options.warmup)
            optimizer.zero_grad()
            loss, tokens = summed(*backward(step))
            sum_gradients(parameters)
            norm = nn.utils.clip_grad_norm_(parameters.values(), options.clip)
            if not norm.isfinite():
                raise BadData(f"{stage}: the gradient is not finite at step {step}; lower --lr")
            done = None                                              # half a step cannot be resumed
            optimizer.step()
            done = step + 1, torch.get_rng_state()
            speed = round(tokens / (time.perf_counter() - began))
            entry = {"step": step, "loss": loss, "tokens_per_s": speed}
            bar.set_postfix(loss=f"{loss:.3f}", tok_s=speed)
            try:
                entry |= validate(step)
            finally:
                if me == 0:
                    append_log(log, entry)
            if me == 0 and ((step + 1) % options.save_every == 0 or step + 1 == steps):
                snapshot(saved, *done, parameters, optimizer, settings)
    except KeyboardInterrupt:
        if me == 0 and done:
            snapshot(saved, *done, parameters, optimizer, settings)
        raise
    if me == 0:
        curve(log, folder / f"{stage}-loss.png")


# ---------------------------------------------------------------------- stage narrator (§3.5)

@dataclass
class Example:
    """One training video: x [T, J, D] and its narrations (frame, token ids without EOT)."""
    x: Tensor
    narrations: list[tuple[int, list[int]]]


def train_narrator(narrator: nar.Narrator, examples: Sequence[Example], options: Options,
                   held_out: Sequence[Example] = ()):
    """Train LoRA, connector and memory on the examples; log the loss on held-out ones after each epoch."""
    me, world = rank()
    if options.restart and not narrator.config.prune:
        raise BadData("--restart: where nothing is pruned (VideoLLM-online), no segment can be restarted")
    narrator.train()
    if options.checkpointing:
        narrator.llm.gradient_checkpointing_enable({"use_reentrant": False})
    steps = max(1, round(options.epochs * len(examples) / options.batch))
    epoch, coming = max(1, round(len(examples) / options.batch)), None

    def lessons(step: int) -> Iterator[tuple[Example, list[Example], int, range]]:
        """This process's part of all batches from a step on: a video, those before it, their tokens, its restarts."""
        for step in range(step, steps):
            chance = random.Random(f"{options.seed} {step}")
            for i, index in enumerate(order(len(examples), options.batch, step, options.seed)):
                earlier, before = earlier_videos(len(examples), chance) if chance.random() < options.long else ([], 0)
                restarts = random_restarts(options.restart, chance)
                if i % world == me:
                    yield examples[index], [examples[j] for j in earlier], before, restarts

    def backward(step: int) -> tuple[float, int]:
        nonlocal coming
        coming, total, tokens = coming or ahead(lessons(step), 1), 0.0, 0
        torch.manual_seed((options.seed * 1_000_003 + step) * world + me)           # each process has its own dropout
        for example, earlier, before, restarts in islice(coming, len(range(me, options.batch, world))):
            state, history_state = memory_after(narrator, earlier) if earlier else (None, None)
            loss, learned = narrator.loss(example.x, example.narrations, state, before, history_state, restarts)
            (loss / learned / options.batch).backward()
            total, tokens = total + loss.item() / learned / options.batch, tokens + example.x[..., 0].numel() + learned
        return total, tokens

    @torch.no_grad()
    def validate(step: int) -> dict:
        if not len(held_out) or (step + 1) % epoch and step + 1 != steps:
            return {}
        narrator.eval()
        mine = ahead((held_out[i] for i in range(me, len(held_out), world)), 1)
        results = [narrator.loss(example.x, example.narrations) for example in mine]
        narrator.train()
        loss, learned = summed(sum(loss.item() for loss, _ in results), sum(learned for _, learned in results))
        return {"val_loss": loss / learned}

    fit("narrator", narrator.trainable(), backward, steps, options.lr, options, validate)
    narrator.eval()


def earlier_videos(count: int, chance: random.Random) -> tuple[list[int], int]:
    """The past of a long stream: one to three of `count` videos, and 1 to 100,000 tokens fed and pruned."""
    return [chance.randrange(count) for _ in range(chance.randint(1, 3))], round(10 ** chance.uniform(0, 5))


@torch.no_grad()
def memory_after(narrator: nar.Narrator, videos: list[Example]) -> tuple[Tensor, Tensor]:
    """The states of the memory, S_t, and of the narration memory after these videos, one after the other."""
    x = rearrange(torch.cat([video.x for video in videos]), "t j d -> 1 (t j) d").to(narrator.device)
    said, ends = narrator.spoken([narration for video in videos for narration in video.narrations])
    return narrator.memory(x, ends[:, :0])[1], narrator.narration_memory(said, ends[:, :0])[1]


# ---------------------------------------------------------------------- how a training begins and ends

def new_config(options: Options, llm: str, vision: str, J: int, width: int) -> nar.Config:
    """The settings of a new narrator (no --init), for frame tokens [J, width]."""
    return nar.Config(**options.config({f.name for f in fields(options)}) | {
        "llm": llm, "vision": vision, "grid": round((J - 1) ** 0.5), "width": width,
        "memory_target": options.start == "statistics" and not options.no_remember})


def pretrained(options: Options, dtype: torch.dtype = torch.float32) -> nar.Narrator:
    """The narrator of --init with the options that were given; BadData if they contradict its weights."""
    given = options.config(options.given)
    free = {name: given.pop(name) for name in ("llm", "vision", "last_k", "readout", "memory_dropout", "lora_dropout")
            if name in given}
    narrator = nar.Narrator.load(options.init, dtype=dtype, **free)
    for name, value in given.items():
        if value != (there := getattr(narrator.config, name)):
            used = "--no-prune" if name == "prune" else f"--{name.replace('_', '-')} {value}"
            raise BadData(f"{used} contradicts --init {options.init}, where {name} = {there}; leave one of them out")
    return narrator


def begin(narrator: nar.Narrator, options: Options, examples: Sequence[Example]):
    """Set the first weights of a new narrator (--start); statistics are of 128 frames of at most 64 videos."""
    if options.start == "published":
        narrator.start_published()
    else:
        narrator.initialise(torch.cat([examples[i].x[:128].clone() for i in range(min(64, len(examples)))]))
    if options.no_remember:
        narrator.memory.reset_parameters()


def check_features(config: nar.Config, J: int, width: int, fps: float):
    if (J, width, fps) != (config.J, config.width, config.fps):
        raise BadData(f"the features are {width} wide with {J} tokens a frame, {fps:g} frames a second; the narrator "
                      f"needs {config.width}, {config.J} and {config.fps:g}; use its vision model, {config.vision}")


def save(narrator: nar.Narrator, options: Options, dtype: torch.dtype | None = None):
    """Write a checkpoint that can be moved: models inside its folder have relative paths, others absolute ones."""
    models = {name: getattr(narrator.config, name) for name in ("llm", "vision", "vision_second")}
    narrator.save(options.output, dtype, **{name: y and located(y, options.output) for name, y in models.items()})


# ---------------------------------------------------------------------- Ego4D, EgoExo4D, EPIC-Kitchens-100

class Annotated(Sequence):
    """Samples of a data set as examples; an example's features are read when it is indexed, and only its range."""

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
    device, dtype = choose(options.device, options.dtype)
    load = partial(data.load_dataset, options.data, options.root, max_frames=options.max_frames)
    samples = list(load("train", options.limit))
    held_out = list(load("val", options.val_limit)) if options.val_limit else []
    if device.startswith("cuda:"):                                                # under torchrun: this process's GPU
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    J, width = samples[0].read(0, 1).shape[1:]
    if options.init:
        narrator = pretrained(options, dtype)
    else:
        vision = nar.Config.vision if options.data in data.DATASETS else own.made_with(options.data, samples[0].name)
        config = new_config(options, options.llm or nar.Config.llm, options.vision or vision, J, width)
        config.fps = samples[0].fps
        narrator = nar.Narrator(*checkpoint.load_llm(config.llm, dtype), config)
    check_features(narrator.config, J, width, samples[0].fps)
    examples = Annotated(samples, narrator.layout)
    if not options.init:
        begin(narrator, options, examples)
    narrator.to(device)
    if world > 1:                                                                 # all start from the same weights
        for p in narrator.trainable().values():
            dist.broadcast(p.data, 0)
    train_narrator(narrator, examples, options, Annotated(held_out, narrator.layout))
    if me == 0:
        save(narrator, options)
    if world > 1:
        dist.destroy_process_group()


# ---------------------------------------------------------------------- the miniature world

def train_toy(options: Options):
    """All stages, from scratch; models that are given, or already exist, are kept. With --init, only the last stage."""
    variant = stages.world.find_world(options.world, options.idle)
    if options.init:
        narrator = pretrained(options)
        videos = stages.scenes(narrator.vision_encoder(), narrator.layout, options.limit, variant)
    else:
        run, folder = partial(fit, options=options), Path(options.output)
        llm, vision = Path(options.llm or folder / "llm"), Path(options.vision or folder / "vision")
        two, second = options.width_second > 0, folder / "vision_second"
        if not options.vision:                              # what cannot work is refused before anything is trained
            new_config(options, str(llm), str(vision), 1 + options.grid ** 2, stages.WIDTH + options.width_second)
        egocentric = partial(stages.egocentric, width=options.width_second)
        language = partial(stages.language, width=options.llm_width)
        for kept, model, stage in ((options.vision, vision, stages.encoder), (not two, second, egocentric),
                                   (options.llm, llm, language)):
            if not kept and not (model / "model.safetensors").exists():
                torch.manual_seed(options.seed)
                stage(run, model, options.seed, variant)
        encoder = nar.load_encoders(str(vision), str(second) if two else None, options.grid)
        torch.manual_seed(options.seed)
        config = new_config(options, str(llm), str(vision), 1 + options.grid ** 2, encoder.width)
        config.vision_second = str(second) if two else None
        narrator = nar.Narrator(*checkpoint.load_llm(config.llm), config)
        if not options.llm and narrator.llm.config.hidden_size != options.llm_width:
            raise BadData(f"{llm} has another width than {options.llm_width}; choose another --output")
        name = f"features{'' if options.grid == 3 else options.grid}{'_second' * two}.safetensors"
        cache = (folder if two else vision.parent) / name
        videos = stages.scenes(encoder, narrator.layout, options.limit, variant, cache)
        begin(narrator, options, videos)
        stages.before_narrating(run, narrator, videos, options.lr, options.seed, not options.no_remember, options.look)
    train_narrator(narrator, videos, options)
    save(narrator, options, torch.bfloat16)


# ---------------------------------------------------------------------- command line

def parse() -> Options:
    """Command line from the fields of Options; --data toy brings its own defaults."""
    parser = Parser(description="Train a narrator.", argument_default=argparse.SUPPRESS)
    for f in fields(Options):
        kind, toy = f.metadata["kind"], f" (toy: {stages.DEFAULTS[f.name]})" if f.name in stages.DEFAULTS else ""
        how = {"choices": kind} if isinstance(kind, tuple) else {"type": kind, "metavar": f.name.upper()}
        parser.add_argument("--" + f.name.replace("_", "-"), help=f"{f.metadata['help']}; default {f.default}{toy}",
                            **{"action": "store_true"} if f.default is False else how)
    options = Options(**vars(parser.parse_args()))
    if options.given >= {"start", "init"}:
        parser.error("--start is for new weights; --init brings its own")
    toy = options.data == "toy"
    for name in sorted(options.given & ({"root", "dtype", "max_frames", "val_limit"} if toy else
                                        {"world", "idle", "grid", "llm_width", "no_remember", "look"})):
        parser.error(f"--{name.replace('_', '-')}: the toy renders its videos and trains in float32" if toy else
                     f"--{name.replace('_', '-')}: only for the toy")
    if toy and options.device not in ("auto", "cpu"):
        parser.error(f"--device {options.device}: the toy trains on the CPU")
    return options


def train(options: Options):
    torch.manual_seed(options.seed)
    began = time.perf_counter()
    check_writable(Path(options.output) / checkpoint.ADAPTER)
    if not options.resume and (state := unfinished(Path(options.output))):
        raise BadData(f"{state} is of an interrupted training; give --resume to go on, or delete it")
    if not (options.resume or options.overwrite) and (Path(options.output) / checkpoint.ADAPTER).exists():
        raise BadData(f"{options.output} holds a finished narrator; choose another --output, or give --overwrite to "
                      f"train it anew")
    if options.data == "toy":
        if rank()[1] > 1:
            raise BadData("the toy trains in one process: start it without torchrun")
        train_toy(options)
    else:
        train_annotated(options)
    print(f"done in {(time.perf_counter() - began) / 60:.1f} minutes: {options.output}", file=sys.stderr)


def main():
    command_line(lambda: train(parse()))


if __name__ == "__main__":
    main()
