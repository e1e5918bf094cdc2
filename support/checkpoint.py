"""Checkpoint files: one folder in the ecosystem's format (PEFT's), as settings and tensors; and language models.

    adapter_config.json         PEFT's: base language model, LoRA
    adapter_model.safetensors   LoRA, connector, memory, under their published names
    narrator.json               what PEFT's file cannot say (narrator.py: Config); published folders have none

What the settings mean is narrator.py's business (`Narrator.load`, `Narrator.save`). Safetensors only, never pickles.
"""
from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.common import BadData, first_line, quiet, read_json, replacing, write_json

ADAPTER, WEIGHTS, OWN = "adapter_config.json", "adapter_model.safetensors", "narrator.json"


def read_checkpoint(source: str) -> tuple[Path, dict, dict | None, dict[str, Tensor]]:
    """A folder or hub id -> folder, adapter settings, our own settings (None: a published folder), tensors.

    Raises BadData if a file is missing or damaged.
    """
    folder = checkpoint_folder(source)
    own = read_object(folder / OWN) if (folder / OWN).exists() else None
    return folder, read_object(folder / ADAPTER), own, read_weights(folder / WEIGHTS)


def write_checkpoint(folder: Path, adapter: dict, own: dict, weights: dict[str, Tensor]) -> None:
    """Each file appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / WEIGHTS) as part:
        save_file({name: w.detach().cpu().contiguous() for name, w in weights.items()}, part, metadata={"format": "pt"})
    write_json(folder / ADAPTER, adapter)
    write_json(folder / OWN, own)


def checkpoint_folder(source: str) -> Path:
    """The folder of a checkpoint; a name that is no folder is fetched from the hub."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    if folder.exists() or source.startswith((".", "/")) or source.count("/") != 1:
        raise BadData(f"model '{source}' is not a folder (nor a hub id owner/name)")
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(source, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # whatever the network says, the user needs the same one line
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


def required(file: Path) -> Path:
    if not file.is_file():
        raise BadData(f"{file} is missing: not a checkpoint of a narrator")
    return file


@torch.no_grad()
def fill(parameters: dict[str, Tensor], weights: dict[str, Tensor], file: Path) -> None:
    """Copy a checkpoint's tensors into parameters of the same names; every one must be there, fit and be used."""
    weights = {name: w for name, w in weights.items() if not name.endswith("base_layer.weight")}  # PEFT's copied head
    for problem, names in (("lacks", parameters.keys() - weights.keys()),
                           ("has unexpected", weights.keys() - parameters.keys()),
                           ("has the wrong shape for", {n for n in parameters.keys() & weights.keys()
                                                        if parameters[n].shape != weights[n].shape})):
        if names:
            shown = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise BadData(f"{file} {problem} {len(names)} tensors: {shown}")
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])


# ---------------------------------------------------------------------- base language models

def gguf(source: str) -> tuple[str, dict]:
    """What transformers wants instead of FILE.gguf; anything else stays as it is."""
    path = Path(source)
    return (str(path.parent), {"gguf_file": path.name}) if path.suffix == ".gguf" else (source, {})


def load_llm(source: str, dtype: torch.dtype = torch.float32):
    """(causal LM, tokenizer) from a folder, hub id or .gguf file, attention by PyTorch's sdpa (the mask is boolean)."""
    from transformers import AutoModelForCausalLM
    tokenizer = load_tokenizer(source)
    try:
        where, how = gguf(source)
        llm = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, attn_implementation="sdpa", **how)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise BadData(f"language model '{source}' cannot be loaded (--llm FOLDER_OR_HUB_ID sets it): "
                      f"{first_line(error)}") from error
    return llm, tokenizer


def load_tokenizer(source: str):
    from transformers import AutoTokenizer
    quiet()
    try:
        where, how = gguf(source)
        return AutoTokenizer.from_pretrained(where, **how)
    except (OSError, ValueError, ImportError) as error:
        raise BadData(f"tokenizer '{source}' cannot be loaded (--llm FOLDER_OR_HUB_ID sets it): "
                      f"{first_line(error)}") from error
