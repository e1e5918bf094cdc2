"""The frozen models of a narrator: its language model and its vision model, found once, known by
their marks, and loaded.

Tensors are read from safetensors only, never from pickles. Nothing that comes with a model is run:
neither its code (trust_remote_code) nor kernels that its settings name.
"""
import json
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from support.common.disk import expecting
from support.common.errors import BadData, first_line
from support.common.marks import MARKS, digest_of, known_mark, marks_of
from support.common.text import listed
from support.engine.cpu import is_large, multiplies_bf16
from support.engine.folders import (
    MODELS, cannot_be_loaded, loading, model_folder, read_object, tensors_of,
)

# of a model's settings, what changes with the program that wrote it, and how it is stored
OF_FILES = ("transformers_version", "dtype", "torch_dtype")


@dataclass
class FrozenModel:
    """A model that has been found, and what its files say."""
    source: str                 # as it was given: a folder or hub id
    kind: str                   # "llm" or "vision"
    folder: Path

    def config(self):
        """Its settings, in the class that transformers has for them.

        All that transformers makes of a config.json is made of what is returned here.
        """
        from transformers import AutoConfig
        settings = read_object(self.folder / "config.json")
        with loading(self.source, self.kind):
            if "model_type" not in settings:
                raise BadData("its config.json has no model_type; is it a model of transformers?")
            if settings.get("quantization_config"):
                raise BadData("it is quantised (quantization_config); give it in bfloat16, float16 "
                              "or float32")
            return AutoConfig.for_model(**settings)

    @cached_property
    def tokenizer(self):
        """BadData if it has lost the token of the beginning, which the model's settings name."""
        from transformers import AutoTokenizer
        config = self.config()
        with loading(self.source, self.kind):
            tokenizer = AutoTokenizer.from_pretrained(self.folder, config=config,
                                                      trust_remote_code=False)
            # the tokenizer of a model that does without one (Qwen) says so
            is_lost = tokenizer.bos_token is None and "bos_token" not in tokenizer.init_kwargs
            if is_lost and getattr(config, "bos_token_id", None) is not None:
                raise BadData("its tokenizer has no bos_token, which its settings name; is "
                              "tokenizer_config.json there?")
        return tokenizer

    @cached_property
    def mark(self) -> str:
        """What it is: a digest of its settings, of all its weights, and of its tokenizer, or of how
        its pictures are scaled. (Of 2.5 GB in about 1.5 seconds.)
        """
        def compared(settings: dict) -> dict:
            return {name: value for name, value in settings.items()
                    if not name.startswith("_") and name not in OF_FILES}

        settings = json.dumps(read_object(self.folder / "config.json"))
        settings = json.loads(settings, object_hook=compared)
        tensors = {}
        for file in self.weight_files():
            tensors |= marks_of(tensors_of(file))
        if self.kind == "vision":
            beside = [numbers.tolist() for numbers in pixel_settings(self.folder)]
        else:
            beside = mark_of_tokenizer(self)
        digest = digest_of(json.dumps([settings, tensors, beside], sort_keys=True))
        return f"{MARKS}:{digest[:12]}"

    def weight_files(self) -> list[Path]:
        """The files that transformers reads: model.safetensors, or else those that its index names."""
        whole = self.folder / "model.safetensors"
        if whole.is_file():
            return [whole]
        index = self.folder / "model.safetensors.index.json"
        if not index.is_file():
            raise cannot_be_loaded(self.source, self.kind, "it has no model.safetensors (pickles, "
                                                           "as pytorch_model.bin, are not read)")
        with expecting(index, '{"weight_map": {name of a tensor: file}}'):
            return [self.folder / name for name in sorted({*read_object(index)["weight_map"].values()})]

    def known_mark(self, whose: str, kept: str | None) -> str:
        """Its mark. BadData if the narrator `whose` was made with a model of another mark, `kept`."""
        title, option, _ = MODELS[self.kind]
        return known_mark(whose, title, kept, self.mark,
                          f"{self.source} is another one; give the one of that mark by {option}")


def find_model(source: str | FrozenModel, kind: str) -> FrozenModel:
    """The model of a folder or hub id, once and for all: what is found is passed on, and is given
    back here. BadData if there is none.
    """
    if isinstance(source, FrozenModel):
        return source
    return FrozenModel(source, kind, model_folder(source, kind))


def load_weights(Class: type, model: FrozenModel, dtype: torch.dtype):
    """A model of transformers in a dtype, on the processor. BadData if its files lack weights,
    which transformers would fill in at random, or have others than the model.
    """
    config = model.config()
    # all files are looked at first: transformers would take quantised weights for numbers
    _ = model.mark
    with loading(model.source, model.kind):
        loaded, report = Class.from_pretrained(
            model.folder, config=config, dtype=dtype, attn_implementation="eager", use_safetensors=True,
            trust_remote_code=False, output_loading_info=True,
            ignore_mismatched_sizes=True)                               # they are refused here
        for problem in ("missing", "unexpected", "mismatched"):
            names = report[f"{problem}_keys"]
            if names:
                raise BadData(f"of its weights, {len(names)} are {problem}: "
                              f"{listed(sorted(map(str, names)))}")
        for name, parameter in loaded.named_parameters():
            if not parameter.data.sum(dtype=torch.float32).isfinite():
                raise BadData(f"its weights are not finite in {dtype} ({name}); are its files "
                              f"whole, and are its numbers too large for float16?")
    return loaded


def load_llm(source: str | FrozenModel, dtype: torch.dtype = torch.float32):
    """(causal LM, tokenizer) from a folder or hub id; on the processor. BadData if the model lacks
    tokens that the tokenizer gives.
    """
    from transformers import AutoModelForCausalLM
    model = find_model(source, "llm")
    tokenizer = model.tokenizer
    llm = load_weights(AutoModelForCausalLM, model, dtype)
    rows = len(llm.get_input_embeddings().weight)
    # a special token that was added, for padding for example, is never fed
    words = [i for i, token in tokenizer.added_tokens_decoder.items() if not token.special]
    ends = tokenizer.bos_token_id or 0, tokenizer.eos_token_id or 0
    last = max(tokenizer.vocab_size - 1, *ends, *words)
    if last >= rows:
        raise cannot_be_loaded(model.source, "llm", f"its tokenizer gives tokens up to {last}, and "
                                                    f"the model has {rows}: are they of one model?")
    return llm, tokenizer


def load_tokenizer(source: str):
    """That of a language model, from a folder or hub id."""
    return find_model(source, "llm").tokenizer


def faster_dtype(model: FrozenModel) -> torch.dtype:
    """The number format in which this processor streams a language model faster: bf16 for a large
    one, where it can multiply bf16, else fp32. The model's size follows from its settings.
    """
    from transformers import AutoModelForCausalLM
    config = model.config()
    with loading(model.source, "llm"), torch.device("meta"):
        llm = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return torch.bfloat16 if is_large(llm) and multiplies_bf16() else torch.float32


# of a narrator's layout (narrator.py: Layout)
PIECES = ("[", "]\n", ",", "\n", "Assistant:")


def mark_of_tokenizer(model: FrozenModel) -> list:
    """What a narrator's layout uses of it: all its words, its special tokens, and how it tidies up."""
    file = model.folder / "tokenizer.json"
    if not file.is_file():
        raise cannot_be_loaded(model.source, "llm", "it has no tokenizer.json")
    tokenizer = model.tokenizer
    return [
        sha256(file.read_bytes()).hexdigest(),
        sorted(tokenizer.get_added_vocab().items()),
        [token_ids(tokenizer, piece) for piece in PIECES],
        [tokenizer.bos_token_id, eot_id(tokenizer), tokenizer.unk_token_id],
        bool(tokenizer.clean_up_tokenization_spaces),
    ]


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


def load_vision_model(source: str | FrozenModel, dtype: torch.dtype = torch.float32):
    """(vision model, mean and standard deviation of each colour) from a folder or hub id.

    Of a model for images and text, the image half.
    """
    from transformers import AutoModel
    model = find_model(source, "vision")
    vision = load_weights(AutoModel, model, dtype)
    if hasattr(vision.config, "vision_config"):
        with loading(model.source, "vision"):
            vision = vision.vision_model
    if getattr(vision, "_supports_sdpa", False):               # BLIP's does not
        vision.set_attn_implementation("sdpa")
    return vision, *pixel_settings(model.folder)


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
        colours = torch.tensor([settings["image_mean"], settings["image_std"]], dtype=torch.float32)
        if colours.shape != (2, 3):
            raise ValueError("one for each colour")
    return colours.unbind()
