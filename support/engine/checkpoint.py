"""Checkpoints, read and written; and the frozen models, read.

A checkpoint is a folder in the format of PEFT:
    adapter_config.json         of PEFT: the base language model, and LoRA's settings
    adapter_model.safetensors   LoRA, connector and memory, under their published names
    narrator.json               the other settings (narrator.py: Config). Published folders do not
                                have it: their settings are inferred from the shapes of tensors

Tensors are read from safetensors only, never from pickles. No code that comes with a model is run
(trust_remote_code).
"""
from __future__ import annotations

import struct
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from support.common.devices import quiet
from support.common.disk import read_json, write_json, write_tensors
from support.common.errors import BadData, first_line
from support.engine.cpu import is_large, multiplies_bf16
from support.engine.lora import TARGETS

# Settings that change the meaning of LoRA's tensors. Only these values are supported.
LORA_DEFAULTS = {
    "peft_type": "LORA",
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "fan_in_fan_out": False,
    "lora_bias": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
}
ADAPTER = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
NARRATOR_JSON = "narrator.json"

# The names of CLAM's parameters: in clam.py -> in the published checkpoints. There, each follows
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
class CheckpointFiles:
    """The content of a checkpoint's folder."""
    folder: Path
    adapter: dict                       # adapter_config.json
    narrator: dict | None               # narrator.json; None: a published folder, which has none
    weights: dict[str, Tensor]          # adapter_model.safetensors


def read_checkpoint(source: str) -> CheckpointFiles:
    """A checkpoint from a folder or hub id. BadData if a file is missing or damaged."""
    folder = checkpoint_folder(source)
    narrator = None
    if (folder / NARRATOR_JSON).exists():
        narrator = read_object(folder / NARRATOR_JSON)

    file = folder / ADAPTER
    adapter = read_object(file)
    for key, default in LORA_DEFAULTS.items():
        if adapter.get(key) not in (None, default):
            value = str(adapter[key])[:60]
            raise BadData(f"{file}: {key} = {value} is not supported; plain LoRA only")
    missing = [key for key in ("r", "lora_alpha") if adapter.get(key) is None]
    if missing:
        raise BadData(f"{file}: lacks {', '.join(missing)}, without which LoRA has no meaning")

    return CheckpointFiles(folder, adapter, narrator, read_weights(folder / WEIGHTS))


def read_config(files: CheckpointFiles, make_config: Callable, llm: str | None, changes: dict):
    """The settings of a checkpoint, as narrator.py's Config.

    make_config  makes it from settings by name
    llm         another base language model
    changes     {setting: value}: these replace the values of the files
    """
    settings = files.narrator
    if settings is None:
        settings = inferred_settings(files.weights, files.folder)
    adapter_keys = {
        "llm": "base_model_name_or_path",
        "lora_rank": "r",
        "lora_alpha": "lora_alpha",
        "lora_dropout": "lora_dropout",
    }
    of_adapter = {}
    for name, key in adapter_keys.items():
        if files.adapter.get(key) is not None:
            of_adapter[name] = files.adapter[key]
    try:
        config = make_config(**settings | of_adapter | changes)
    except BadData as error:
        raise BadData(f"{files.folder}: {error}") from error

    # A checkpoint's folder may contain the frozen models, too.
    for name in config.MODEL_NAMES:
        model = getattr(config, name)
        if model and (files.folder / model).is_dir():
            setattr(config, name, str(files.folder / model))
    if llm:
        config.llm = llm
    return config


def build_narrator(narrator_class: type, files: CheckpointFiles, config, device: str,
                   dtype: torch.dtype):
    """A narrator from the files of a checkpoint and its settings.

    dtype       of the language model
    """
    llm, tokenizer = load_llm(config.llm, dtype)
    # Sizes are compared first, with tensors that take no memory: a wrong one may ask for too much.
    with torch.device("meta"):
        without_weights = type(llm)(deepcopy(llm.config))
        shapes = narrator_class(without_weights, tokenizer, config).trainable()
    compare(shapes, files.weights, files.folder / WEIGHTS)
    narrator = narrator_class(llm, tokenizer, config)
    load_parameters(narrator.trainable(), files.weights, files.folder / WEIGHTS)
    return narrator.to(device).eval()


def save_narrator(narrator, folder: Path, dtype: torch.dtype | None, **models: str | None) -> None:
    """Write the checkpoint of a narrator (narrator.py: Narrator.save).

    Each file appears complete or not at all.
    """
    config = replace(narrator.config, **models)

    modules = []
    for name, module in narrator.named_children():
        has_parameters = next(module.parameters(), None) is not None
        if name != "llm" and has_parameters:
            modules.append("clustering" if name == "memory" else name)
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "base_model_name_or_path": config.llm,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "target_modules": TARGETS,
        "modules_to_save": modules,
    }
    settings = {name: value for name, value in asdict(config).items()
                if not name.startswith("lora") and name != "llm"}
    weights = {name: p.to(dtype or p.dtype) for name, p in narrator.trainable().items()}

    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS, weights, {"format": "pt"})
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


def checkpoint_folder(source: str) -> Path:
    """The folder of a checkpoint.

    source      a folder, or a hub id owner/name or owner/name@revision: it is fetched
    """
    folder = Path(source)
    if folder.is_dir():
        return folder
    is_hub_id = source.count("/") == 1 and not source.startswith((".", "/"))
    if folder.exists() or not is_hub_id:
        raise BadData(f"model '{source}' is not a folder (nor a hub id owner/name)")
    from huggingface_hub import snapshot_download
    try:
        name, revision = parse_model_name(source)
        return Path(snapshot_download(name, **revision,
                                      allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:                  # the network fails in many ways
        raise BadData(f"model '{source}' is neither a folder nor could it be fetched from the hub: "
                      f"{first_line(error)}") from error


def read_object(file: Path) -> dict:
    content = read_json(required(file))
    if not isinstance(content, dict):
        raise BadData(f"{file}: expected an object")
    return content


def read_weights(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(required(file))
    except (OSError, SafetensorError) as error:
        raise BadData(f"{file} is damaged: {first_line(error)}") from error


def inferred_settings(weights: dict[str, Tensor], folder: Path) -> dict:
    """Settings of a published checkpoint (narrator.py: Config), from the names and shapes of its
    tensors.
    """
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
        "last_k": None,
        "width": width,
    }


def required(file: Path) -> Path:
    if not file.is_file():
        raise BadData(f"{file} is missing: not a checkpoint of a narrator")
    return file


def compare(parameters: dict[str, Tensor], weights: dict[str, Tensor], file: Path) -> None:
    """BadData unless names and shapes of a checkpoint's tensors are those of the parameters."""
    # PEFT also saves a copy of the language model's head.
    weights = {name: weight for name, weight in weights.items()
               if not name.endswith("base_layer.weight")}
    in_both = parameters.keys() & weights.keys()
    problems = {
        "lacks": parameters.keys() - weights.keys(),
        "has unexpected": weights.keys() - parameters.keys(),
        "has the wrong shape for": {name for name in in_both
                                    if parameters[name].shape != weights[name].shape},
    }
    for problem, names in problems.items():
        if names:
            listed = ", ".join(sorted(names)[:3])
            if len(names) > 3:
                listed += f" and {len(names) - 3} more"
            raise BadData(f"{file} {problem} {len(names)} tensors: {listed}; is it damaged, or of "
                          "other settings?")


@torch.no_grad()
def load_parameters(parameters: dict[str, Tensor], weights: dict[str, Tensor], file: Path) -> None:
    """Copy a checkpoint's tensors into the parameters of the same names; see `compare`."""
    compare(parameters, weights, file)
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])


# ---------------------------------------------------------------------- frozen models

# transformers raises all of these
LOADING = (OSError, ValueError, ImportError, KeyError, TypeError, RuntimeError, SafetensorError,
           struct.error)
PATIENCE = 5.0                                  # seconds for the hub's first answer
# {kind: (name in messages, option that names another model)}
MODELS = {
    "llm": ("language model", "--llm"),
    "vision": ("vision model", "--vision"),
}


def parse_model_name(source: str) -> tuple[str, dict]:
    """The name of a model, and the options that transformers needs to find it.

    owner/name@revision -> the id, and its revision
    FOLDER/FILE.gguf    -> the folder, and the name of the file
    All other names are returned as they are.
    """
    path = Path(source)
    if path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name}
    if "@" in source and not path.exists():
        name, _, revision = source.partition("@")
        return name, {"revision": revision}
    return source, {}


def check_model(source: str, kind: str) -> None:
    """BadData if there is no such model: no folder, not in the hub's cache, not on the hub.

    Checked first, because transformers asks the hub for half a minute before it raises an error.

    kind        a key of MODELS
    """
    name, where = parse_model_name(source)
    title, option = MODELS[kind]
    failure = f"{title} '{source}' cannot be loaded ({option} FOLDER_OR_HUB_ID sets it)"
    if Path(name).is_dir() or "gguf_file" in where:
        return                                  # errors in a folder are found when it is read
    if source.startswith((".", "/")):
        raise BadData(f"{failure}: there is no such folder")
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError
    try:
        if isinstance(try_to_load_from_cache(name, "config.json", **where), str):
            return
        get_hf_file_metadata(hf_hub_url(name, "config.json", **where), timeout=PATIENCE)
    except (EntryNotFoundError, HFValidationError):
        return                                  # no such file, or no id: transformers says more
    except Exception as error:                  # the network fails in many ways
        raise BadData(f"{failure}: it is no folder here, and the hub does not give it: "
                      f"{first_line(error)}") from error


def from_pretrained(Class: type, source: str, kind: str, **options):
    """What a class of transformers reads from a folder, hub id or .gguf file. BadData if it cannot.

    kind        a key of MODELS
    """
    quiet()
    check_model(source, kind)
    title, option = MODELS[kind]
    name, where = parse_model_name(source)
    try:
        return Class.from_pretrained(name, trust_remote_code=False, **where, **options)
    except LOADING as error:
        raise BadData(f"{title} '{source}' cannot be loaded ({option} FOLDER_OR_HUB_ID sets it); "
                      f"are all files of the model there? {first_line(error)}") from error


def load_weights(Class: type, source: str, kind: str, dtype: torch.dtype):
    """A model of transformers in a dtype, on the processor. BadData if its files lack weights,
    which transformers would fill in at random, or have others than the model.
    """
    model, report = from_pretrained(Class, source, kind, dtype=dtype, use_safetensors=True,
                                    output_loading_info=True)
    for problem in ("missing_keys", "unexpected_keys"):
        names = sorted(report[problem])
        if names:
            title, _ = MODELS[kind]
            raise BadData(f"{title} '{source}' cannot be used: of its weights, {len(names)} are "
                          f"{problem.removesuffix('_keys')}: {', '.join(names[:3])}")
    # Weights are views of the mapped file: any one of them would keep all of it in memory.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def load_llm(source: str, dtype: torch.dtype = torch.float32):
    """(causal LM, tokenizer) from a folder, hub id or .gguf file; on the processor."""
    from transformers import AutoModelForCausalLM
    tokenizer = load_tokenizer(source)
    return load_weights(AutoModelForCausalLM, source, "llm", dtype), tokenizer


def load_tokenizer(source: str):
    from transformers import AutoTokenizer
    return from_pretrained(AutoTokenizer, source, "llm")


def faster_dtype(source: str) -> torch.dtype:
    """The number format in which this processor streams a language model faster: bf16 for a large
    one, where it can multiply bf16, else fp32. The model's size follows from its settings.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    config = from_pretrained(AutoConfig, source, "llm")
    with torch.device("meta"):
        llm = AutoModelForCausalLM.from_config(config)
    return torch.bfloat16 if is_large(llm) and multiplies_bf16() else torch.float32


def token_ids(tokenizer, text: str) -> list[int]:
    """The ids of a text, without special tokens; BadData if the tokenizer cannot encode it."""
    try:
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    except Exception as error:                  # tokenizers raise errors of many types
        raise BadData(f"the tokenizer cannot encode {ascii(text)[:80]}: "
                      f"{first_line(error)}") from error


def load_vision_model(source: str, dtype: torch.dtype = torch.float32):
    """(vision model, settings of its preprocessor) from a folder or hub id.

    Of a model for images and text, the image half.
    """
    from transformers import AutoConfig, AutoModel
    config = from_pretrained(AutoConfig, source, "vision")
    has_text_half = hasattr(config, "vision_config")
    check_vision_config(config.vision_config if has_text_half else config, source)
    model = load_weights(AutoModel, source, "vision", dtype)
    if has_text_half:
        model = model.vision_model
    name, where = parse_model_name(source)
    file = Path(name) / "preprocessor_config.json"
    if not file.exists():
        from huggingface_hub import hf_hub_download
        try:
            file = Path(hf_hub_download(name, "preprocessor_config.json", **where))
        except LOADING as error:
            raise BadData(f"vision model '{source}' has no preprocessor_config.json: "
                          f"{first_line(error)}") from error
    settings = read_object(file)
    for key, least in (("image_mean", 0), ("image_std", 1e-6)):
        numbers = settings.get(key)
        if not (isinstance(numbers, list) and len(numbers) == 3
                and all(isinstance(n, int | float) and least <= n <= 1e3 for n in numbers)):
            raise BadData(f"{file}: {key} must be three numbers from {least:g} on")
    return model, settings


def check_vision_config(config, source: str) -> None:
    """BadData unless the settings are those of a vision transformer with square patches."""
    for name in ("image_size", "patch_size", "hidden_size"):
        if not isinstance(getattr(config, name, None), int):
            raise BadData(f"vision model '{source}': has no {name}, as vision transformers with "
                          f"square patches have; use SigLIP, CLIP, ViT or DINOv2")


def check_vision(model: str, vision: str | None, default: str) -> None:
    """BadData if the vision model of a narrator cannot be found; before anything is loaded.

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
