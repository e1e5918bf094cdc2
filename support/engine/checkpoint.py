"""Checkpoints, read and written; and the frozen models, read.

A checkpoint is a folder in the format of PEFT:
    adapter_config.json         of PEFT: the base language model, and LoRA's settings
    adapter_model.safetensors   LoRA, connector and memory, under the names of the authors' adapters
    narrator.json               the other settings (narrator.py: Config). The authors' do not
                                have it: their settings are inferred from the shapes of tensors

Tensors are read from safetensors only, never from pickles. No code that comes with a model is run
(trust_remote_code).
"""
from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from support.common.devices import quiet
from support.common.disk import expecting, is_number, read_json, write_json, write_tensors
from support.common.errors import BadData, first_line
from support.common.progress import say_as_one
from support.engine.cpu import is_large, multiplies_bf16
from support.engine.norms import fuse_norms
from support.engine.lora import TARGETS
from support.engine.reasons import reason_of_files, reason_of_hub, what_is_wrong, what_lacks

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
    llm         another base language model
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
    if head is not None and not config.llm.lower().endswith(".gguf"):   # whose numbers are rounded
        check_head(llm, head, files.folder / WEIGHTS, config.llm)
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
    weights = {name: p.to(dtype or p.dtype) for name, p in narrator.trainable().items()}
    # the modules beside the language model
    modules = dict.fromkeys(name.split(".")[2] for name in weights)
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.llm,
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
    content = read_json(required(file))
    if not isinstance(content, dict):
        raise BadData(f"{file}: expected an object")
    return content


def read_weights(file: Path) -> dict[str, Tensor]:
    required(file)
    try:
        weights = load_file(file)
    except Exception as error:                  # damaged files raise anything
        what = what_is_wrong(file) or f"is damaged: {first_line(error)}"
        raise BadData(f"{file} {what}") from error
    plain = {}
    for name, weight in weights.items():
        if ".original_module." in name:         # PEFT's copy of what was there before training
            continue
        if plain_name(name) in plain:
            raise BadData(f"{file} has two tensors for {plain_name(name)}; does it hold several "
                          f"adapters? Save one of them")
        plain[plain_name(name)] = weight
    return plain


def plain_name(name: str) -> str:
    """The name of a tensor without what only a wrapper adds.

    Wrappers are torch.compile (_orig_mod), those of torch.distributed (module, _fsdp_wrapped_module,
    _checkpoint_wrapped_module), DeepSpeed, and PEFT, which adds an adapter's name, mostly "default".
    """
    # the name of an adapter comes after these
    name = re.sub(r"\b(lora_[AB]|modules_to_save)\.(?!weight$)([^.]+)\.(?=\w)", r"\1.", name)
    # no part of a model's own names begins with "_"
    name = re.sub(r"\b(_\w+|module|modules_to_save)\.", "", name)
    before, prefix, rest = name.rpartition("base_model.model.")
    return prefix + rest if prefix else name


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


def required(file: Path) -> Path:
    if not file.is_file():
        raise BadData(f"{file} is missing: {what_lacks(file)}")
    return file


def compare(parameters: dict[str, Tensor], weights: dict[str, Tensor], file: Path) -> None:
    """BadData unless a checkpoint's tensors have the names and shapes of the parameters, and are
    numbers.
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
    """Copy a checkpoint's tensors into the parameters of the same names; see `compare`."""
    compare(parameters, weights, file)
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])


# ---------------------------------------------------------------------- frozen models

MOST_LAYERS = 1000                              # more would take memory without end
# {kind: (name in messages, the option that names another one)}
MODELS = {
    "narrator": ("model", "--model (in train.py: --init)"),
    "llm": ("language model", "--llm"),
    "vision": ("vision model", "--vision"),
}
# what is fetched of a model: no pickles, and no code
FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def cannot_be_loaded(source: str, kind: str, reason: str) -> BadData:
    title, option = MODELS[kind]
    return BadData(f"{title} '{source}' cannot be loaded: {reason}; {option} names another folder "
                   f"or hub id")


def model_folder(source: str, kind: str) -> Path:
    """The folder of a model. BadData if there is none.

    source      a folder, a .gguf file in it, or a hub id owner/name or owner/name@revision: it is
                fetched, unless the hub's cache has it
    kind        a key of MODELS
    """
    folder = Path(source)
    if folder.suffix.lower() == ".gguf" and folder.is_file():
        folder = folder.parent
    if folder.is_dir():
        return folder
    if folder.exists():
        raise cannot_be_loaded(source, kind, f"it is a file; give its folder, {folder.parent}")
    if source.startswith((".", "/", "~")) or folder.suffix.lower() == ".gguf":
        raise cannot_be_loaded(source, kind, "there is no such folder or file")
    from huggingface_hub import snapshot_download
    name, _, revision = source.partition("@")
    try:
        # subfolders and "consolidated" files hold the same weights in other forms
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=FILES,
                                      ignore_patterns=["*/*", "consolidated*"]))
    except Exception as error:                  # the network fails in many ways
        reason = reason_of_hub(error, name, revision)
        raise cannot_be_loaded(source, kind, f"it is no folder here, and the hub does not give it: "
                                             f"{reason}") from error


def from_pretrained(Class: type, source: str, kind: str, **options):
    """What a class of transformers reads from a folder, hub id or .gguf file. BadData if it cannot.

    kind        a key of MODELS
    """
    quiet()
    folder = model_folder(source, kind)
    gguf = Path(source) if source.lower().endswith(".gguf") else None
    if gguf:
        options["gguf_file"] = gguf.name
    elif not (folder / "config.json").exists():
        raise cannot_be_loaded(source, kind, reason_of_files(folder, FileNotFoundError()))
    try:
        with model_alone(folder) as files:
            return Class.from_pretrained(files, trust_remote_code=False, **options)
    except Exception as error:                  # damaged files raise anything
        reason = reason_of_files(folder, error, gguf)
        raise cannot_be_loaded(source, kind, reason) from error


# what transformers takes in place of a model's own files, if some packages are installed
BESIDE = ("adapter_*", "tekken.json")


@contextmanager
def model_alone(folder: Path) -> Iterator[Path]:
    """A folder with the files of a model, without an adapter or what else lies beside them.

    With PEFT installed, transformers would add the adapter. What is read must not depend on that.
    """
    if not any(file for pattern in BESIDE for file in folder.glob(pattern)):
        yield folder
        return
    with tempfile.TemporaryDirectory() as alone:
        for file in folder.iterdir():
            if not any(file.match(pattern) for pattern in BESIDE):
                (Path(alone) / file.name).symlink_to(file.resolve())
        yield Path(alone)


def read_model_config(source: str, kind: str):
    """The settings of a model of transformers; of one for images and text, those of its image half
    if `kind` is "vision".
    """
    from transformers import AutoConfig
    config = from_pretrained(AutoConfig, source, kind)
    image_half = getattr(config, "vision_config", config)
    for half in (config, image_half, getattr(config, "text_config", config)):
        layers = getattr(half, "num_hidden_layers", 1)
        if not isinstance(layers, int) or layers > MOST_LAYERS:
            raise cannot_be_loaded(source, kind, f"num_hidden_layers = {layers}")
        # the second name is that of MLX
        methods = [getattr(half, name, None) for name in ("quantization_config", "quantization")]
        if method := methods[0] or methods[1]:
            name = method.get("quant_method") if isinstance(method, dict) else method
            raise cannot_be_loaded(source, kind, f"its weights are quantised ({name!s:.60}); give "
                                                 f"the model in bfloat16, float16 or float32")
    return image_half if kind == "vision" else config


@contextmanager
def files_not_mapped() -> Iterator[set[Path]]:
    """Within it, transformers reads weights one by one, as on Windows. Elsewhere it maps their file,
    whose pages take memory beside what is made of them, and stay as long as one weight is a view.

    Yields the files that it reads.
    """
    from transformers import modeling_utils
    safe_open_before = modeling_utils.safe_open
    files = set()

    def read(file, *args, **options):
        files.add(Path(file).resolve())
        return safe_open_before(file, *args, **options | {"backend": "pread"})

    modeling_utils.safe_open = read
    try:
        yield files
    finally:
        modeling_utils.safe_open = safe_open_before


def load_weights(Class: type, source: str, kind: str, dtype: torch.dtype):
    """A model of transformers in a dtype, on the processor. BadData if its files lack weights,
    which transformers would fill in at random, or have others than the model.
    """
    # "sdpa": a model's settings could name a kernel, which is code, on the hub.
    with files_not_mapped() as files:
        model, report = from_pretrained(Class, source, kind, dtype=dtype, use_safetensors=True,
                                        attn_implementation="sdpa", output_loading_info=True,
                                        ignore_mismatched_sizes=True)   # they are refused below
    for problem in ("missing", "unexpected", "mismatched"):
        names = report[f"{problem}_keys"]
        if names:
            what = "of other sizes than its settings say" if problem == "mismatched" else problem
            raise cannot_be_loaded(source, kind, f"of its weights, {len(names)} are {what}: "
                                                 f"{listed(str(name) for name in names)}")
    if name := weight_of_integers(model, files):
        raise cannot_be_loaded(source, kind, f"its weights are quantised to integers ({name}); give "
                                             f"the model in bfloat16, float16 or float32")
    for name, parameter in model.named_parameters():
        if not parameter.data.sum(dtype=torch.float32).isfinite():
            cure = ("they are too large for float16; give --dtype bfloat16 or float32"
                    if dtype == torch.float16 else "is the file damaged? Get it again")
            raise cannot_be_loaded(source, kind, f"its weights are not finite ({name}): {cure}")
    return model


def weight_of_integers(model: torch.nn.Module, files: Iterable[Path]) -> str | None:
    """The name of a weight that is stored as integers, if there is one. Without the scales that go
    with them, which transformers would not miss, they mean nothing.
    """
    names = dict(model.named_parameters())
    for file in files:
        with safe_open(file, "pt") as weights:
            for name in names.keys() & weights.keys():
                if weights.get_slice(name).get_dtype()[0] in "IU":      # I8, U8, ...
                    return name
    return None


def load_llm(source: str, dtype: torch.dtype = torch.float32):
    """(causal LM, tokenizer) from a folder, hub id or .gguf file; on the processor."""
    from transformers import AutoModelForCausalLM
    tokenizer = load_tokenizer(source)
    llm = load_weights(AutoModelForCausalLM, source, "llm", dtype)
    fuse_norms(llm)
    return llm, tokenizer


def load_tokenizer(source: str):
    """BadData if it has lost its words, or a special token that the model's settings name."""
    from transformers import AutoTokenizer
    tokenizer = from_pretrained(AutoTokenizer, source, "llm")
    config = read_model_config(source, "llm")
    # without its file, transformers makes one that turns each text into nothing
    words = getattr(config.get_text_config(), "vocab_size", 0)
    if len(tokenizer) < words / 2:
        raise cannot_be_loaded(source, "llm", f"its tokenizer has {len(tokenizer)} of the model's "
                                              f"{words} tokens; is its tokenizer.json there?")
    for name in ("bos_token", "eos_token"):
        expected = getattr(config, f"{name}_id", None)
        # the tokenizer of a model that does without one (Qwen) says so
        is_lost = getattr(tokenizer, name) is None and name not in tokenizer.init_kwargs
        if is_lost and expected is not None:
            reason = (f"its tokenizer has no {name}, which its settings number {expected}; is "
                      f"tokenizer_config.json there? (Beside a .gguf, remove tokenizer.json)")
            raise cannot_be_loaded(source, "llm", reason)
    return tokenizer


def faster_dtype(source: str) -> torch.dtype:
    """The number format in which this processor streams a language model faster: bf16 for a large
    one, where it can multiply bf16, else fp32. The model's size follows from its settings.
    """
    from transformers import AutoModelForCausalLM
    config = read_model_config(source, "llm")
    with torch.device("meta"):
        llm = AutoModelForCausalLM.from_config(config)
    return torch.bfloat16 if is_large(llm) and multiplies_bf16() else torch.float32


def token_ids(tokenizer, text: str, vocabulary: int | None = None) -> list[int]:
    """The ids of a text, without special tokens: what is written like one, as "</s>" in sentences of
    another model, is text. BadData if the tokenizer cannot encode it, or the language model lacks
    such tokens.

    vocabulary      how many tokens the language model has; None: not known
    """
    try:
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    except Exception as error:                  # tokenizers raise errors of many types
        raise BadData(f"the tokenizer cannot encode {ascii(text)[:80]}: "
                      f"{first_line(error)}") from error
    check_tokens(ids, ascii(text)[:80], vocabulary)
    return ids


def eot_id(tokenizer, vocabulary: int | None = None) -> int:
    """The token that ends a narration; BadData if there is none (`token_ids`)."""
    token = tokenizer.eos_token_id
    if "<|eot_id|>" in tokenizer.get_vocab():   # Llama 3 ends a turn with a token of its own
        token = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    if token is None:
        raise BadData("this tokenizer has no end-of-text token; use a Llama-like model")
    check_tokens([token], "its end of text", vocabulary)
    return token


def check_tokens(ids: list[int], what: str, vocabulary: int | None) -> None:
    if vocabulary is not None and max(ids, default=0) >= vocabulary:
        raise BadData(f"the tokenizer gives {what} the token {max(ids)}, but the language model "
                      f"has {vocabulary} tokens; are its files those of the model?")


def load_vision_model(source: str, dtype: torch.dtype = torch.float32):
    """(vision model, settings of its preprocessor) from a folder or hub id.

    Of a model for images and text, the image half. BadData unless it is a vision transformer with
    square patches.
    """
    from transformers import AutoModel
    config = read_model_config(source, "vision")
    for name in ("image_size", "patch_size", "hidden_size"):
        if not isinstance(getattr(config, name, None), int):
            raise BadData(f"vision model '{source}': has no {name}, as vision transformers with "
                          f"square patches have; use SigLIP, CLIP, ViT or DINOv2")
    model = load_weights(AutoModel, source, "vision", dtype)
    if hasattr(model.config, "vision_config"):
        model = model.vision_model
    # whether it takes pictures of its size, and nothing else: tried without numbers
    try:
        with torch.device("meta"):
            pixels = torch.empty(1, 3, config.image_size, config.image_size)
            type(model)(model.config)(pixel_values=pixels)
    except Exception as error:                  # models that want other things raise anything
        raise BadData(f"vision model '{source}': does not take colour pictures alone "
                      f"({first_line(error)[:120]}); use SigLIP, CLIP, ViT or DINOv2") from error
    return model, pixel_settings(model_folder(source, "vision"))


# Settings of a preprocessor that this program knows, or that do not change the numbers of a picture
# that has the model's size. Others must be switched off.
PIXEL_SETTINGS = {
    "image_mean", "image_std", "do_normalize", "do_rescale", "rescale_factor",
    "do_resize", "size", "resample", "do_center_crop", "crop_size", "crop_pct", "default_to_square",
    "do_convert_rgb", "do_pad", "pad_size", "data_format", "input_data_format", "return_tensors",
    "image_processor_type", "feature_extractor_type", "processor_class", "device", "disable_grouping",
    "image_seq_length", "auto_map", "do_reduce_labels", "backend",
}


def pixel_settings(folder: Path) -> dict[str, list[float]]:
    """Mean and standard deviation of each colour, by which pictures from 0 to 1 become what a vision
    model wants: {"image_mean", "image_std"}.

    As transformers, it takes those inside processor_config.json before preprocessor_config.json.
    """
    file = folder / "processor_config.json"
    settings = read_object(file).get("image_processor") if file.exists() else None
    if settings is None:
        file = folder / "preprocessor_config.json"
        settings = read_object(file)
    with expecting(file, "the settings of a preprocessor"):
        unknown = [name for name, value in settings.items()
                   if name not in PIXEL_SETTINGS and not name.startswith("_") and value not in OFF]
    if unknown:
        raise BadData(f"{file}: {unknown[0]} = {str(settings[unknown[0]])[:60]} is not supported; "
                      f"give another vision model")
    mean, std = [0.0] * 3, [1.0] * 3
    if settings.get("do_normalize", True):
        mean, std = settings.get("image_mean"), settings.get("image_std")
    factor = 1
    if settings.get("do_rescale", True):
        factor = settings.get("rescale_factor", 1 / 255)
    for key, numbers, count, least in (("image_mean", mean, 3, 0), ("image_std", std, 3, 1e-6),
                                       ("rescale_factor", [factor], 1, 1e-9)):
        if not (isinstance(numbers, list) and len(numbers) == count
                and all(is_number(n) and n >= least for n in numbers)):
            raise BadData(f"{file}: {key} must be {count} numbers from {least:g} on")
    # (x factor - mean) / std = (x / 255 - mean / scale) / (std / scale)
    scale = 255 * factor
    if abs(scale - 1) > 1e-6:
        mean, std = [n / scale for n in mean], [n / scale for n in std]
    return {"image_mean": mean, "image_std": std}
