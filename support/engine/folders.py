"""The folders of models, of this machine or of the hub: found, and read with clear errors."""
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from support.common.disk import POINTER, is_pointer, read_json
from support.common.errors import BadData, first_line

ADAPTER = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
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
    from transformers.utils import logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    except Exception as error:                  # damaged files raise anything
        raise cannot_be_loaded(source, kind, first_line(error)) from error


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


@cache                      # a process asks once, and has one revision of it
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
            f"{(str(error) or type(error).__name__)[:1000]} (is the name right, is the licence accepted at "
            f"https://huggingface.co/{name}, are you logged in by `hf auth login`, and can the hub "
            f"be reached?)") from error


def portable_path(source: str, folder: str | Path = "") -> str:
    """The path of a model in a form that stays valid.

    An existing file or folder becomes an absolute path; a folder inside `folder` becomes a path
    relative to it. Anything else is a hub id and stays the same.
    """
    if not Path(source).exists():
        return source
    path = Path(source).resolve()
    if folder and path.is_dir() and path.is_relative_to(Path(folder).resolve()):
        path = path.relative_to(Path(folder).resolve())
    return str(path)


# ---------------------------------------------------------------------- what lies in them

def read_object(file: Path) -> dict:
    content = read_json(file)
    if not isinstance(content, dict):
        raise BadData(f"{file}: expected an object")
    return content


def tensors_of(file: Path) -> Iterator[tuple[str, Tensor]]:
    """The names and tensors of a .safetensors file. BadData if it is damaged, or if a weight is stored
    in another form than numbers with a point: it would be taken without the scales that go with it.
    """
    try:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():
                form = tensors.get_slice(name).get_dtype()
                if name.endswith("weight") and form not in ("F64", "F32", "F16", "BF16"):
                    raise BadData(f"{file}: {name} is quantised ({form}); give the model in bfloat16, "
                                  f"float16 or float32")
                yield name, tensors.get_tensor(name)
    except BadData:
        raise
    except Exception as error:                  # damaged files raise anything
        what = POINTER if is_pointer(file) else f"cannot be read ({first_line(error)})"
        raise BadData(f"{file} {what}; a whole .safetensors file is read") from error
