"""Carries out the experiments of `paper.py`: trains and evaluates what has no result yet.

An interrupted run goes on where it stopped; nothing is trained twice. A result is a small file in experiments/results/:
the commands, the commits, the seed, the recipe (paper.py), fingerprints of the toy's worlds and of the base, the
measures. A new recipe's result replaces that of the one before.
"""
import hashlib
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from multiprocessing.pool import ThreadPool
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from experiments.paper import (
    EVALUATIONS, LARGE, REAL_EVALUATIONS, RECIPE, TRAININGS, VIDEOS, Row, Table, Training,
)
from support.common.disk import is_number, read_json, write_json
from support.common.errors import BadData
from toy import world

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"
STARTS = "llm", "vision", "look", "init"                    # fields of a Training: those that it starts from
MADE = "training.json"                                      # beside a narrator: its command, worlds, recipe, commit


class Experiment(NamedTuple):
    """A narrator, trained with a seed, and what is measured."""
    training: str
    evaluation: str
    options: str
    seed: int

    @property
    def name(self) -> str:
        """What distinguishes it, as a file's name."""
        return "-".join([*self.training.split("/"), self.evaluation, *words(self.options), str(self.seed)])


def words(options: str) -> list[str]:
    """Of options, for names of files: --static --theta 0.7 -> static, theta, 0.7."""
    return options.replace("--", "").split()


def experiments_of(row: Row, evaluation: str, seeds: Iterable[int]) -> list[Experiment]:
    """What a row shows of an evaluation; what a narrator costs does not depend on its seed."""
    seeds = [0] if evaluation == "cost" else seeds
    return [Experiment(row.training, evaluation, row.options, seed) for seed in seeds]


def needed(table: Table, seeds: Iterable[int]) -> list[Experiment]:
    """All that a table shows, each once."""
    kinds = dict.fromkeys(column.evaluation for column in table.columns)
    return list(dict.fromkeys(experiment for seed in seeds for row in table.rows for kind in kinds
                              for experiment in experiments_of(row, kind, [seed])))


# ------------------------------------------------------------------------------------------- commands

def base_and_name(training: str) -> tuple[str, str]:
    """base2/flownar -> base2, flownar; flownar -> "", flownar."""
    base, _, name = training.rpartition("/")
    return base, name


def options_of(training: str) -> Training:
    """Of flownar or base2/flownar, where those that it starts from have the same base."""
    base, name = base_and_name(training)
    given = TRAININGS[name]
    return given._replace(**{kind: f"{base}/{other}" for kind in STARTS if base and (other := getattr(given, kind))})


def train_command(training: str, seed: int, folder: str) -> list[str]:
    """The toy's training, without `python`."""
    given, models = options_of(training), []
    for kind, part in (("llm", "/llm"), ("vision", "/vision"), ("look", "")):
        other = getattr(given, kind)
        if other and (other, 0) != (training, seed):
            models.append(f"--{kind} {folder}/{other}-0{part}")
    start = f"--init {folder}/{given.init}-{seed}" if given.init else ""
    return " ".join(["train.py --data toy", f"--seed {seed}", given.method, given.toy, *models, start,
                     f"--output {folder}/{training}-{seed}"]).split()


def evaluate_command(experiment: Experiment, folder: str) -> list[str]:
    """Likewise its evaluation, of which the last line is a JSON object."""
    model, command = f"{folder}/{experiment.training}-{experiment.seed}", EVALUATIONS[experiment.evaluation]
    kept = Experiment("kept", experiment.evaluation, experiment.options, 0).name
    filled = command.format(keep=f"{model}/{kept}", videos=f"{folder}/videos", long=f"{model}/kept-long-0/predictions")
    which = [] if "--pred" in command else ["--model", model]
    return [*filled.split(), *which, *experiment.options.split(), "--json"]


def real_commands(row: Row, table: Table, data: str) -> list[str]:
    """A row's commands on a real data set; EgoExo4D and EPIC-Kitchens start from Ego4D's narrator, as in the paper."""
    _, name = base_and_name(row.training)                                      # bases are the toy's
    own = TRAININGS[name]
    training, real = own.same or name, f"{own.real} {table.real}"
    size, scratch = "8b-" * (LARGE in real), data == "ego4d" or own.scratch
    out = f"out/{data}-{size}{training}" + "-scratch" * (scratch and data != "ego4d")
    start = "" if scratch else f"--init out/ego4d-{size}{training}"
    epochs = "--epochs 4" if data == "ek100" else ""
    lines = [own.features] if own.features else []
    lines.append(f"train.py --data {data} {TRAININGS[training].method} {real} {start} {epochs} --output {out}")
    kinds = list(dict.fromkeys(column.evaluation for column in table.columns if not column.toy))
    for kind in ["stream"] * (kinds[0] in ("summary", "objects")) + kinds:     # those read streamed narrations
        line = REAL_EVALUATIONS[kind].format(data=data, out=out, keep="-".join([f"{out}/kept", *words(row.options)]))
        root = own.real if "--root" in own.real else ""
        lines.append(f"{line} {row.options} {root}" if line.startswith("evaluate.py") else line)
    return ["python " + " ".join(line.split()) for line in lines]


# ------------------------------------------------------------------------------------------- results

def fingerprint_of_worlds() -> str:
    """Of the narrations of two test videos in every world, and of one picture of each."""
    mark = hashlib.sha256()
    for variant in world.WORLDS.values():
        for _, kitchen in world.kitchens("test", 2, world=variant):
            mark.update(repr([(n.frame, n.text) for n in kitchen.narrations]).encode())
            mark.update(kitchen.render(len(kitchen) // 2).tobytes())
    return mark.hexdigest()[:12]


def result(experiment: Experiment, worlds: str) -> dict | None:
    """A result that is there and is of today's commands and worlds, and of any recipe; else None. BadData for a damaged
    file."""
    path = RESULTS / f"{experiment.name}.json"
    if not path.exists():
        return None
    kept = read_json(path)
    if not isinstance(kept, dict) or not isinstance(kept.get("measures"), dict):
        raise BadData(f"{path}: is not a result of experiments.tables; delete it")
    kept = {"recipe": 1} | kept                                        # the first one was not written down
    return kept if {**kept, **about(experiment, worlds)} == kept else None


def result_of_today(experiment: Experiment, worlds: str) -> dict | None:
    """A `result` of today's recipe, which need not be made again."""
    kept = result(experiment, worlds)
    return kept if kept and kept["recipe"] == RECIPE else None


def about(experiment: Experiment, worlds: str) -> dict:
    """What makes a result one of this experiment, as its file says it, in any recipe."""
    commands = {"train": train_command(experiment.training, experiment.seed, "out/tables"),
                "evaluate": evaluate_command(experiment, "out/tables")}
    return {name: " ".join(["python", *command]) for name, command in commands.items()} | {
        "seed": experiment.seed, "worlds": worlds}


def measures(printed: dict) -> dict[str, float | None]:
    """The numbers that a command has printed; those of groups of videos under group/label/measure."""
    if "variants" in printed:                                          # experiments.efficiency, one narrator
        cost, = printed["variants"].values()
        return {"gmacs": cost["macs"] / 1e9, "cache_mb": cost["windows"][-1]["used_bytes"] / 1e6}
    found = {}
    for name, value in printed.items():
        if isinstance(value, dict):
            found |= {f"{name}/{key}": inner for key, inner in measures(value).items()}
        elif value is None or is_number(value):
            found[name] = value if value is None else round(value, 6)
    return found


def fingerprint_of_base(training: str, folder: str) -> str:
    """Of the encoder and the language model of a training's base: those of flownar-c with seed 0."""
    first, mark = ROOT / folder / base_and_name(training)[0] / "flownar-c-0", hashlib.sha256()
    for file in sorted(first.glob("*/model.safetensors")):
        mark.update(file.read_bytes())
    return mark.hexdigest()[:12]


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def commit() -> str | None:
    """The present commit, with a + if code has been changed since; None where there is no repository."""
    git = lambda *words: subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    head = git("rev-parse", "--short=10", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py", ":!tests").stdout.strip()
    return head.stdout.strip() + "+" * bool(changed) if head.returncode == 0 else None


# ------------------------------------------------------------------------------------------- work

class Runner:
    """Runs what is missing, `jobs` commands at a time; their messages go to files in `folder`."""

    def __init__(self, folder: str, jobs: int, worlds: str):
        self.folder, self.jobs, self.locks, self.guard = folder, jobs, defaultdict(Lock), Lock()
        self.worlds, self.commit, self.minutes = worlds, commit(), {}

    def __call__(self, wanted: list[Experiment]) -> list[str]:
        """Returns what went wrong, a line for each experiment."""
        with ThreadPool(self.jobs) as pool:
            return [line for line in pool.imap_unordered(self.attempt, wanted) if line]

    def attempt(self, experiment: Experiment) -> str | None:
        try:
            self.carry_out(experiment)
        except BadData as error:
            return f"{experiment.name}: {error}"

    def carry_out(self, experiment: Experiment):
        if "{long}" in EVALUATIONS[experiment.evaluation]:                     # works on predictions of that evaluation
            self.carry_out(experiment._replace(evaluation="long"))
        self.train(experiment.training, experiment.seed)
        with self.lock(experiment.name):
            if result_of_today(experiment, self.worlds):
                return
            if "{videos}" in EVALUATIONS[experiment.evaluation]:
                self.make_videos()
            began = time.monotonic()
            printed = self.run(evaluate_command(experiment, self.folder), experiment.name)
            spent = {"evaluate": time.monotonic() - began, "train": self.minutes.get(experiment[::3])}
            RESULTS.mkdir(exist_ok=True)
            write_json(RESULTS / f"{experiment.name}.json", about(experiment, self.worlds) | {
                "recipe": RECIPE,
                "base": fingerprint_of_base(experiment.training, self.folder),
                "commits": {"train": self.made(*experiment[::3])["commit"], "evaluate": self.commit},
                "minutes": {name: round(s / 60, 1) if s else None for name, s in spent.items()},
                "measures": measures(json.loads(printed.splitlines()[-1]))})

    def train(self, training: str, seed: int):
        """Train a narrator, and before it those that it starts from, unless they are there."""
        given, out = options_of(training), Path(self.folder) / f"{training}-{seed}"
        for other in {(given.llm, 0), (given.vision, 0), (given.look, 0), (given.init, seed)} - {(training, seed)}:
            if other[0]:
                self.train(*other)
        with self.lock(f"{training}-{seed}"):
            again, began = ["--resume"] if (ROOT / out).exists() else [], time.monotonic()
            command = train_command(training, seed, self.folder)
            if not again:
                (ROOT / out).mkdir(parents=True)
                write_json(ROOT / out / MADE, {"command": command, "worlds": self.worlds, "recipe": RECIPE,
                                                "commit": self.commit})
            else:
                made = self.made(training, seed)
                wanted = {"command": (made["command"], command), "world": (made["worlds"], self.worlds),
                          "recipe": (made["recipe"], RECIPE)}
                for which, (there, here) in wanted.items():
                    if there != here:
                        raise BadData(f"{ROOT / out} was trained by another {which}; delete it, or choose another "
                                      f"--output")
            if not (ROOT / out / "narrator.json").exists():
                self.run(command + again, f"{training}-{seed}".replace("/", "-"))
                self.minutes[training, seed] = None if again else time.monotonic() - began

    def made(self, training: str, seed: int) -> dict:
        """How a narrator was trained: {"command", "worlds", "recipe", "commit"}; BadData if nothing says so."""
        folder = ROOT / self.folder / f"{training}-{seed}"
        kept = read_json(folder / MADE) if (folder / MADE).exists() else None
        if not isinstance(kept, dict) or not {"command", "worlds", "commit"} <= kept.keys():
            raise BadData(f"{folder} does not say how it was trained; delete it, or choose another --output")
        return {"recipe": 1} | kept                            # the first one was not written down

    def make_videos(self):
        """The videos of 1, 3, 6 and 11 minutes."""
        with self.lock("videos"):
            for number, command in enumerate(VIDEOS):
                done = ROOT / self.folder / "videos" / f"done-{number}"
                if not done.exists():
                    self.run(command.format(videos=f"{self.folder}/videos").split(), "videos")
                    done.write_text(self.worlds)
                if done.read_text() != self.worlds:
                    raise BadData(f"{done.parent} shows another world; delete it, or choose another --output")

    def lock(self, name: str) -> Lock:
        with self.guard:
            return self.locks[name]

    def run(self, command: list[str], name: str) -> str:
        """What a command prints; BadData with the last line of its messages if it fails."""
        threads = str(max(1, cores() // self.jobs))
        log = ROOT / self.folder / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        print("python", *command, file=sys.stderr)
        with log.open("w") as messages:
            done = subprocess.run([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=messages,
                                  text=True, env=os.environ | {"OMP_NUM_THREADS": threads})
        if done.returncode:
            last = log.read_text().replace("\r", "\n").strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise BadData(f"{last[0]} (see {log})")
        return done.stdout
