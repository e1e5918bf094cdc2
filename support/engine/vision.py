"""Whether a vision model can be found, before anything is loaded, and whether it can be used."""
from __future__ import annotations

from support.common.errors import BadData
from support.engine.checkpoint import (
    ADAPTER, NARRATOR_JSON, check_model, checkpoint_folder, read_object, required,
)


def check_vision(model: str, vision: str | None, default: str) -> None:
    """BadData if the vision model of a narrator cannot be found.

    vision      given instead of the checkpoint's own
    default     that of a checkpoint without settings of its own
    """
    folder = checkpoint_folder(model)
    required(folder / ADAPTER)                  # else it is no checkpoint at all
    settings = read_object(folder / NARRATOR_JSON) if (folder / NARRATOR_JSON).exists() else {}
    names = [vision or settings.get("vision", default), settings.get("vision_second")]
    for name in names:
        if isinstance(name, str) and not (folder / name).is_dir():
            check_model(name, "vision")


def check_vision_output(output, patches: int) -> None:
    """BadData unless a vision model's output has a token for each patch, and a pooled one."""
    has_patches = output.last_hidden_state.shape[1] >= patches
    if not has_patches or output.get("pooler_output") is None:
        raise BadData("the vision model has no token for each patch, or no pooled output; use "
                      "SigLIP, CLIP, ViT or DINOv2")
