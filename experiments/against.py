"""This checkout of the project against another one: how many times faster it streams, and whether it says the same.

    python -m experiments.efficiency --against DIR

Both run on the same frames, one thread each, and take turns every 8 frames, so that whatever disturbs the machine meets
both. What is divided is the processor time of the whole streaming loop (`stream.narrate`: frames made or read, all
models, files written), without the start of Python and of the models; median and range are those of the pairs of runs.

    recorded    four toy videos of 11 minutes, from features, with stream.py's default --lookahead
    live        quarters of the first one with --lookahead 1, for a checkout that has this option
    pixels      toy/kitchen.mp4
    llama       four layers of Llama-3.2-1B's shape with random weights; every 8 frames a given narration of 12 words
    together    16 videos at once, from features; one after the other where stream.py takes only one (no turns here)
"""
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, TemporaryFile

import torch
from safetensors.torch import save_file

import data
import narrator as nar
import stream
from support import checkpoint
from support.common import BadData, progress
from support.features import encode_pictures, load_features
from support.video import Video

HERE, PAIRS, TURN = Path(__file__).parents[1], 4, "its turn is over"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
CHILD = f"""
import importlib, sys, threading, time
import stream

def pause():
    if threading.current_thread() is threading.main_thread():
        print("\\n{TURN}", file=sys.stderr, flush=True)
        sys.stdin.readline()

def in_turn(*args, **options):
    pause()
    loops.append(loop := [time.process_time()] * 2)
    for number, decision in enumerate(narrate(*args, **options), 1):
        loop[1] = time.process_time()
        if number % 8 == 0:
            pause()
        yield decision

loops, narrate, stream.narrate = [], stream.narrate, in_turn
command = importlib.import_module(sys.argv[1])
for name in ("efficiency", "experiments.efficiency"):
    if name in sys.modules:
        sys.modules[name].VARIANTS = {{"FlowNar-C": {{"last_k": 10}}}}
sys.argv = sys.argv[1:]
try:
    command.main()
finally:
    for loop in loops:
        print("\\nprocessor time", *loop, file=sys.stderr)
"""      # a command's main, which waits for its turn; at the end, each loop's processor time when it began and ended


class Child:
    """A command of a checkout, running. It waits before its streaming loop, and every 8 frames, until it may go on."""

    def __init__(self, folder: Path, command: list, stack: ExitStack):
        line = [sys.executable, "-c", CHILD, *map(str, command), "--device", "cpu"]
        self.name, self.output, self.errors = f"{folder}: {command[0]}", stack.enter_context(TemporaryFile("w+")), []
        self.process = stack.enter_context(subprocess.Popen(
            line, cwd=folder, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=self.output, stderr=subprocess.PIPE,
            text=True))

    def waits(self) -> bool:
        """Wait until it waits; False if it has ended instead."""
        for line in self.process.stderr:
            if line.strip() == TURN:
                return True
            self.errors.append(line.strip())
        return False

    def go_on(self) -> bool:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.waits()

    def result(self) -> tuple[list[list[float]], list[str]]:
        """Processor time at the beginning and end of each streaming loop, and what it printed; BadData if it failed."""
        loops = [[float(y) for y in line.split()[2:]] for line in self.errors if line.startswith("processor time ")]
        errors = [line for line in self.errors if line and not line.startswith("processor time ")]
        if self.process.wait() or not loops:
            raise BadData(f"{self.name} fails: {errors[-1] if errors else 'no output'}")
        self.output.seek(0)
        return loops, self.output.read().splitlines()


def take_turns(*commands: tuple[Path, list]) -> list[tuple[list[list[float]], list[str]]]:
    """Run commands of checkouts, a few frames of each in turn -> the result of each."""
    with ExitStack() as stack:
        children = [Child(folder, command, stack) for folder, command in commands]
        waiting = [child for child in children if child.waits()]
        while waiting:
            waiting = [child for child in waiting if child.go_on()]
        return [child.result() for child in children]


def knows(folder: Path, option: str) -> bool:
    """Has stream.py of a checkout the option?"""
    return any(option in path.read_text() for path in (folder / "stream.py", folder / "support" / "options.py")
               if path.is_file())


def recorded(folder: Path, source: str) -> list:
    return ["stream", source]


def live(folder: Path, source: str) -> list:
    return ["stream", source, *(["--lookahead", 1] if knows(folder, "--lookahead") else [])]


def llama(folder: Path, llm: str) -> list:
    """The experiment on efficiency. Its second streaming loop is what is measured, the first is a warm-up."""
    flat = not (folder / "experiments").is_dir()                       # before there were folders, all was evaluate.py
    return [*(["evaluate", "efficiency"] if flat else ["experiments.efficiency"]), "--llm", llm, "--frames", 24,
            "--window", 24, "--every", 8, "--words", 12, "--macs-frames", 1]


def seconds_and_words(command: Callable, other: Path, source: str) -> list[tuple[float, list[str]]]:
    """Processor seconds and sentences of the other checkout and of this one."""
    results = take_turns((other, command(other, source)), (HERE, command(HERE, source)))
    if command is llama:
        return [(loops[1][1] - loops[1][0], []) for loops, _ in results]
    return [(ended - began, sentences(said)) for ((began, ended),), said in results]


def sentences(lines: list[str], name: str = "") -> list[str]:
    """What was printed, by sentences with their times; early checkouts print some of them in several lines."""
    return [f"[{name}{' '.join(said.split())}" for said in "\n".join(["", *lines]).split("\n[")[1:]]


def together(other: Path, sources: list[str]) -> list[tuple[float, list[str]]]:
    """The same for several inputs at once."""
    found = []
    for folder in (other, HERE):
        if knows(folder, "--batch"):
            (loops, said), = take_turns((folder, ["stream", *sources]))
            found.append((max(loop[1] for loop in loops) - min(loop[0] for loop in loops), sorted(sentences(said))))
        else:
            runs = [take_turns((folder, ["stream", source]))[0] for source in sources]
            said = [y for x, (_, lines) in zip(sources, runs) for y in sentences(lines, f"{Path(x).stem} ")]
            found.append((sum(loop[1] - loop[0] for loops, _ in runs for loop in loops), sorted(said)))
    return found


def compare_pairs(name: str, run: Callable, sources: list) -> int:
    """run(source) gives seconds and sentences of the other checkout and of this one. Prints how many times longer the
    other one takes; returns for how many sources the sentences differ."""
    ratios, different = [], 0
    for source in progress(sources, name, unit="video", leave=False):
        (theirs, said), (ours, says) = run(source)
        ratios.append(theirs / ours)
        different += said != says
    print(f"{name:10}{median(ratios):6.2f} times faster ({min(ratios):.2f} to {max(ratios):.2f}), "
          f"the same sentences in {len(sources) - different} of {len(sources)}", flush=True)
    return different


def first_sentence(folder: Path) -> float:
    """Seconds from the start of `python stream.py toy/kitchen.mp4` to its first line."""
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, "stream.py", HERE / "toy" / "kitchen.mp4", "--device", "cpu"], cwd=folder,
                          env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        line, seconds = child.stdout.readline(), time.perf_counter() - began
        child.kill()
    if not line.startswith("[00:"):
        raise BadData(f"{folder}: stream.py toy/kitchen.mp4 says nothing")
    return seconds


def long_features(folder: Path) -> list[str]:
    """Files with frame features of toy videos of 11 minutes, one for each pair."""
    vision, files = nar.VisionEncoder(str(stream.TOY / "vision")), []
    for seed in range(4000010, 4000010 + PAIRS):                                      # the README's long videos
        data.write_toy(seed, 11, folder / "long.mp4")
        x = torch.stack(list(encode_pictures(Video(folder / "long.mp4", 2.0), vision, 16)))
        files.append(f"{folder / str(seed)}.safetensors")
        save_file({"features": x}, files[-1])
    return files


def pieces(source: str, count: int = 16) -> list[str]:
    """Files with equal parts of frame features."""
    files = [source.replace(".safetensors", f"-{n}.safetensors") for n in range(count)]
    for file, x in zip(files, load_features(source).tensor_split(count)):
        save_file({"features": x.contiguous()}, file)
    return files


def random_llama(folder: Path) -> str:
    """A folder with a language model: four layers of Llama-3.2-1B's shape, few words, so that only layers count."""
    from transformers import LlamaConfig, LlamaForCausalLM
    sizes = LlamaConfig(vocab_size=640, hidden_size=2048, intermediate_size=8192, num_hidden_layers=4,
                        num_attention_heads=32, num_key_value_heads=8)
    LlamaForCausalLM(sizes).to(torch.bfloat16).save_pretrained(folder / "llm")
    checkpoint.load_tokenizer(str(stream.TOY / "llm")).save_pretrained(folder / "llm")
    return str(folder / "llm")


def compare_checkouts(other: str):
    """Print all comparisons with the checkout in the folder `other`; BadData if it is none, or says something else."""
    other = Path(other).resolve()
    if not (other / "stream.py").is_file():
        raise BadData(f"--against {other}: is no checkout of this project (it has no stream.py)")
    with TemporaryDirectory() as name:
        folder, different = Path(name), 0
        features = long_features(folder)
        for command, sources in ((recorded, features), (live, pieces(features[0], 4)),
                                 (llama, [random_llama(folder)] * PAIRS)):
            different += compare_pairs(command.__name__, lambda x: seconds_and_words(command, other, x), sources)
        different += compare_pairs("pixels", lambda x: seconds_and_words(recorded, other, x),
                                   [HERE / "toy" / "kitchen.mp4"] * PAIRS)
        different += compare_pairs("together", lambda x: together(other, x), [pieces(x) for x in features[:2]])
    theirs, ours = map(median, zip(*[(first_sentence(other), first_sentence(HERE)) for _ in range(PAIRS)]))
    print(f"first sentence of toy/kitchen.mp4 after {ours:.1f} s, there {theirs:.1f} s")
    if different:
        raise BadData(f"{different} of the runs above give other sentences than {other}")
