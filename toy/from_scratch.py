"""All stages of a toy narrator, from scratch (python train.py --data toy)."""
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

import narrator as nar
from streams.late import LateBatches
from support.common.errors import BadData
from support.engine import checkpoint
from support.engine.start import first_weights
from toy import stages, world
from train import Recipe, new_config, pretrained, save, train_narrator


def train_toy(options: Recipe):
    """Train all stages; with --init, only the last one."""
    torch.manual_seed(options.seed)
    variant = world.find_world(options.world, options.idle)
    kitchens = world.kitchens("train", options.limit, world=variant)
    if options.init:
        narrator = pretrained(options)
        scenes = stages.scenes(narrator.vision_encoder(), narrator.layout, kitchens)
    else:
        narrator, scenes = before_last_stage(options, variant, kitchens)
    train_narrator(narrator, scenes, options, batches=LateBatches)
    save(narrator, options, torch.bfloat16)


def before_last_stage(options: Recipe, variant: world.World, kitchens: Iterable[world.Kitchen],
                      ) -> tuple[nar.Narrator, list[stages.Scene]]:
    """A narrator before the paper's training, and its training videos.

    Its models are trained, unless they are given or already exist.
    """
    folder = Path(options.output)
    vision = options.vision or str(folder / "vision")
    llm = options.llm or str(folder / "llm")
    J = 1 + options.grid ** 2
    check_toy_options(options)
    if not options.vision:
        # refuses settings that cannot be
        new_config(options, J, stages.WIDTH, llm=llm, vision=vision)
        train_model(stages.encoder, options, vision, variant)
    if not options.llm:
        train_model(stages.language, options, llm, variant)

    encoder = nar.VisionEncoder(vision, options.grid)
    torch.manual_seed(options.seed)
    config = new_config(options, J, encoder.width, llm=llm, vision=vision)
    narrator = nar.new_narrator(*checkpoint.load_llm(llm), config)
    if not options.llm and narrator.llm.config.hidden_size != options.llm_width:
        raise BadData(f"{llm} has another width than {options.llm_width}; choose another --output")

    scenes = stages.scenes(encoder, narrator.layout, kitchens)
    first_weights(narrator, options.start, scenes)
    if options.freeze_memory:
        narrator.memory.requires_grad_(False)
    stages.before_narrating(options, narrator, scenes)
    return narrator, scenes


def check_toy_options(options: Recipe) -> None:
    """BadData for what would stop a later stage, before anything is trained."""
    if options.llm_width % 8:
        raise BadData(f"--llm-width must be a multiple of 8, not {options.llm_width}: "
                      "there are four heads of even width")
    if options.look and not Path(options.look).is_file():
        raise BadData(f"--look: {options.look}: no such file")
    for kind in ("vision", "llm"):
        if kind in options.given:
            checkpoint.read_model_config(getattr(options, kind), kind)


def train_model(stage: Callable, options: Recipe, model: str, variant: world.World) -> None:
    """Train an encoder or a language model, unless that is done."""
    if not (Path(model) / "model.safetensors").exists():
        torch.manual_seed(options.seed)
        stage(options, Path(model), variant)
