"""All stages of a toy narrator, from scratch (python train.py --data toy)."""
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import narrator as nar
from baselines import lionfs, variants
from support.common.errors import BadData
from support.engine import checkpoint
from toy import stages, world
from train import Example, Recipe, begin, fit, new_config, pretrained, save, train_narrator


def train_toy(options: Recipe):
    """Train all stages; with --init, only the last one."""
    variant = world.find_world(options.world, options.idle)
    kitchens = world.kitchens("train", options.limit, world=variant)
    if options.init:
        narrator = pretrained(options)
        scenes = stages.scenes(narrator.vision_encoder(), narrator.layout, list(kitchens))
    else:
        narrator, scenes = before_last_stage(options, variant, kitchens)
    examples = [Example(scene.x, scene.narrations) for scene in scenes]
    train_narrator(narrator, examples, options)
    save(narrator, options, torch.bfloat16)


def before_last_stage(options: Recipe, variant: world.World,
                      kitchens: stages.Kitchens) -> tuple[nar.Narrator, list[stages.Scene]]:
    """A narrator before the paper's training, and its training videos.

    Its models are trained, unless they are given or already exist.
    """
    folder = Path(options.output)
    vision = options.vision or str(folder / "vision")
    llm = options.llm or str(folder / "llm")
    second = str(folder / "vision_second") if options.width_second else None
    J = 1 + options.grid ** 2

    # what would stop a later stage is refused here, before anything is trained
    stages.check_widths(options.width_second, options.llm_width)
    if options.look and not Path(options.look).is_file():
        raise BadData(f"--look: {options.look}: no such file")
    for kind in ("vision", "llm"):
        if kind in options.given:
            model = getattr(options, kind)
            checkpoint.read_model_config(model, kind)
    if not options.vision:
        new_config(options, llm, vision, J, stages.WIDTH + options.width_second)

    run = partial(fit, options=options)

    def make(stage: Callable, model: str, **how):
        if not (Path(model) / "model.safetensors").exists():
            torch.manual_seed(options.seed)
            stage(run, Path(model), options.seed, variant, **how)

    if not options.vision:
        make(stages.encoder, vision)
    if second:
        make(stages.egocentric, second, width=options.width_second)
    if not options.llm:
        make(stages.language, llm, width=options.llm_width)

    encoder = lionfs.load_encoders(vision, second, options.grid)
    torch.manual_seed(options.seed)
    config = new_config(options, llm, vision, J, encoder.width)
    if second:
        config.vision_second = second
    narrator = variants.new_narrator(*checkpoint.load_llm(llm), config)
    if not options.llm and narrator.llm.config.hidden_size != options.llm_width:
        raise BadData(f"{llm} has another width than {options.llm_width}; choose another --output")

    scenes = stages.scenes(encoder, narrator.layout, list(kitchens))
    begin(narrator, options, scenes)
    stages.before_narrating(run, narrator, scenes, folder, options.lr, options.seed, options.look,
                            options.recall)
    return narrator, scenes
