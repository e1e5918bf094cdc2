"""Checkpoints, read and written; and the frozen models, read.

A checkpoint is a folder in the format of PEFT:
    adapter_config.json         of PEFT: the base language model, and LoRA's settings
    adapter_model.safetensors   LoRA, connector and memory, under the names of the authors' adapters
    narrator.json               the other settings (narrator.py: Config). The authors' do not
                                have it: their settings are inferred from the shapes of tensors

Tensors are read from safetensors only, never from pickles. Nothing that comes with a model is run:
neither its code (trust_remote_code) nor kernels that its settings name.
"""
from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from support.common.devices import quiet
from support.common.disk import expecting, read_json, read_text, write_json, write_tensors
from support.common.errors import BadData, first_line
from support.common.progress import say_as_one
from support.common.seal import digest_of, marks_of_tensors, refuse_if_changed
from support.common.signatures import what_is
from support.engine.cpu import is_large, multiplies_bf16
from support.engine.lora import TARGETS
from support.engine.norms import fuse_norms

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
ADAPTER = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
NARRATOR_JSON = "narrator.json"
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
class CheckpointFiles:
    """The content of a checkpoint's folder."""
    folder: Path
    adapter: dict                       # adapter_config.json
    narrator: dict | None               # narrator.json; None: in the authors', which have none
    weights: dict[str, Tensor]          # adapter_model.safetensors


def read_checkpoint(source: str) -> CheckpointFiles:
    """A checkpoint from a folder or hub id. BadData if a file is missing or damaged."""
    folder = model_folder(source, "narrator")
    narrator = None
    if (folder / NARRATOR_JSON).exists():
        narrator = read_object(folder / NARRATOR_JSON)
    adapter = read_object(folder / ADAPTER)
    for name, value in adapter.items():
        if name not in HARMLESS and value not in ALLOWED.get(name, OFF):
            raise BadData(f"{folder / ADAPTER}: {name} = {str(value)[:60]} is not supported; "
                          f"plain LoRA only")
    return CheckpointFiles(folder, adapter, narrator, read_weights(folder / WEIGHTS))


def read_config(files: CheckpointFiles, make_config: Callable, llm: str | None, changes: dict):
    """The settings of a checkpoint, as narrator.py's Config.

    make_config  makes it from settings by name
    llm         where the base language model is
    changes     {setting: value}: these replace the values of the files
    """
    settings = files.narrator
    if settings is None:
        with safe_open(files.folder / WEIGHTS, "pt") as weights:
            if "settings" in (weights.metadata() or {}):
                say_as_one(f"{files.folder}: was saved with a {NARRATOR_JSON}, which is missing; it "
                           f"is read as a checkpoint of the authors, which has none")
        settings = inferred_settings(files.weights, files.folder)
    base = files.adapter.get("base_model_name_or_path")
    revision = files.adapter.get("revision")
    if base and revision and "@" not in base and not Path(base).exists():
        base = f"{base}@{revision}"             # as PEFT takes it
    of_adapter = {
        "llm": llm or base,
        "lora_rank": files.adapter.get("r"),
        "lora_alpha": files.adapter.get("lora_alpha"),
        "lora_dropout": files.adapter.get("lora_dropout", 0),
    }
    try:
        config = make_config(**settings | of_adapter | changes)
    except BadData as error:
        raise BadData(f"{files.folder}: {error}") from error

    # A checkpoint's folder may contain the frozen models, too.
    for name in config.MODEL_NAMES:
        model = getattr(config, name)
        is_given = model in (llm, changes.get("vision"))
        if model and not is_given and (files.folder / model).is_dir():
            setattr(config, name, str(files.folder / model))
    return config


def build_narrator(narrator_class: type, files: CheckpointFiles, config, device: str,
                   dtype: torch.dtype):
    """A narrator from the files of a checkpoint and its settings.

    dtype       of the language model
    """
    llm, tokenizer = load_llm(config.llm, dtype)
    head = files.weights.pop(HEAD, None)
    if head is not None:
        check_head(llm, head, files.folder / WEIGHTS, config.llm)
    narrator = narrator_class(llm, tokenizer, config)
    load_parameters(narrator.trainable(), files.weights, files.folder / WEIGHTS)
    check_mark(config, "llm")
    weights = marks_of_tensors(files.folder / WEIGHTS)
    narrator.mark = digest_of(json.dumps(weights, sort_keys=True))[:12]
    return narrator.to(device).eval()


def save_narrator(narrator, folder: Path, dtype: torch.dtype | None, **models: str | None) -> None:
    """Write the checkpoint of a narrator (narrator.py: Narrator.save).

    Each file appears complete or not at all.
    """
    if narrator.is_merged:
        raise BadData("a narrator whose LoRA is merged cannot be saved; save it before merge()")
    config = replace(narrator.config, **models)
    weights = {name: p.to(dtype or p.dtype) for name, p in narrator.trainable().items()}
    # the modules beside the language model
    modules = dict.fromkeys(name.split(".")[2] for name in weights)
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
        "modules_to_save": [name for name in modules if name not in ("model", "lm_head")],
    }
    settings = {name: value for name, value in asdict(config).items()
                if not name.startswith("lora") and name != "llm"}

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


def read_object(file: Path) -> dict:
    content = read_json(file)
    if not isinstance(content, dict):
        raise BadData(f"{file}: expected an object")
    return content


def read_weights(file: Path) -> dict[str, Tensor]:
    with reading(file):
        return load_file(file)


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """A context in which safetensors reads a file: if that fails, BadData says what the file is."""
    try:
        yield
    except Exception as error:                  # damaged files raise anything
        what = what_is(file) or f"cannot be read ({first_line(error)[:150]})"
        raise BadData(f"{file} {what}; a whole .safetensors file is read") from error


def check_head(llm: torch.nn.Module, head: Tensor, file: Path, source: str) -> None:
    """BadData unless `head` [V, D_lm] is the head of the language model, up to rounding to bf16.

    An adapter computes something else on another model of the same shape.
    """
    base = llm.lm_head.weight
    same = head.shape == base.shape
    if same:
        every = max(1, len(base) // 1000)                   # a thousand rows will do
        rows = base[::every].float()
        same = (head[::every].float() - rows).norm() < 0.004 * rows.norm()
    if not same:
        raise BadData(f"{file} was trained on another language model than {source}: its copy of "
                      f"the head differs; give the right one with --llm")


def inferred_settings(weights: dict[str, Tensor], folder: Path) -> dict:
    """Settings of the authors' checkpoint (narrator.py: Config), by the names and shapes of its
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


def are_finite(weight: Tensor) -> bool:
    """Whether a tensor has floating-point numbers, all of them finite."""
    return weight.is_floating_point() and bool(weight.float().isfinite().all())


def listed(names: Iterable[str]) -> str:
    """At most three of the names, for a message."""
    names = sorted(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


@torch.no_grad()
def load_parameters(parameters: dict[str, Tensor], weights: dict[str, Tensor], file: Path) -> None:
    """Copy a checkpoint's tensors into the parameters of the same names. BadData unless they have
    the names and shapes of the parameters, and are numbers.
    """
    in_both = parameters.keys() & weights.keys()
    problems = {
        "lacks": parameters.keys() - weights.keys(),
        "has unexpected": weights.keys() - parameters.keys(),
        "has the wrong shape for": {name for name in in_both
                                    if parameters[name].shape != weights[name].shape},
        "has no finite numbers in": {name for name in in_both if not are_finite(weights[name])},
    }
    for problem, names in problems.items():
        if names:
            raise BadData(f"{file} {problem} {len(names)} tensors: {listed(names)}; is it damaged, "
                          f"or were other layers trained (target_modules, modules_to_save)?")
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])


# ---------------------------------------------------------------------- frozen models

# {kind: (name in messages, the option that names one, what its folder has)}
MODELS = {
    "narrator": ("model", "--model (in train.py: --init)", f"{ADAPTER} and {WEIGHTS}"),
    "llm": ("language model", "--llm", "config.json, tokenizer.json and .safetensors"),
    "vision": ("vision model", "--vision",
               "config.json, preprocessor_config.json and .safetensors"),
}
# what is fetched of a model: no pickles, and no code
FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def cannot_be_loaded(source: str, kind: str, reason: str) -> BadData:
    title, option, content = MODELS[kind]
    return BadData(f"{title} '{source}' cannot be loaded: {reason}; {option} takes a folder or hub "
                   f"id with {content}")


@contextmanager
def loading(source: str, kind: str) -> Iterator[None]:
    """A context in which transformers reads a model: if that fails, BadData has its first line."""
    quiet()
    try:
        yield
    except Exception as error:                  # damaged files raise anything
        raise cannot_be_loaded(source, kind, first_line(error)[:250]) from error


def name_and_revision(source: str) -> tuple[str, str | None]:
    """Of a hub id owner/name or owner/name@revision."""
    name, _, revision = source.partition("@")
    return name, revision or None


def model_folder(source: str, kind: str) -> Path:
    """The folder of a model. BadData if there is none.

    source      a folder, or a hub id owner/name or owner/name@revision: it is fetched, unless the
                hub's cache has it
    kind        a key of MODELS
    """
    folder = Path(source)
    if not folder.is_dir():
        if folder.exists() or source.startswith((".", "/", "~")):
            raise cannot_be_loaded(source, kind, "there is no such folder")
        folder = fetched(source, kind)
    if kind != "narrator" and (folder / ADAPTER).exists():
        # with PEFT installed, transformers would add it to the model
        raise cannot_be_loaded(source, kind, f"it has an adapter ({ADAPTER}), which belongs in a "
                                             f"folder of its own")
    return folder


def fetched(source: str, kind: str) -> Path:
    """The folder of a model of the hub, in the hub's cache."""
    from huggingface_hub import snapshot_download
    name, revision = name_and_revision(source)
    try:
        # subfolders and "consolidated" files hold the same weights in other forms
        return Path(snapshot_download(name, revision=revision, allow_patterns=FILES,
                                      ignore_patterns=["*/*", "consolidated*"]))
    except Exception as error:                  # the network fails in many ways
        raise cannot_be_loaded(
            source, kind, f"it is no folder here, and the hub does not give it: "
            f"{first_line(error)[:150]} (is the name right, is the licence accepted at "
            f"https://huggingface.co/{name}, are you logged in by `hf auth login`, and can the hub "
            f"be reached?)") from error


# of a model's settings, what changes with the program that wrote it, and how it is stored
OF_FILES = ("transformers_version", "dtype", "torch_dtype")


def mark_of_model(source: str, kind: str) -> str:
    """What a frozen model is: a digest of its settings, of three places of each tensor, and of its
    tokenizer, or of how its pictures are scaled. Nothing is loaded.

    source, kind    as in `model_folder`
    """
    def compared(settings: dict) -> dict:
        return {name: value for name, value in settings.items()
                if not name.startswith("_") and name not in OF_FILES}

    folder = model_folder(source, kind)
    settings = json.loads(read_text(folder / "config.json"), object_hook=compared)
    tensors = {}
    for file in folder.glob("model*.safetensors"):
        with reading(file):
            tensors |= marks_of_tensors(file)
    if kind == "vision":
        beside = str(pixel_settings(folder))
    else:
        beside = sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    return digest_of(json.dumps([settings, tensors, beside], sort_keys=True))[:12]


def check_mark(config, kind: str) -> None:
    """BadData if a model of a narrator's settings is not the one with which it was made, as far as
    that is known. From then on it is known.
    """
    source = getattr(config, kind)
    kept = getattr(config, f"{kind}_mark")
    present = mark_of_model(source, kind)
    if kept is not None:
        title, option, _ = MODELS[kind]
        refuse_if_changed("the narrator", {title: kept}, {title: present},
                          f"{source} is another one; give the one of that mark by {option}")
    setattr(config, f"{kind}_mark", present)


def read_model_config(source: str, kind: str):
    """The settings of a model, in the class that transformers has for them.

    All that transformers makes of a config.json is made of what is returned here.
    """
    from transformers import AutoConfig
    settings = read_object(model_folder(source, kind) / "config.json")
    with loading(source, kind):
        return AutoConfig.for_model(**settings)


def load_weights(Class: type, source: str, kind: str, dtype: torch.dtype):
    """A model of transformers in a dtype, on the processor. BadData if its files lack weights,
    which transformers would fill in at random, or have others than the model.
    """
    folder = model_folder(source, kind)
    config = read_model_config(source, kind)
    check_stored(folder)
    with loading(source, kind):
        model, report = Class.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation="sdpa", use_safetensors=True,
            trust_remote_code=False, output_loading_info=True,
            ignore_mismatched_sizes=True)                               # they are refused here
        for problem in ("missing", "unexpected", "mismatched"):
            names = report[f"{problem}_keys"]
            if names:
                raise BadData(f"of its weights, {len(names)} are {problem}: "
                              f"{listed(str(name) for name in names)}")
        for name, parameter in model.named_parameters():
            if not parameter.data.sum(dtype=torch.float32).isfinite():
                raise BadData(f"its weights are not finite in {dtype} ({name}); are its files "
                              f"whole, and are its numbers too large for float16?")
    return model


def check_stored(folder: Path) -> None:
    """BadData if a file of weights is damaged, or a weight is stored in another form than numbers
    with a point. transformers would take it without the scales that go with it.
    """
    for file in folder.glob("*.safetensors"):
        with reading(file), safe_open(file, "pt") as weights:
            stored = {name: weights.get_slice(name).get_dtype() for name in weights.keys()}
        for name, form in stored.items():
            if name.endswith("weight") and form not in ("F64", "F32", "F16", "BF16"):
                raise BadData(f"{file}: {name} is quantised ({form}); give the model in bfloat16, "
                              f"float16 or float32")


def load_llm(source: str, dtype: torch.dtype = torch.float32):
    """(causal LM, tokenizer) from a folder or hub id; on the processor. BadData if the model lacks
    tokens that the tokenizer gives.
    """
    from transformers import AutoModelForCausalLM
    tokenizer = load_tokenizer(source)
    llm = load_weights(AutoModelForCausalLM, source, "llm", dtype)
    rows = len(llm.get_input_embeddings().weight)
    # a special token that was added, for padding for example, is never fed
    words = [i for i, token in tokenizer.added_tokens_decoder.items() if not token.special]
    ends = tokenizer.bos_token_id or 0, tokenizer.eos_token_id or 0
    last = max(tokenizer.vocab_size - 1, *ends, *words)
    if last >= rows:
        raise cannot_be_loaded(source, "llm", f"its tokenizer gives tokens up to {last}, and the "
                                              f"model has {rows}: are they of one model?")
    fuse_norms(llm)
    return llm, tokenizer


def load_tokenizer(source: str):
    """BadData if it has lost the token of the beginning, which the model's settings name."""
    from transformers import AutoTokenizer
    folder = model_folder(source, "llm")
    config = read_model_config(source, "llm")
    with loading(source, "llm"):
        tokenizer = AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=False)
        # the tokenizer of a model that does without one (Qwen) says so
        is_lost = tokenizer.bos_token is None and "bos_token" not in tokenizer.init_kwargs
        if is_lost and getattr(config, "bos_token_id", None) is not None:
            raise BadData("its tokenizer has no bos_token, which its settings name; is "
                          "tokenizer_config.json there?")
    return tokenizer


def faster_dtype(source: str) -> torch.dtype:
    """The number format in which this processor streams a language model faster: bf16 for a large
    one, where it can multiply bf16, else fp32. The model's size follows from its settings.
    """
    from transformers import AutoModelForCausalLM
    config = read_model_config(source, "llm")
    with loading(source, "llm"), torch.device("meta"):
        llm = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return torch.bfloat16 if is_large(llm) and multiplies_bf16() else torch.float32


def token_ids(tokenizer, text: str) -> list[int]:
    """The ids of a text, without special tokens: what is written like one, as "</s>" in sentences of
    another model, is text. BadData if the tokenizer cannot encode it.
    """
    try:
        return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    except Exception as error:                  # tokenizers raise errors of many types
        raise BadData(f"the tokenizer cannot encode {ascii(text)[:80]}: "
                      f"{first_line(error)}") from error


def eot_id(tokenizer) -> int:
    """The token that ends a narration; BadData if there is none."""
    token = tokenizer.eos_token_id
    if "<|eot_id|>" in tokenizer.get_vocab():   # Llama 3 ends a turn with a token of its own
        token = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    if token is None:
        raise BadData("this tokenizer has no end-of-text token; use a Llama-like model")
    return token


def load_vision_model(source: str, dtype: torch.dtype = torch.float32):
    """(vision model, mean and standard deviation of each colour) from a folder or hub id.

    Of a model for images and text, the image half. BadData unless it is a vision transformer with
    square patches.
    """
    from transformers import AutoModel
    config = read_model_config(source, "vision")
    config = getattr(config, "vision_config", config)
    for name in ("image_size", "patch_size", "hidden_size"):
        if not isinstance(getattr(config, name, None), int):
            raise cannot_be_loaded(source, "vision", f"it has no {name}, as vision transformers "
                                                     f"with square patches have")
    model = load_weights(AutoModel, source, "vision", dtype)
    if hasattr(model.config, "vision_config"):
        with loading(source, "vision"):
            model = model.vision_model
    return model, *pixel_settings(model_folder(source, "vision"))


def pixel_settings(folder: Path) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each colour [3], by which pictures from 0 to 1 become what a
    vision model wants. BadData if its preprocessor scales the colours otherwise.

    As transformers, it takes those inside processor_config.json before preprocessor_config.json.
    """
    file = folder / "processor_config.json"
    settings = read_object(file).get("image_processor") if file.exists() else None
    if settings is None:
        file = folder / "preprocessor_config.json"
        settings = read_object(file)
    with expecting(file, "the settings of a preprocessor, image_mean and image_std of 3 numbers"):
        is_scaled = settings.get("do_rescale", True) and settings.get("do_normalize", True)
        scale = 255 * settings.get("rescale_factor", 1 / 255)
        if not is_scaled or abs(scale - 1) > 1e-4:
            raise BadData(f"{file}: colours are scaled by 1/255 and normalised here; give another "
                          f"vision model")
        mean = torch.tensor([float(number) for number in settings["image_mean"]])
        std = torch.tensor([float(number) for number in settings["image_std"]])
        if len(mean) != 3 or len(std) != 3:
            raise ValueError("one for each colour")
    return mean, std
