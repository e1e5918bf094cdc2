"""The frozen weights of transformers' models, each read once into its place (not in the paper).

A model that is loaded in the dtype of its files is a map of these files: nothing is read, and takes
memory, until it is used. So models are loaded in that way, whatever dtype is wanted. Then one
weight after the other is read from its file and takes its place in the dtype that is wanted.
Weights that are not used, such as the half of a model that reads texts, are never read.
"""
from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from support.common.devices import free_memory
from support.common.errors import say_once
from support.engine.int8 import Int8Linear, WideEmbedding
from support.engine.linear import Linear

ROWS = 512                      # of a weight that change their format at once
LARGE = 2 * 10 ** 8             # weights
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES_OF_FILES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class WeightFiles:
    """Where the weights of a model are: folder or hub id `name`.

    file_of     safetensors file of each name; empty for models in other files
    dtype       of all weights; None if they have several, or one that needs more than reading
    """

    def __init__(self, name: str, how: dict):
        self.file_of: dict[str, str] = {} if "gguf_file" in how else files_of_weights(name, how)
        dtypes = set()
        for file in set(self.file_of.values()):
            with safe_open(file, "pt") as tensors:
                dtypes |= {tensors.get_slice(key).get_dtype() for key in tensors.keys()}
        self.dtype = DTYPES_OF_FILES.get(dtypes.pop()) if len(dtypes) == 1 else None

    def read(self, name: str, mapped: Tensor) -> Tensor:
        """A weight that transformers has mapped, read anew: when the result is freed, so is its
        file. `mapped` itself where transformers has made it of something else than that weight.
        """
        if name not in self.file_of:
            return mapped
        with safe_open(self.file_of[name], "pt") as tensors:
            weight = tensors.get_tensor(name)
        ends = torch.tensor([0, -1])
        same = (weight.shape == mapped.shape and weight.dtype == mapped.dtype
                and torch.equal(weight.flatten()[ends], mapped.flatten()[ends]))
        return weight if same else mapped

    @torch.no_grad()
    def place(self, model: nn.Module, part: nn.Module, dtype: torch.dtype) -> None:
        """Read the weights of a part of the model, each into its place. Tied ones stay tied."""
        wanted = set(part.parameters())
        for name, parameter in model.named_parameters():
            if parameter in wanted:
                placed = torch.empty(parameter.shape, dtype=dtype)
                parameter.data = placed.copy_(self.read(name, parameter.data))


    @torch.no_grad()
    def place_int8(self, model: nn.Module, part: nn.Module, device: str,
                   two_parts: bool = False) -> None:
        """The same, with linear layers in int8, on a device; what they take and give is fp32 on a
        processor. `keep_embedding` has read the table of words.
        """
        inside = set(part.modules())
        dtype = format_beside_int8(device)
        for name, module in list(model.named_modules()):
            if module not in inside or type(module) is WideEmbedding:
                continue
            if type(module) in (nn.Linear, Linear):
                blocks = self.read(f"{name}.weight", module.weight.data).split(ROWS)
                layer = Int8Linear(module, blocks, device, dtype, two_parts)
                model.set_submodule(name, layer)
                continue
            for own, parameter in module.named_parameters(recurse=False):
                weight = self.read(f"{name}.{own}".replace(".inner.", "."), parameter.data)
                placed = torch.empty(weight.shape, dtype=dtype)
                parameter.data = placed.copy_(weight).to(device)


@torch.no_grad()
def keep_embedding(llm: nn.Module, files: WeightFiles) -> None:
    """Read the table of words, also of a head that shares it, before all else: narrators use it at
    their making. Beside weights in int8 it is bf16, as far as it is an ordinary one.
    """
    table = llm.get_input_embeddings()
    name = next(name for name, p in llm.named_parameters() if p is table.weight)
    table.weight.data = files.read(name, table.weight.data).to(torch.bfloat16, copy=True)
    if type(table) is nn.Embedding:
        table.__class__ = WideEmbedding


def format_beside_int8(device: str) -> torch.dtype:
    """Of all numbers that are not weights in int8."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def files_of_weights(name: str, how: dict) -> dict[str, str]:
    """The safetensors file of each weight of a model; empty if it has none of these."""
    from transformers.utils import cached_file
    optional = {"_raise_exceptions_for_missing_entries": False}
    if file := cached_file(name, SINGLE, **optional, **how):
        with safe_open(file, "pt") as tensors:
            return dict.fromkeys(tensors.keys(), file)
    if index := cached_file(name, INDEX, **optional, **how):
        shards = json.loads(Path(index).read_text())["weight_map"]
        return {key: cached_file(name, shard, **how) for key, shard in shards.items()}
    return {}


def has_own_numbers(model: nn.Module) -> bool:
    """Whether a model has numbers that no file holds and that depend on the dtype at its making, or
    weights that it keeps in fp32.
    """
    if getattr(model, "_keep_in_fp32_modules", None):
        return True
    return any(buffer.is_floating_point() and not name.endswith("inv_freq")
               for name, buffer in model.named_buffers())


def map_model(Class: type, name: str, how: dict, dtype: torch.dtype,
              **settings) -> tuple[nn.Module, WeightFiles]:
    """A model of transformers, mapped if that is possible, and its files; else read in a dtype.

    ValueError if its files lack weights, which transformers would silently fill in at random; and
    whatever transformers raises.
    """
    load = lambda dtype: Class.from_pretrained(
        name, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True,
        **settings, **how)
    files = WeightFiles(name, how)
    model, about = load(files.dtype or dtype)
    if missing := sorted(about["missing_keys"]):
        raise ValueError(f"its files lack {len(missing)} weights: {', '.join(missing[:3])}")
    if files.dtype is None or has_own_numbers(model):
        if files.dtype not in (None, dtype):
            model = load(dtype)[0]
        files.file_of = {}
    return model, files


def map_for_int8(Class: type, name: str, how: dict, dtype: torch.dtype, device: str = "cpu",
                 **settings) -> tuple[nn.Module, WeightFiles]:
    """As `map_model`; ValueError if the model is too large even in int8."""
    model, files = map_model(Class, name, how, dtype, **settings)
    if files.file_of:
        check_free_memory(model, torch.int8, device)
    return model, files


def read_model(Class: type, name: str, how: dict, dtype: torch.dtype, part=lambda model: model,
               device: str = "cpu", **settings) -> nn.Module:
    """A model of transformers, or a part of it, in a dtype. Raises what `map_model` raises.

    device      where the model is to be. Only weights in int8 are put there, others are on the
                processor
    """
    int8 = dtype == torch.int8
    mapped_in = format_beside_int8(device) if int8 else dtype
    model, files = map_model(Class, name, how, mapped_in, **settings)
    wanted = part(model)
    if files.file_of:
        check_free_memory(wanted, dtype, device)
    if int8:
        files.place_int8(model, wanted, device)
    elif files.file_of:
        files.place(model, wanted, dtype)
        for module in wanted.modules():
            if hasattr(module, "config"):
                module.config.dtype = dtype
    return wanted


def check_free_memory(model: nn.Module, dtype: torch.dtype, device: str) -> None:
    """ValueError if a model in a dtype is larger than the free memory, before it is read: that of
    the processor, where it is read, and that of its device."""
    needed = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    advice = "" if dtype == torch.int8 else "; --dtype int8 needs least"
    for place in dict.fromkeys(["cpu", device]):
        free = free_memory(place)
        if free is not None and needed > free:
            where = "" if place == "cpu" else f" on {place}"
            raise ValueError(f"it needs at least {needed / 1e9:.1f} GB of memory, and "
                             f"{free / 1e9:.1f} GB are free{where}{advice}")


def is_large(model: nn.Module) -> bool:
    return sum(parameter.numel() for parameter in model.parameters()) >= LARGE


def advise(llm: nn.Module, asked: str) -> None:
    """One line on stderr about the format of a large model on a processor, if no --dtype was asked
    for."""
    if asked != "auto" or llm.device.type != "cpu" or not is_large(llm):
        return
    if llm.dtype == torch.bfloat16:
        say_once("The language model computes in bfloat16, which is faster on this processor; "
                 "--dtype float32 is exact, --dtype int8 is faster still (docs/speed.md)")
    else:
        say_once("The language model computes in float32, which is exact; --dtype int8 is faster "
                 "and takes a third of the memory (docs/speed.md)")
