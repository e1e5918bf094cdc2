"""Checkpoints: one folder in the ecosystem's format (PEFT's), the published narrators' and our own (paper App. B.6).

    adapter_config.json         PEFT's: base language model, LoRA
    adapter_model.safetensors   LoRA, connector, CLAM, under their published names
    narrator.json               what PEFT's file cannot say (narrator.py: Config); published folders have none

`load` takes all or nothing: what is missing, damaged or left over is an error that names it. Does not include: pickles,
training states (train.py).
"""
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from common import BadData, first_line, quiet, read_json, replacing, write_json
from narrator import LORA_TARGETS, Config, Narrator


def load(source: str, llm: str | None = None, device: str = "cpu", dtype: torch.dtype = torch.float32,
         **changes) -> Narrator:
    """A trained narrator from a folder or hub id; `llm` and any field of Config can be replaced.

    A folder without narrator.json is a published checkpoint: what can be inferred is, the rest is the published
    default. Raises BadData if anything is missing, damaged or left over.
    """
    folder = find(source)
    adapter, own = read_object(folder / "adapter_config.json"), folder / "narrator.json"
    weights = read_weights(folder / "adapter_model.safetensors")
    if own.exists():
        values = read_object(own)
        if unknown := values.keys() - {f.name for f in fields(Config)}:
            raise BadData(f"{own}: unknown entries {sorted(unknown)}")
        config = Config(**values)
    else:
        config = infer(weights, folder)
    named = {"llm": "base_model_name_or_path", "lora_rank": "r", "lora_alpha": "lora_alpha"}
    config = replace(config, **{name: adapter[key] for name, key in named.items() if adapter.get(key)} | changes)
    for name in ("llm", "vision"):
        if (folder / getattr(config, name)).is_dir():
            setattr(config, name, str(folder / getattr(config, name)))
    config.llm = llm or config.llm
    narrator = Narrator(*load_llm(config.llm, dtype), config)
    fill(narrator, weights, folder / "adapter_model.safetensors")
    return narrator.to(device).eval()


def find(source: str) -> Path:
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


def infer(weights: dict[str, Tensor], folder: Path) -> Config:
    """Config of a published checkpoint, from what its tensors tell."""
    name = "base_model.model.clustering.query_embed.weight"
    connector = weights.get("base_model.model.connector.0.weight")
    if connector is None:
        raise BadData(f"{folder}: neither narrator.json nor connector weights: not a FlowNar checkpoint")
    if name not in weights:
        return Config(memory="none", prune=False, width=connector.shape[1])
    return Config(memory_tokens=len(weights[name]), memory_target=name.replace("query", "tgt") in weights,
                  readout="cls", keep_newline=True, width=connector.shape[1])


@torch.no_grad()
def fill(narrator: Narrator, weights: dict[str, Tensor], file: Path):
    """Copy a checkpoint's tensors in; every one must be there, fit and be used."""
    wanted = narrator.trainable()
    weights = {name: w for name, w in weights.items() if not name.endswith("base_layer.weight")}  # PEFT's copied head
    for problem, names in (("lacks", wanted.keys() - weights.keys()), ("has unexpected", weights.keys() - wanted.keys()),
                           ("has the wrong shape for", {n for n in wanted.keys() & weights.keys()
                                                        if wanted[n].shape != weights[n].shape})):
        if names:
            shown = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise BadData(f"{file} {problem} {len(names)} tensors: {shown}")
    for name, parameter in wanted.items():
        parameter.copy_(weights[name])


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


def save(narrator: Narrator, folder: str | Path, llm: str | None = None, vision: str | None = None,
         dtype: torch.dtype | None = None):
    """Write a checkpoint that `load` and PEFT read, in dtype if one is given; each file appears whole or not at all."""
    config, folder = narrator.config, Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    modules = ["connector"] + (["clustering"] if config.memory == "clam" else [])
    adapter = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": llm or config.llm,
               "r": config.lora_rank, "lora_alpha": config.lora_alpha, "lora_dropout": config.lora_dropout,
               "target_modules": LORA_TARGETS, "modules_to_save": modules, "bias": "none", "fan_in_fan_out": False,
               "inference_mode": True, "init_lora_weights": True}
    own = {name: value for name, value in asdict(config).items() if not name.startswith("lora") and name != "llm"}
    own["vision"] = vision or config.vision
    weights = {name: p.detach().to(dtype or p.dtype).cpu().contiguous() for name, p in narrator.trainable().items()}
    with replacing(folder / "adapter_model.safetensors") as part:
        save_file(weights, part, metadata={"format": "pt"})
    write_json(folder / "adapter_config.json", adapter)
    write_json(folder / "narrator.json", own)
