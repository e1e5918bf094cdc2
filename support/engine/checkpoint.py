"""Checkpoint files: one folder in the ecosystem's format (PEFT's), as settings and tensors; and language models.

    adapter_config.json         PEFT's: base language model, LoRA
    adapter_model.safetensors   LoRA, connector, memory, under their published names
    narrator.json               what PEFT's file cannot say (narrator.py: Config); published folders have none

What the settings mean is narrator.py's business (`Narrator.load`, `Narrator.save`). Safetensors
only, never pickles, and no code that comes with a model (trust_remote_code).
"""
from __future__ import annotations

import struct
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from support.common.devices import quiet
from support.common.disk import read_json, write_json, write_tensors
from support.common.errors import BadData, first_line
from support.engine.int8 import check_int8
from support.engine.lora import TARGETS, merge_into_int8
from support.engine.weights import keep_embedding, map_for_int8, read_model

# settings that change the meaning of LoRA's tensors, and the only value of each that is supported
LORA_DEFAULTS = {"peft_type": "LORA", "bias": "none", "use_rslora": False, "use_dora": False,
                 "fan_in_fan_out": False, "lora_bias": False, "rank_pattern": {}, "alpha_pattern": {},
                 "layers_to_transform": None}
ADAPTER = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
NARRATOR_JSON = "narrator.json"

# CLAM's parameters here -> in the published checkpoints, where all names begin with "clustering."
CLAM_NAMES = {
    "z": "query_embed.weight", "target": "tgt_embed.weight",
    "self_attn.": "layers.0.self_attn.",
    "norm_a.": "layers.0.norm1.", "norm_y.": "layers.0.norm2.", "norm_m.": "layers.0.mlp_norm.",
    "w_q.": "layers.0.multihead_attn.q.", "w_k.": "layers.0.multihead_attn.k.",
    "w_v.": "layers.0.multihead_attn.v.", "w_output_gate.": "layers.0.multihead_attn.g_proj.",
    "w_gate.": "layers.0.multihead_attn.gk_proj.", "w_o.": "layers.0.multihead_attn.o_proj.",
    "norm_o.": "layers.0.multihead_attn.g_norm.",
    "mlp.up_proj.": "layers.0.mlp.gate_proj.", "mlp.down_proj.": "layers.0.mlp.down_proj.",
}


@dataclass
class Files:
    """What a checkpoint's folder holds."""
    folder: Path
    adapter: dict                       # PEFT's settings
    narrator: dict | None               # our own settings; None: a published folder, which has none
    weights: dict[str, Tensor]          # under their published names


def read_checkpoint(source: str) -> Files:
    """A checkpoint from a folder or hub id. BadData if a file is missing or damaged."""
    folder = checkpoint_folder(source)
    narrator = None
    if (folder / NARRATOR_JSON).exists():
        narrator = read_object(folder / NARRATOR_JSON)
    adapter = read_object(folder / ADAPTER)
    for key, default in LORA_DEFAULTS.items():
        if adapter.get(key) not in (None, default):
            value = str(adapter[key])[:60]
            raise BadData(f"{folder / ADAPTER}: {key} = {value} is not supported; plain LoRA only")
    if missing := [key for key in ("r", "lora_alpha") if adapter.get(key) is None]:
        raise BadData(f"{folder / ADAPTER}: lacks {', '.join(missing)}, without which LoRA has no meaning")
    return Files(folder, adapter, narrator, read_weights(folder / WEIGHTS))


def read_config(files: Files, Config: type, llm: str | None, changes: dict):
    """The settings of a checkpoint, as narrator.py's Config; `llm` and `changes` replace what the files say."""
    if files.narrator is None:
        settings = inferred_settings(files.weights, files.folder)
    else:
        settings = files.narrator
        if unknown := settings.keys() - {f.name for f in fields(Config)}:
            raise BadData(f"{files.folder / NARRATOR_JSON}: unknown entries {sorted(unknown)}")
    config = Config(**settings)
    names = {"llm": "base_model_name_or_path", "lora_rank": "r", "lora_alpha": "lora_alpha",
             "lora_dropout": "lora_dropout"}
    of_adapter = {name: files.adapter[key] for name, key in names.items() if files.adapter.get(key) is not None}
    config = replace(config, **of_adapter | changes)
    for name in ("llm", "vision", "vision_second"):
        model = getattr(config, name)
        if model and (files.folder / model).is_dir():                   # a model inside the checkpoint's folder
            setattr(config, name, str(files.folder / model))
    if llm:
        config.llm = llm
    return config


def build_narrator(narrator_class: type, files: Files, config, device: str, dtype: torch.dtype):
    """A narrator from the files of a checkpoint and its settings (narrator.py: Narrator.load)."""
    if dtype == torch.int8:
        check_int8(device)
        llm, frozen_weights, tokenizer = map_llm(config.llm, torch.bfloat16)
        keep_embedding(llm, frozen_weights)
    else:
        llm, tokenizer = load_llm(config.llm, dtype)
    file = files.folder / WEIGHTS
    with torch.device("meta"):                      # shapes alone take no memory, however large
        shapes = narrator_class(without_weights(llm), tokenizer, config).trainable()
    compare(shapes, files.weights, file)
    narrator = narrator_class(llm, tokenizer, config)
    load_parameters(narrator.trainable(), files.weights, file)
    if dtype == torch.int8:
        merge_into_int8(narrator.llm, frozen_weights, device)
        narrator.merged = True
    return narrator.to(device).eval()


def save_narrator(narrator, folder: Path, dtype: torch.dtype | None, **models: str | None) -> None:
    """Write the checkpoint of a narrator (narrator.py: Narrator.save). Each file appears whole or not at all."""
    config = replace(narrator.config, **models)
    modules = [name for name, module in narrator.named_children()
               if name != "llm" and next(module.parameters(), None) is not None]
    modules = ["clustering" if name == "memory" else name for name in modules]
    adapter = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "fan_in_fan_out": False,
               "inference_mode": True, "init_lora_weights": True, "base_model_name_or_path": config.llm,
               "r": config.lora_rank, "lora_alpha": config.lora_alpha, "lora_dropout": config.lora_dropout,
               "target_modules": TARGETS, "modules_to_save": modules}
    settings = {name: value for name, value in asdict(config).items() if not name.startswith("lora") and name != "llm"}
    weights = {name: p.to(dtype or p.dtype) for name, p in narrator.trainable().items()}
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS, weights, {"format": "pt"})
    write_json(folder / ADAPTER, adapter)
    write_json(folder / NARRATOR_JSON, settings)


def published_name(name: str) -> str:
    """The name of a narrator's parameter -> its name in adapter_model.safetensors (PEFT's layout)."""
    if name.startswith("memory."):
        name = name.removeprefix("memory.")
        for ours, published in CLAM_NAMES.items():
            if name.startswith(ours):
                name = published + name.removeprefix(ours)
                break
        name = "clustering." + name
    return "base_model.model." + name.removeprefix("llm.").replace(".inner.", ".")      # baselines/mod.py: MoDLayer


def checkpoint_folder(source: str) -> Path:
    """The folder of a checkpoint; other names, owner/name or owner/name@revision, are fetched from the hub."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    if folder.exists() or source.startswith((".", "/")) or source.count("/") != 1:
        raise BadData(f"model '{source}' is not a folder (nor a hub id owner/name)")
    from huggingface_hub import snapshot_download
    try:
        name, revision = parse_model_name(source)
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
    both = parameters.keys() & weights.keys()
    problems = {
        "lacks": parameters.keys() - weights.keys(),
        "has unexpected": weights.keys() - parameters.keys(),
        "has the wrong shape for": {name for name in both if parameters[name].shape != weights[name].shape},
    }
    for problem, names in problems.items():
        if names:
            listed = ", ".join(sorted(names)[:3])
            if len(names) > 3:
                listed += f" and {len(names) - 3} more"
            raise BadData(f"{file} {problem} {len(names)} tensors: {listed}")


@torch.no_grad()
def load_parameters(parameters: dict[str, Tensor], weights: dict[str, Tensor], file: Path) -> None:
    """Copy a checkpoint's tensors into the parameters of the same names; see `compare`."""
    compare(parameters, weights, file)
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])


# ---------------------------------------------------------------------- frozen models: safetensors or .gguf only

LOADING = (OSError, ValueError, ImportError, KeyError, TypeError, RuntimeError, SafetensorError,
           struct.error)                                                               # what transformers raises


def parse_model_name(source: str) -> tuple[str, dict]:
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
    name, how = parse_model_name(source)
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


def load_llm(source: str, dtype: torch.dtype = torch.float32):
    """(causal LM, tokenizer) from a folder, hub id or .gguf file, attention by PyTorch's sdpa (the mask is boolean)."""
    if dtype == torch.int8:
        raise BadData("int8 is for narrators that stream, and for vision models; use another --dtype")
    return load_llm_by(read_model, source, dtype)


def map_llm(source: str, dtype: torch.dtype):
    """(causal LM whose weights are not read yet, its files, tokenizer); of some files, a causal LM in this dtype."""
    (llm, files), tokenizer = load_llm_by(map_for_int8, source, dtype)
    return llm, files, tokenizer


def load_llm_by(load: Callable, source: str, dtype: torch.dtype):
    from transformers import AutoModelForCausalLM
    check_model(source, "llm")
    tokenizer = load_tokenizer(source)
    try:
        name, how = parse_model_name(source)
        llm = load(AutoModelForCausalLM, name, how, dtype, attn_implementation="sdpa")
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
        name, how = parse_model_name(source)
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


def load_vision_model(source: str, dtype: torch.dtype = torch.float32, device: str = "cpu"):
    """(vision model, its preprocessor's settings) from a folder or hub id; of image-text models the image half."""
    from transformers import AutoConfig, AutoModel
    quiet()
    if dtype == torch.int8:
        check_int8(device)
    check_model(source, "vision")
    try:
        name, how = parse_model_name(source)
        config = AutoConfig.from_pretrained(name, trust_remote_code=False, **how)
        images = hasattr(config, "vision_config")
        model = read_model(AutoModel, name, how, dtype,
                           lambda model: model.vision_model if images else model, device)
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
