"""Checkpoints of narrators, read and written.

A checkpoint is a folder in the format of PEFT:
    adapter_config.json         of PEFT: the base language model, and LoRA's settings
    adapter_model.safetensors   LoRA, connector and memory, under the names of the authors' adapters
    narrator.json               the other settings (narrator.py: Config). The authors' do not
                                have it: their settings are inferred from the shapes of tensors

Tensors are read from safetensors only, never from pickles.
"""
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from support.common.disk import expecting, write_json, write_tensors
from support.common.errors import BadData
from support.common.marks import digest_of, marks_of
from support.common.progress import say_as_one
from support.common.text import listed
from support.engine.folders import (
    ADAPTER, WEIGHTS, cannot_be_loaded, model_folder, name_and_revision, portable_path,
    read_object, tensors_of,
)
from support.engine.frozen import FrozenModel, faster_dtype, find_model, load_llm
from support.engine.lora import TARGETS
from support.engine.registry import make_config, new_narrator

# PEFT's settings that change nothing in what LoRA's tensors mean. Which layers have some, their
# names say.
HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode",
    "layers_pattern", "lora_alpha", "lora_dropout", "megatron_config", "megatron_core",
    "modules_to_save", "peft_version", "qalora_group_size", "r", "revision", "target_modules",
    "task_type",
}
# All others must be switched off, or have one of these values.
OFF = (None, False, "none", {}, [])
ALLOWED = {
    "peft_type": ("LORA",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),   # others change the base, too
}
NARRATOR_JSON = "narrator.json"
SEEN = "seen_from_here"         # in it: the ways from the checkpoint to models elsewhere
# PEFT also saves what LoRA of the head is added to
HEAD = "base_model.model.lm_head.base_layer.weight"

# The names of CLAM's parameters: in clam.py -> in the authors' checkpoints. There, each follows
# "clustering."
CLAM_NAMES = {
    "z": "query_embed.weight",
    "target": "tgt_embed.weight",
    "self_attn.": "layers.0.self_attn.",
    "norm_a.": "layers.0.norm1.",
    "norm_y.": "layers.0.norm2.",
    "norm_m.": "layers.0.mlp_norm.",
    "w_q.": "layers.0.multihead_attn.q.",
    "w_k.": "layers.0.multihead_attn.k.",
    "w_v.": "layers.0.multihead_attn.v.",
    "w_output_gate.": "layers.0.multihead_attn.g_proj.",
    "w_gate.": "layers.0.multihead_attn.gk_proj.",
    "w_o.": "layers.0.multihead_attn.o_proj.",
    "norm_o.": "layers.0.multihead_attn.g_norm.",
    "mlp.up_proj.": "layers.0.mlp.gate_proj.",
    "mlp.down_proj.": "layers.0.mlp.down_proj.",
}


@dataclass
class Checkpoint:
    """A checkpoint that has been read, before its frozen models are loaded."""
    folder: Path
    config: Any                         # narrator.py: Config
    weights: dict[str, Tensor]          # adapter_model.safetensors

    def narrator(self, device: str = "cpu", dtype: torch.dtype | None = torch.float32):
        """The narrator (narrator.py: load)."""
        model = find_model(self.config.llm, "llm")
        model.known_mark(f"the narrator {self.folder}", self.config.llm_mark)
        narrator = narrator_on_llm(self.config, model, dtype)
        file = self.folder / WEIGHTS
        # of all that is merged
        merged = [marks_of(self.weights.items()), self.config.lora_alpha]
        head = self.weights.pop(HEAD, None)
        if head is not None:
            check_head(narrator.llm.lm_head.base_layer.weight, head, file, self.config.llm)
        load_parameters(narrator.trainable(), self.weights, file)
        narrator.mark = digest_of(json.dumps(merged, sort_keys=True))[:12]
        return narrator.to(device).eval()


def open_checkpoint(source: str | Path, llm: str | None = None, **changes) -> Checkpoint:
    """A checkpoint from a folder or hub id. BadData if a file is missing or damaged.

    llm         where the base language model is
    changes     {setting: value}: these replace the values of the files
    """
    folder = model_folder(str(source), "narrator")
    if not (folder / ADAPTER).exists():
        raise cannot_be_loaded(str(source), "narrator", f"it has no {ADAPTER}")
    adapter = read_object(folder / ADAPTER)
    for name, value in adapter.items():
        if name not in HARMLESS and value not in ALLOWED.get(name, OFF):
            raise BadData(f"{folder / ADAPTER}: {name} = {str(value)[:60]} is not supported; "
                          f"plain LoRA only")
    weights = dict(tensors_of(folder / WEIGHTS))
    if (folder / NARRATOR_JSON).exists():
        settings = read_object(folder / NARRATOR_JSON)
    else:                               # the authors' have none
        settings = inferred_settings(weights, folder)
    with expecting(folder / NARRATOR_JSON, f'"{SEEN}": {{"llm": folder, "vision": folder}}'):
        moved = {kind: Path(place) for kind, place in settings.pop(SEEN, {}).items()}
    base = adapter.get("base_model_name_or_path")
    revision = adapter.get("revision")
    if base and revision and "@" not in base and not Path(base).exists():
        base = f"{base}@{revision}"             # as PEFT takes it
    of_adapter = {
        "llm": llm or base,
        "lora_rank": adapter.get("r"),
        "lora_alpha": adapter.get("lora_alpha"),
        "lora_dropout": adapter.get("lora_dropout", 0),
    }
    try:
        config = make_config(**settings | of_adapter | changes)
    except BadData as error:
        raise BadData(f"{folder}: {error}") from error

    # A checkpoint's folder may contain the frozen models, too, or have been moved together with them.
    for name in config.MODEL_NAMES:
        model = getattr(config, name)
        is_given = model in (llm, changes.get("vision"))
        for place in (moved.get(name), model):
            if place and not is_given and (folder / place).is_dir():
                setattr(config, name, os.path.normpath(folder / place))
                break
    return Checkpoint(folder, config, weights)


def narrator_on_llm(config, model: FrozenModel, dtype: torch.dtype | None):
    """A narrator with random weights on a language model.

    config      narrator.py: Config
    dtype       of the language model; None: what is faster on a processor
    """
    llm, tokenizer = load_llm(model, dtype or faster_dtype(model))
    return new_narrator(llm, tokenizer, replace(config, llm_mark=model.mark))


def save_narrator(narrator, folder: Path, dtype: torch.dtype | None) -> None:
    """Write the checkpoint of a narrator (narrator.py: Narrator.save).

    Each file appears complete or not at all.
    """
    if narrator.is_merged:
        raise BadData("a narrator whose LoRA is merged cannot be saved; save it before merge()")
    config = narrator.config
    models = {kind: portable_path(getattr(config, kind), folder) for kind in config.MODEL_NAMES}
    config = replace(config, **models)
    weights = {name: p.to(dtype or p.dtype) for name, p in narrator.trainable().items()}
    modules = {name.split(".")[2] for name in weights}
    base, revision = config.llm, None
    if not Path(base).exists() and not (folder / base).exists():
        base, revision = name_and_revision(base)
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "target_modules": TARGETS,
        "modules_to_save": sorted(modules - {"model", "lm_head"}),         # beside the language model
    }
    settings = {name: value for name, value in asdict(config).items()
                if not name.startswith("lora") and name != "llm"}
    settings[SEEN] = {kind: os.path.relpath(model, folder.resolve())
                      for kind, model in models.items() if os.path.isabs(model)}

    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS, weights, {"format": "pt", "settings": NARRATOR_JSON})
    write_json(folder / ADAPTER, adapter)
    write_json(folder / NARRATOR_JSON, settings)


def published_name(name: str) -> str:
    """The name of a narrator's parameter -> its name in adapter_model.safetensors."""
    if name.startswith("memory."):
        name = name.removeprefix("memory.")
        for ours, published in CLAM_NAMES.items():
            if name.startswith(ours):
                name = published + name.removeprefix(ours)
                break
        name = "clustering." + name
    name = name.removeprefix("llm.")
    return "base_model.model." + name


def check_head(base: Tensor, head: Tensor, file: Path, source: str) -> None:
    """BadData unless `head` [V, D_lm] is that of the language model, `base`, up to rounding to bf16.

    An adapter computes something else on another model of the same shape.
    """
    same = head.shape == base.shape
    if same:
        rows = base[::100].float()                          # a hundredth of all will do
        same = (head[::100].float() - rows).norm() < 0.004 * rows.norm()
    if not same:
        raise BadData(f"{file} was trained on another language model than {source}: its copy of "
                      f"the head differs; give the right one with --llm")


def inferred_settings(weights: dict[str, Tensor], folder: Path) -> dict:
    """Settings of the authors' checkpoint (narrator.py: Config), by the names and shapes of its
    tensors.
    """
    with safe_open(folder / WEIGHTS, "pt") as file:
        if "settings" in (file.metadata() or {}):
            say_as_one(f"{folder}: was saved with a {NARRATOR_JSON}, which is missing; it is read as "
                       f"a checkpoint of the authors, which has none")
    connector = weights.get("base_model.model.connector.0.weight")
    if connector is None:
        raise BadData(f"{folder}: neither narrator.json nor connector weights: "
                      f"not a FlowNar checkpoint")
    width = connector.shape[1]
    queries = weights.get("base_model.model.clustering.query_embed.weight")
    if queries is None:
        return {"memory": "none", "prune": False, "width": width}
    return {
        "memory_tokens": len(queries),
        "memory_target": "base_model.model.clustering.tgt_embed.weight" in weights,
        "readout": "cls",
        "width": width,
    }


@torch.no_grad()
def load_parameters(parameters: dict[str, Tensor], weights: dict[str, Tensor], file: Path) -> None:
    """Copy a checkpoint's tensors into the parameters of the same names. BadData unless they have
    the names and shapes of the parameters, and are numbers.
    """
    problems = {
        "lacks": parameters.keys() - weights.keys(),
        "has unexpected": weights.keys() - parameters.keys(),
        "has the wrong shape for": {name for name in parameters.keys() & weights.keys()
                                    if parameters[name].shape != weights[name].shape},
        "has no finite numbers in": {
            name for name, weight in weights.items()
            if not (weight.is_floating_point() and weight.sum(dtype=torch.float32).isfinite())
        },
    }
    for problem, names in problems.items():
        if names:
            raise BadData(f"{file} {problem} {len(names)} tensors: {listed(sorted(names))}; is it "
                          f"damaged, or were other layers trained (target_modules, "
                          f"modules_to_save)?")
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])
