"""All stages of a toy narrator, from scratch (python train.py --data toy)."""
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import narrator as nar
from baselines import lionfs, variants
from support.common.errors import BadData
from support.common.progress import say
from support.engine import checkpoint
from toy import stages, world
from train import Options, begin, fit, new_config, pretrained, save, train_narrator


def train_toy(options: Options):
    """Train all stages; with --init, only the last one."""
    variant = world.find_world(options.world, options.idle)
    if options.init:
        narrator = pretrained(options)
        encoder = narrator.vision_encoder()
        kitchens = list(world.kitchens("train", options.limit, world=variant))
        videos = stages.scenes(encoder, narrator.layout, kitchens)
    else:
        narrator, videos = before_last_stage(options, variant)
    train_narrator(narrator, videos, options)
    save(narrator, options, torch.bfloat16)


def has_weights(model: Path) -> bool:
    return (model / "model.safetensors").exists()


def coming_stages(options: Options, vision: Path, llm: Path) -> list[str]:
    """The names of the stages before the paper's training; models that exist are not trained."""
    names = []
    if not (options.vision or has_weights(vision)):
        names.append("encoder")
    if options.width_second:
        names.append("egocentric")
    if not (options.llm or has_weights(llm)):
        names.append("language")
    if not options.look:
        names.append("look")
    if not options.no_recall:
        names.append("recall")
    return names


def plan_in_words(names: list[str], options: Options) -> str:
    """What comes, in words: these stages and the paper's own, their steps, and about how long."""
    steps = {name: stages.STEPS[name] for name in names}
    seconds = sum(stages.SECONDS[name] * count for name, count in steps.items())
    steps["narrator"] = max(1, round(options.epochs * options.limit / options.batch))
    seconds += stages.SECONDS["narrator"] * options.batch * steps["narrator"]
    seconds += stages.SECONDS["video"] * options.limit
    listed = ", ".join(f"{name} ({count} steps)" for name, count in steps.items())
    minutes = max(1, round(seconds / 60))
    return (f"stages: {listed}; about {minutes} min on two cores of an AMD EPYC "
            "with nothing else running")


def check_given(options: Options):
    """BadData for what would stop a later stage: a model or a file that is not there, or a width."""
    for kind in ("vision", "llm"):
        model = getattr(options, kind)
        if not model:
            continue
        checkpoint.check_model(model, kind)
        if Path(model).is_dir() and not (Path(model) / "config.json").exists():
            raise BadData(f"--{kind}: {model} has no config.json: not a model")
    if options.look and not Path(options.look).is_file():
        raise BadData(f"--look: {options.look}: no such file")
    stages.check_widths(options.width_second, options.llm_width)


def before_last_stage(options: Options,
                      variant: world.World) -> tuple[nar.Narrator, list[stages.Scene]]:
    """A narrator before the paper's training, and its training videos.

    Its models are trained, unless they are given or already exist.
    """
    check_given(options)
    folder = Path(options.output)
    llm = Path(options.llm or folder / "llm")
    vision = Path(options.vision or folder / "vision")
    second = folder / "vision_second" if options.width_second else None
    tokens = 1 + options.grid ** 2             # of a frame, J
    if not options.vision:
        # settings that contradict each other are refused here, before anything is trained
        width = stages.WIDTH + options.width_second
        new_config(options, str(llm), str(vision), tokens, width)

    say(plan_in_words(coming_stages(options, vision, llm), options))
    run = partial(fit, options=options)

    def make_model(model: Path, stage: Callable):
        if not has_weights(model):
            torch.manual_seed(options.seed)
            stage(run, model, options.seed, variant)

    if not options.vision:
        make_model(vision, stages.encoder)
    if second:
        make_model(second, partial(stages.egocentric, width=options.width_second))
    if not options.llm:
        make_model(llm, partial(stages.language, width=options.llm_width))

    second_path = str(second) if second else None
    encoder = lionfs.load_encoders(str(vision), second_path, options.grid)
    torch.manual_seed(options.seed)
    config = new_config(options, str(llm), str(vision), tokens, encoder.width)
    if second_path:
        config.vision_second = second_path
    narrator = variants.new_narrator(*checkpoint.load_llm(config.llm), config)
    if not options.llm and narrator.llm.config.hidden_size != options.llm_width:
        raise BadData(f"{llm} has another width than {options.llm_width}; choose another --output")

    # Narrators of a trained encoder share its frame tokens: they are kept beside the folder.
    grid = "" if options.grid == 3 else options.grid
    name = f"features{grid}_second" if second else f"features{grid}"
    cache_folder = folder.parent if options.vision and not second else folder
    cache = cache_folder / f"{name}.safetensors"
    kitchens = list(world.kitchens("train", options.limit, world=variant))
    videos = stages.scenes(encoder, narrator.layout, kitchens, cache)
    begin(narrator, options, videos)
    stages.before_narrating(run, narrator, videos, folder, options.lr, options.seed, options.look,
                            not options.no_recall)
    return narrator, videos
