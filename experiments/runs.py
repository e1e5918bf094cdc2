"""Carries out the experiments of `paper.py`: trains and evaluates the narrators that lack a result.

An interrupted run goes on where it stopped, and nothing is trained twice. A result is a small file
in experiments/results/: its commands, its commits and its seed, the recipe (paper.py), fingerprints
of the toy's worlds and of the base, the losses at the end of the training's stages, the measures,
and some of them for each video. Results of other commands, recipes, worlds or bases are not shown,
and are replaced.
"""
import hashlib
import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cache
from multiprocessing.pool import ThreadPool
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from experiments.paper import (
    EVALUATIONS, LARGE, LLM, LOOK, REAL_EVALUATIONS, RECIPE, TRAININGS, VIDEOS, VISION, Row, Table,
)
from support.common.disk import is_number, read_json, read_jsonl, write_json
from support.common.errors import BadData
from toy import world

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"
FOLDER = "out/tables"           # of trained narrators, unless another one is given
MADE = "training.json"         # beside a trained narrator: how it was trained
MADE_BY = {"command", "worlds", "recipe", "base", "commit"}    # what that file says


class Experiment(NamedTuple):
    """A training with a seed, an evaluation of its narrator, and options of that evaluation."""
    training: str
    evaluation: str
    options: str
    seed: int

    @property
    def name(self) -> str:
        """The name of the result's file, without .json. No two experiments have the same."""
        words = [self.training, self.evaluation, *option_words(self.options), str(self.seed)]
        return "-".join(words)


def option_words(options: str) -> list[str]:
    """Options as words of a file name: --static --theta 0.7 -> static, theta, 0.7."""
    return options.replace("--", "").split()


def experiments_of(row: Row, evaluation: str, seeds: Iterable[int]) -> list[Experiment]:
    """A row's experiments with one evaluation. The cost of a narrator does not depend on its seed:
    it is measured with seed 0 alone."""
    if evaluation == "cost":
        seeds = [0]
    return [Experiment(row.training, evaluation, row.options, seed) for seed in seeds]


def needed(table: Table, seeds: Iterable[int]) -> list[Experiment]:
    """All experiments whose results a table shows, each once."""
    evaluations = dict.fromkeys(column.evaluation for column in table.columns)
    experiments = []
    for seed in seeds:
        for row in table.rows:
            for evaluation in evaluations:
                experiments += experiments_of(row, evaluation, [seed])
    return list(dict.fromkeys(experiments))


# ------------------------------------------------------------------------------- commands

def starts_of(training: str, seed: int, folder: str) -> dict[str, str]:
    """What a training does not learn itself: option of train.py -> file or folder."""
    options = TRAININGS[training]
    if options.init:
        return {"init": f"{folder}/{options.init}-{seed}"}
    starts = {"vision": VISION}
    if not options.own_llm:
        starts["llm"] = LLM
        if not options.own_look:
            starts["look"] = LOOK
    return starts


def train_command(training: str, seed: int, folder: str) -> list[str]:
    """The command that trains a narrator of the toy, without `python`."""
    command = ["train.py", "--data", "toy", "--seed", str(seed)]
    command += TRAININGS[training].method.split() + TRAININGS[training].toy.split()
    for option, path in starts_of(training, seed, folder).items():
        command += [f"--{option}", path]
    return [*command, "--output", f"{folder}/{training}-{seed}"]


def evaluate_command(experiment: Experiment, folder: str) -> list[str]:
    """The command that evaluates a narrator, without `python`. It prints a JSON object last."""
    command = EVALUATIONS[experiment.evaluation]
    # Predictions are kept beside the narrator. Its seed is in the folder's name: here stands 0.
    model = f"{folder}/{experiment.training}-{experiment.seed}"
    kept = "-".join(["kept", experiment.evaluation, *option_words(experiment.options), "0"])
    places = {"keep": f"{model}/{kept}", "each": f"{model}/{kept}.json",
              "videos": f"{folder}/videos", "long": f"{model}/kept-long-0/predictions",
              "features": f"{folder}/features.safetensors"}
    words = [word.format(**places) for word in command.split()]     # a folder may have spaces
    if "--pred" not in command:
        words += ["--model", model]
    return [*words, *experiment.options.split(), "--json"]


def real_commands(row: Row, table: Table, data: str) -> list[str]:
    """A row's commands on a real data set, with `python`.

    On EgoExo4D and EPIC-Kitchens, training starts from Ego4D's narrator, as in the paper.
    """
    options = TRAININGS[row.training]
    training = options.same or row.training
    real = f"{options.real} {table.real}"
    size = "8b-" if LARGE in real else ""
    output = f"out/{data}-{size}{training}"
    start = ""
    if data != "ego4d":
        if options.scratch:
            output += "-scratch"
        else:
            start = f"--init out/ego4d-{size}{training}"
    epochs = "--epochs 4" if data == "ek100" else ""

    commands = []
    if options.features:
        commands.append(options.features)
    method = TRAININGS[training].method
    commands.append(f"train.py --data {data} {method} {real} {start} {epochs} --output {output}")

    evaluations = list(dict.fromkeys(
        column.evaluation for column in table.columns if not column.toy))
    if evaluations[:1] in (["summary"], ["objects"]):          # those read streamed narrations
        evaluations.insert(0, "stream")
    kept = "-".join([f"{output}/kept", *option_words(row.options)])
    root = options.real if "--root" in options.real else ""
    for evaluation in evaluations:
        command = REAL_EVALUATIONS[evaluation].format(data=data, out=output, keep=kept)
        if command.startswith("evaluate.py"):
            command += f" {row.options} {root}"
        commands.append(command)
    return ["python " + " ".join(command.split()) for command in commands]


# ------------------------------------------------------------------------------- results

@cache
def fingerprint_of_worlds() -> str:
    """A hash over two test videos of every world: all of their narrations, one picture of each."""
    digest = hashlib.sha256()
    for variant in world.WORLDS.values():
        for _, kitchen in world.kitchens("test", 2, world=variant):
            narrations = [(narration.frame, narration.text) for narration in kitchen.narrations]
            digest.update(repr(narrations).encode())
            digest.update(kitchen.render(len(kitchen) // 2).tobytes())
    return digest.hexdigest()[:12]


@cache
def fingerprint_of_base() -> str:
    """A hash over the encoder, the language model and the stage `look` of all narrators."""
    digest = hashlib.sha256()
    for file in (f"{VISION}/model.safetensors", f"{LLM}/model.safetensors", LOOK):
        digest.update((ROOT / file).read_bytes())
    return digest.hexdigest()[:12]


def identity_of(experiment: Experiment) -> dict:
    """The fields of a result's file that tell of which experiment it is."""
    train = train_command(experiment.training, experiment.seed, FOLDER)
    evaluate = evaluate_command(experiment, FOLDER)
    return {
        "train": " ".join(["python", *train]),
        "evaluate": " ".join(["python", *evaluate]),
        "seed": experiment.seed,
        "recipe": RECIPE,
        "worlds": fingerprint_of_worlds(),
        "base": fingerprint_of_base(),
    }


def result(experiment: Experiment) -> dict | None:
    """The result of an experiment. None if there is none, or if other commands, another recipe,
    world or base has made it. BadData for a damaged file."""
    path = RESULTS / f"{experiment.name}.json"
    if not path.exists():
        return None
    kept = read_json(path)
    if not isinstance(kept, dict) or not isinstance(kept.get("measures"), dict):
        raise BadData(f"{path}: is not a result of experiments.tables; delete it")
    identity = identity_of(experiment)
    if any(kept.get(field) != value for field, value in identity.items()):
        return None
    return kept


EACH = ("memory_words", "exact", "f1", "ppl")         # measures that are kept for each video


def measures_of_videos(file: Path) -> dict[str, dict[str, float | None]]:
    """{measure: {video: value}} of what a command has written with --per-video."""
    rows = read_json(file)
    kept = {}
    for measure in EACH:
        if any(measure in row for row in rows.values()):
            kept[measure] = {name: row.get(measure) for name, row in rows.items()}
            for name, value in kept[measure].items():
                kept[measure][name] = value if value is None else round(value, 4)
    return kept


LAST_STEPS = 50


def losses_of(folder: Path) -> dict[str, float]:
    """{stage: the mean loss of its last steps} of a training."""
    losses = {}
    for log in sorted(folder.glob("*-log.jsonl")):
        rows = read_jsonl(log)[-LAST_STEPS:]
        stage = log.name.removesuffix("-log.jsonl")
        losses[stage] = round(sum(row["loss"] for row in rows) / len(rows), 4)
    return losses


def measures(printed: dict) -> dict[str, float | None]:
    """The numbers that a command has printed. For groups of videos: group/label/measure."""
    if "variants" in printed:                  # experiments.efficiency, of one narrator
        cost, = printed["variants"].values()
        return {"gmacs": cost["macs"] / 1e9, "cache_mb": cost["windows"][-1]["used_bytes"] / 1e6}
    numbers = {}
    for name, value in printed.items():
        if isinstance(value, dict):
            for key, number in measures(value).items():
                numbers[f"{name}/{key}"] = number
        elif value is None:
            numbers[name] = None
        elif is_number(value):
            numbers[name] = round(value, 6)
    return numbers


# ------------------------------------------------------------------------------- work

def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def git(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)


def present_commit() -> str | None:
    """The present commit, with a + if code has changed since. None where there is no repository."""
    head = git("rev-parse", "--short=10", "HEAD")
    if head.returncode:
        return None
    name = head.stdout.strip()
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py", ":!tests")
    return name + "+" if changed.stdout.strip() else name


def in_minutes(seconds: float | None) -> float | None:
    return round(seconds / 60, 1) if seconds else None


def narrators_first(experiments: list[Experiment]) -> list[Experiment]:
    """First one experiment of each narrator, then a second one of each, and so on. So the narrators
    are trained side by side, and no job waits for the training of another one."""
    counts = Counter()
    turns = {}
    for experiment in experiments:
        narrator = experiment.training, experiment.seed
        turns[experiment] = counts[narrator]
        counts[narrator] += 1
    return sorted(experiments, key=turns.get)


class Runner:
    """Carries out experiments, `jobs` commands at a time. Their messages go to files in `folder`.

    Several experiments may need the same training or the same videos. So each piece of work has a
    lock: the first experiment does the work, the others wait, and then find it done.
    """

    def __init__(self, folder: str, jobs: int):
        self.folder = folder
        self.jobs = jobs
        self.worlds = fingerprint_of_worlds()
        self.commit = present_commit()
        self.training_seconds = {}             # (training, seed) -> seconds, None if resumed
        self.locks = defaultdict(Lock)
        self.guard = Lock()                    # held while a lock is looked up or made

    def __call__(self, experiments: list[Experiment]) -> list[str]:
        """Returns the errors, one line for each experiment that failed."""
        with ThreadPool(self.jobs) as pool:
            lines = list(pool.imap_unordered(self.attempt, narrators_first(experiments)))
        return [line for line in lines if line]

    def attempt(self, experiment: Experiment) -> str | None:
        try:
            self.carry_out(experiment)
        except BadData as error:
            return f"{experiment.name}: {error}"

    def carry_out(self, experiment: Experiment) -> None:
        """Make the result of an experiment, and before it all that it needs, unless it is there."""
        if result(experiment):
            return
        self.train(experiment.training, experiment.seed)
        if "{long}" in EVALUATIONS[experiment.evaluation]:
            # It reads predictions of that evaluation, which a result alone does not bring along.
            self.evaluate(experiment._replace(evaluation="long"), for_predictions=True)
        self.evaluate(experiment)

    def evaluate(self, experiment: Experiment, for_predictions: bool = False) -> None:
        """Measure a narrator that is there, unless its result is.

        for_predictions     only for the predictions that the command keeps: its result may be there
                            already, and is not written
        """
        command = evaluate_command(experiment, self.folder)
        with self.lock(experiment.name):
            if result(experiment) and not for_predictions:
                return
            if "{videos}" in EVALUATIONS[experiment.evaluation]:
                self.make_videos()
            began = time.monotonic()
            printed = self.run(command, experiment.name)
            seconds = time.monotonic() - began
            if for_predictions:
                return
            self.write_result(experiment, json.loads(printed.splitlines()[-1]), seconds)

    def write_result(self, experiment: Experiment, printed: dict, seconds: float) -> None:
        training, seed = experiment.training, experiment.seed
        command = evaluate_command(experiment, self.folder)
        videos = {}
        if "--per-video" in command:
            videos = measures_of_videos(ROOT / command[command.index("--per-video") + 1])
        RESULTS.mkdir(exist_ok=True)
        write_json(RESULTS / f"{experiment.name}.json", identity_of(experiment) | {
            "commits": {"train": self.made(training, seed)["commit"], "evaluate": self.commit},
            "minutes": {"evaluate": in_minutes(seconds),
                        "train": in_minutes(self.training_seconds.get((training, seed)))},
            "losses": losses_of(ROOT / self.folder / f"{training}-{seed}"),
            "measures": measures(printed),
            "videos": videos,
        })

    def train(self, training: str, seed: int) -> None:
        """Train a narrator, and before it the one that it starts from, unless they are there."""
        init = TRAININGS[training].init
        if init:
            self.train(init, seed)
        with self.lock(f"{training}-{seed}"):
            output = ROOT / self.folder / f"{training}-{seed}"
            command = train_command(training, seed, self.folder)
            made = {"command": command, "worlds": self.worlds, "recipe": RECIPE,
                    "base": fingerprint_of_base(), "commit": self.commit}
            resumed = output.exists()
            if resumed:
                self.check_made(training, seed, made)
            else:
                output.mkdir(parents=True)
                # Written before the training: an interrupted one has it, too.
                write_json(output / MADE, made)
            if (output / "narrator.json").exists():            # the training has ended
                return
            if resumed:
                command = [*command, "--resume"]
            began = time.monotonic()
            self.run(command, f"{training}-{seed}")
            seconds = time.monotonic() - began
            # A resumed training took longer than this part of it.
            self.training_seconds[training, seed] = None if resumed else seconds

    def made(self, training: str, seed: int) -> dict:
        """How a narrator was trained: {"command", "worlds", "recipe", "base", "commit"}. BadData if
        no file tells."""
        folder = ROOT / self.folder / f"{training}-{seed}"
        kept = read_json(folder / MADE) if (folder / MADE).exists() else None
        if not isinstance(kept, dict) or not MADE_BY <= kept.keys():
            raise BadData(f"{folder} does not say how it was trained; delete it, or choose another "
                          "--output")
        return kept

    def check_made(self, training: str, seed: int, wanted: dict) -> None:
        """BadData if a narrator was not trained as it would be today. Another commit is allowed."""
        kept = self.made(training, seed)
        for field in ("command", "worlds", "recipe", "base"):
            if kept[field] != wanted[field]:
                folder = ROOT / self.folder / f"{training}-{seed}"
                raise BadData(f"{folder} was trained with another {field}; delete it, or choose "
                              "another --output")

    def make_videos(self) -> None:
        """Make the videos of 1, 3, 6 and 11 minutes, unless they are there."""
        with self.lock("videos"):
            for number, command in enumerate(VIDEOS):
                done = ROOT / self.folder / "videos" / f"done-{number}"
                if not done.exists():
                    words = [word.format(videos=f"{self.folder}/videos")
                             for word in command.split()]
                    self.run(words, "videos")
                    done.write_text(self.worlds)
                if done.read_text() != self.worlds:
                    raise BadData(f"{done.parent} shows another world; delete it, or choose "
                                  "another --output")

    def lock(self, name: str) -> Lock:
        with self.guard:
            return self.locks[name]

    def run(self, command: list[str], name: str) -> str:
        """Run a command and return what it prints. If it fails: BadData with its last message."""
        log = ROOT / self.folder / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        # Commands that run side by side share the cores.
        threads = max(1, cores() // self.jobs)
        print("python", *command, file=sys.stderr)
        with log.open("w") as messages:
            process = subprocess.run(
                [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=messages,
                text=True, env=os.environ | {"OMP_NUM_THREADS": str(threads)})
        if process.returncode:
            # A progress bar writes over its line with \r: each state becomes a line of its own.
            lines = log.read_text().replace("\r", "\n").strip().splitlines()
            last = lines[-1] if lines else f"exit code {process.returncode}"
            raise BadData(f"{last} (see {log})")
        return process.stdout
