"""Why a model cannot be loaded: what other libraries' errors and the files of its folder mean to a
user, and what helps.
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from support.common.disk import read_json
from support.common.errors import BadData, first_line
from support.common.signatures import what_is

LOG_IN = "log in (`hf auth login`, or set HF_TOKEN)"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
OTHER_FORMS = ("*.h5", "*.msgpack", "*.onnx", "*.gguf", "*.nemo")
# (a pattern of an error that names no file, what it means)
ERRORS = [
    (r"untagged enum|unknown variant|missing field|did not match any variant",
     "its tokenizer.json was written by a newer library; update it: pip install -U tokenizers "
     "transformers"),
    (r"backend tokenizer",
     "it has no tokenizer.json; was all of it downloaded? (To read a tokenizer.model in its place: "
     "pip install sentencepiece)"),
    (r"model type `?[\w.-]+`? but Transformers does not recognize",
     "this version of transformers does not know the model; update it: pip install -U "
     "transformers"),
    (r"trust_remote_code|custom code",
     "it needs code that comes with it, which is not run"),
]


def reason_of_hub(error: Exception, name: str, revision: str) -> str:
    """Why the hub does not give a model, and what helps."""
    from huggingface_hub import errors
    chain = list(causes(error))
    status = next((code for code in map(status_of, chain) if code), None)

    def is_a(*classes: type) -> bool:
        return any(isinstance(each, classes) for each in chain)

    if is_a(errors.HFValidationError):
        return "it is neither a folder here nor a name OWNER/NAME"
    if is_a(errors.RevisionNotFoundError):
        return f"it has no revision {revision!r}"
    if is_a(errors.RepositoryNotFoundError) or status in (401, 403):
        return (f"there is no {name}, or you may not read it: look at "
                f"https://huggingface.co/{name} (is the name right? If access is gated, accept the "
                f"licence there), and {LOG_IN}")
    # the classes of its clients differ from version to version
    names = " ".join(type(each).__name__ for each in chain)
    if is_a(ConnectionError, TimeoutError) or re.search("Connect|Proxy|Timeout", names):
        return ("the hub cannot be reached, or HF_HUB_OFFLINE is set, and its cache on this "
                "machine does not have it")
    own = next(filter(status_of, chain), chain[-1])
    return (f"{first_line(own)[:150]} ({type(own).__name__}); try again later. If the hub is not "
            f"what answers: is there a login page or a proxy in between, or is HF_ENDPOINT wrong?")


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and those from which it came."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def status_of(error: BaseException) -> int | None:
    """The status of a hub's answer, such as 404."""
    return getattr(getattr(error, "response", None), "status_code", None)


def reason_of_files(folder: Path, error: Exception, file: Path | None = None) -> str:
    """Why the files of a folder are no model: what one of them is, which are missing, or what the
    error means.

    file        the .gguf file that was read, if it was one
    """
    text = " ".join(str(each) for each in causes(error))
    for damaged in [file] if file else sorted(folder.iterdir()):
        if not damaged.exists():
            return (f"{damaged.name} is a link to what is not there; did its download come to an "
                    f"end? Get it again")
        if damaged.is_file() and (what := what_is_wrong(damaged)):
            return f"{damaged.name} {what}"
    if not file:
        if not (folder / "config.json").exists():
            return "it has no config.json" + adapter_here(folder)
        if missing := missing_shards(folder):
            return f"{missing[0]} is missing, which model.safetensors.index.json names"
        if not list(folder.glob("*.safetensors")):
            return other_weights(folder) or ("it has no model.safetensors; did its download "
                                               "come to an end?")
    for pattern, meaning in ERRORS:
        if re.search(pattern, text):
            return meaning
    if isinstance(error, ImportError):
        return f"a package is missing: {first_line(error)[:200]}"
    return " ".join(str(error).split())[:250] or type(error).__name__


def other_weights(folder: Path) -> str | None:
    """Of a folder without .safetensors: which weights it has, and what to do."""
    if others := found(folder, PICKLES):
        return (f"its weights are pickles ({others[0]}), which can run code and are not "
                f"read; take a revision with .safetensors, or convert them")
    if others := found(folder, OTHER_FORMS):
        return f"its weights are there as {others[0]} alone; .safetensors are read"
    return None


def what_lacks(file: Path) -> str:
    """What a folder is that lacks a file of a narrator or of a preprocessor."""
    if file.name == "adapter_model.safetensors" and (weights := other_weights(file.parent)):
        return weights
    if file.name.startswith("adapter") and (file.parent / "config.json").exists():
        return "the folder has a model, and no narrator (train.py makes one of it)"
    return "not the folder of a whole model"


def what_is_wrong(file: Path) -> str | None:
    """What a file of a model is, if it is not what its ending says."""
    kind = file.suffix.lower()
    if kind not in (".safetensors", ".json", ".model", ".gguf"):
        return None
    if kind == ".json":
        try:
            read_json(file)
        except BadData as error:
            return what_is(file) or str(error).removeprefix(f"{file}: ")
        return None
    return what_is(file)


def adapter_here(folder: Path) -> str:
    """If a folder has an adapter in place of a model: on which model it was trained."""
    file = folder / "adapter_config.json"
    if not file.exists():
        return ""
    base = read_json(file).get("base_model_name_or_path")
    return f": it is an adapter; its language model is {base!r:.200}"


def missing_shards(folder: Path) -> list[str]:
    """Files of weights that a model's index names, and that are not there."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return []
    named = read_json(index).get("weight_map", {})
    return sorted({name for name in named.values() if not (folder / name).is_file()})


def found(folder: Path, patterns: tuple[str, ...]) -> list[str]:
    """Names of files that fit one of the patterns."""
    return sorted(file.name for pattern in patterns for file in folder.glob(pattern))
