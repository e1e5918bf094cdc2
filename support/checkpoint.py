"""Checkpoint files: one folder in the ecosystem's format (PEFT's), as settings and tensors; and language models.

    adapter_config.json         PEFT's: base language model, LoRA
    adapter_model.safetensors   LoRA, connector, memory, under their published names
    narrator.json               what PEFT's file cannot say (narrator.py: Config); published folders have none

What the settings mean is narrator.py's business (`Narrator.load`, `Narrator.save`). Safetensors
only, never pickles, and no code that comes with a model (trust_remote_code).
"""
from __future__ import annotations

import struct
from collections.abc import Collection
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from support.common import BadData, first_line, quiet, read_json, write_json, write_tensors

# settings that change the meaning of LoRA's tensors, and the only value of each that is supported
PLAIN = {"peft_type": "LORA", "bias": "none", "use_rslora": False, "use_dora": False, "fan_in_fan_out": False,
         "lora_bias": False, "rank_pattern": {}, "alpha_pattern": {}, "layers_to_transform": None}
ADAPTER, WEIGHTS, OWN = "adapter_config.json", "adapter_model.safetensors", "narrator.json"


def read_checkpoint(source: str) -> tuple[Path, dict, dict | None, dict[str, Tensor]]:
    """A folder or hub id -> folder, adapter settings, our own settings (None: a published folder), tensors.

    Raises BadData if a file is missing or damaged.
    """
    folder = checkpoint_folder(source)
    own = read_object(folder / OWN) if (folder / OWN).exists() else None
    adapter = read_object(folder / ADAPTER)
    for key, plain in PLAIN.items():
        if adapter.get(key) not in (None, plain):
            raise BadData(f"{folder / ADAPTER}: {key} = {str(adapter[key])[:60]} is not supported; plain LoRA only")
    if missing := [key for key in ("r", "lora_alpha") if adapter.get(key) is None]:
        raise BadData(f"{folder / ADAPTER}: lacks {', '.join(missing)}, without which LoRA has no meaning")
    return folder, adapter, own, read_weights(folder / WEIGHTS)


def write_checkpoint(folder: Path, adapter: dict, own: dict, weights: dict[str, Tensor]) -> None:
    """Each file appears whole or not at all. `adapter`: the settings that vary; plain LoRA's others are added."""
    adapter = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "fan_in_fan_out": False,
               "inference_mode": True, "init_lora_weights": True} | adapter
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS, weights, {"format": "pt"})
    write_json(folder / ADAPTER, adapter)
    write_json(folder / OWN, own)


def checkpoint_folder(source: str) -> Path:
    """The folder of a checkpoint; other names, owner/name or owner/name@revision, are fetched from the hub."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    if folder.exists() or source.startswith((".", "/")) or source.count("/") != 1:
        raise BadData(f"model '{source}' is not a folder (nor a hub id owner/name)")
    from huggingface_hub import snapshot_download
    try:
        name, revision = pinned(source)
        return Path(snapshot_download(name, **revision, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # the network fails in many ways, the user needs one line
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


def check_settings(config, choices: dict[str, Collection[str]], ranges: dict[tuple[float, float], str]) -> None:
    """BadData if a field of a dataclass has the wrong type, is none of its choices, or is out of its range (a space
    parts the names of a range; None is in all)."""
    for f in fields(config):
        value = getattr(config, f.name)
        allowed = f.type | int if float in (f.type, *get_args(f.type)) else f.type
        if not isinstance(value, allowed) or isinstance(value, bool) and f.type is not bool:
            raise BadData(f"{f.name} of a narrator cannot be {value!r}")
    for name, names in choices.items():
        if getattr(config, name) not in names:
            raise BadData(f"{name} of a narrator is one of {', '.join(names)}, not {getattr(config, name)!r}")
    for (low, high), names in ranges.items():
        for name in names.split():
            value = getattr(config, name)
            if value is not None and not low <= value <= high:
                raise BadData(f"{name} of a narrator must be from {low:g} to {high:g}, not {value!r}")


def inferred_settings(weights: dict[str, Tensor], folder: Path) -> dict:
    """What the names and shapes of a published checkpoint's tensors say of its narrator (narrator.py: Config)."""
    name = "base_model.model.clustering.query_embed.weight"
    connector = weights.get("base_model.model.connector.0.weight")
    if connector is None:
        raise BadData(f"{folder}: neither narrator.json nor connector weights: not a FlowNar checkpoint")
    if name not in weights:
        return {"memory": "none", "prune": False, "width": connector.shape[1]}
    own = weights.get("base_model.model.narration_memory.z", ())              # ours; in no published checkpoint
    return {"memory_tokens": len(weights[name]), "memory_target": name.replace("query", "tgt") in weights,
            "readout": "cls", "narration_memory": len(own), "last_k": 0 if len(own) else None,
            "width": connector.shape[1]}


def required(file: Path) -> Path:
    if not file.is_file():
        raise BadData(f"{file} is missing: not a checkpoint of a narrator")
    return file


def compare(parameters: dict[str, Tensor], weights: dict[str, Tensor], file: Path) -> None:
    """BadData unless names and shapes of a checkpoint's tensors are those of the parameters."""
    weights = {name: w for name, w in weights.items() if not name.endswith("base_layer.weight")}  # PEFT's copied head
    for problem, names in (("lacks", parameters.keys() - weights.keys()),
                           ("has unexpected", weights.keys() - parameters.keys()),
                           ("has the wrong shape for", {n for n in parameters.keys() & weights.keys()
                                                        if parameters[n].shape != weights[n].shape})):
        if names:
            shown = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise BadData(f"{file} {problem} {len(names)} tensors: {shown}")


@torch.no_grad()
def fill(parameters: dict[str, Tensor], weights: dict[str, Tensor], file: Path) -> None:
    """Copy a checkpoint's tensors into the parameters of the same names; see `compare`."""
    compare(parameters, weights, file)
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])


# ---------------------------------------------------------------------- frozen models: safetensors or .gguf only

LOADING = (OSError, ValueError, ImportError, KeyError, TypeError, RuntimeError, SafetensorError,
           struct.error)                                                               # what transformers raises


def pinned(source: str) -> tuple[str, dict]:
    """"owner/name@revision" -> the id and its revision; "FILE.gguf" -> its folder and name; anything else as it is."""
    path = Path(source)
    if path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name}
    name, at, revision = source.partition("@")
    return (name, {"revision": revision}) if at and not path.exists() else (source, {})


PATIENCE = 5.0                                  # seconds for the hub's first answer

# what models are called in messages, and the option that names another one
MODELS = {"llm": ("language model", "--llm"), "vision": ("vision model", "--vision")}


def check_model(source: str, kind: str) -> None:
    """BadData if a model, of a `kind` of MODELS, is neither a folder, nor fetched, nor to be had: transformers asks the
    hub for half a minute before it says so."""
    name, how = pinned(source)
    what, option = MODELS[kind]
    if Path(name).is_dir() or "gguf_file" in how:
        return                                  # what is wrong with a folder is said when it is read
    if source.startswith((".", "/")):
        raise BadData(f"{what} '{source}' cannot be loaded ({option} FOLDER_OR_HUB_ID sets it): there is no such folder")
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError
    try:
        if isinstance(try_to_load_from_cache(name, "config.json", **how), str):
            return
        get_hf_file_metadata(hf_hub_url(name, "config.json", **how), timeout=PATIENCE)
    except (EntryNotFoundError, HFValidationError):            # not this file, or no id: transformers says what is wrong
        return
    except Exception as error:                  # the network fails in many ways, the user needs one line
        raise BadData(f"{what} '{source}' cannot be loaded ({option} FOLDER_OR_HUB_ID sets it): it is no folder here, "
                      f"and the hub does not give it: {first_line(error)}") from error


def complete(about: dict) -> None:
    """ValueError if the files lack weights: transformers would silently fill them in at random."""
    if missing := sorted(about["missing_keys"]):
        raise ValueError(f"its files lack {len(missing)} weights: {', '.join(missing[:3])}")


def load_llm(source: str, dtype: torch.dtype = torch.float32):
    """(causal LM, tokenizer) from a folder, hub id or .gguf file, attention by PyTorch's sdpa (the mask is boolean)."""
    from transformers import AutoModelForCausalLM
    check_model(source, "llm")
    tokenizer = load_tokenizer(source)
    try:
        name, how = pinned(source)
        llm, about = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, attn_implementation="sdpa", use_safetensors=True,
            trust_remote_code=False, output_loading_info=True, **how)
        complete(about)
    except LOADING as error:
        raise BadData(f"language model '{source}' cannot be loaded (--llm FOLDER_OR_HUB_ID sets it): "
                      f"{first_line(error)}") from error
    return llm, tokenizer


def without_weights(llm):
    """A model of the same family and sizes, made anew; on the device "meta" it takes no memory."""
    return type(llm)(deepcopy(llm.config))


def load_tokenizer(source: str):
    from transformers import AutoTokenizer
    quiet()
    check_model(source, "llm")
    try:
        name, how = pinned(source)
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False, **how)
    except LOADING as error:
        raise BadData(f"tokenizer '{source}' cannot be loaded (--llm FOLDER_OR_HUB_ID sets it): "
                      f"{first_line(error)}") from error


def token_ids(tokenizer, text: str) -> list[int]:
    """The ids of a text, without special tokens; BadData if the tokenizer has none for it."""
    try:
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    except Exception as error:  # an unknown word, half a surrogate pair: tokenizers raises whatever it likes
        raise BadData(f"the tokenizer cannot encode {ascii(text)[:80]}: {first_line(error)}") from error


def load_vision_model(source: str, dtype: torch.dtype = torch.float32):
    """(vision model, its preprocessor's settings) from a folder or hub id; of image-text models the image half."""
    from transformers import AutoConfig, AutoModel
    quiet()
    check_model(source, "vision")
    try:
        name, how = pinned(source)
        model, about = AutoModel.from_pretrained(
            name, dtype=dtype, use_safetensors=True, trust_remote_code=False,
            output_loading_info=True, **how)
        complete(about)
        config = AutoConfig.from_pretrained(name, trust_remote_code=False, **how)
        if hasattr(config, "vision_config"):
            model = model.vision_model
        file = Path(name) / "preprocessor_config.json"
        if not file.exists():
            from huggingface_hub import hf_hub_download
            file = Path(hf_hub_download(name, "preprocessor_config.json", **how))
        settings = read_object(file)
        for key, low in (("image_mean", 0), ("image_std", 1e-6)):
            if not (isinstance(settings.get(key), list) and len(settings[key]) == 3
                    and all(isinstance(n, int | float) and low <= n <= 1e3 for n in settings[key])):
                raise BadData(f"{file}: {key} must be three numbers from {low:g} on")
        return model, settings
    except BadData:
        raise
    except LOADING as error:
        raise BadData(f"vision model '{source}' cannot be loaded (--vision FOLDER_OR_HUB_ID sets it): "
                      f"{first_line(error)}") from error
