"""All stages of a toy narrator, from scratch (python train.py --data toy)."""
from functools import partial
from pathlib import Path

import torch

from baselines import lionfs, variants
from support.common.errors import BadData
from support.engine import checkpoint
from toy import stages
from train import Options, begin, fit, new_config, pretrained, save, train_narrator


# ---------------------------------------------------------------------- the miniature world


def train_toy(options: Options):
    """All stages, from scratch; models that are given, or already exist, are kept. With --init,
    only the last stage.
    """
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
        encoder = lionfs.load_encoders(str(vision), str(second) if two else None, options.grid)
        torch.manual_seed(options.seed)
        config = new_config(options, str(llm), str(vision), 1 + options.grid ** 2, encoder.width)
        config.vision_second = str(second) if two else None
        narrator = variants.new_narrator(*checkpoint.load_llm(config.llm), config)
        if not options.llm and narrator.llm.config.hidden_size != options.llm_width:
            raise BadData(f"{llm} has another width than {options.llm_width}; choose another --output")
        name = f"features{'' if options.grid == 3 else options.grid}{'_second' * two}.safetensors"
        cache = (folder if two else vision.parent) / name
        videos = stages.scenes(encoder, narrator.layout, options.limit, variant, cache)
        begin(narrator, options, videos)
        stages.before_narrating(run, narrator, videos, options.lr, options.seed, not options.no_remember, options.look)
    train_narrator(narrator, videos, options)
    save(narrator, options, torch.bfloat16)
