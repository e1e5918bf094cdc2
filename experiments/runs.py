"""Carries out the experiments of `paper.py`: trains and evaluates the narrators that lack a result.

An interrupted run goes on where it stopped, and nothing is trained twice. A result is a line of
experiments/results/EVALUATION.jsonl: its commands, its commit and its seed, the recipe (paper.py),
fingerprints of the toy's worlds and of the base, the losses at the end of the training's stages,
the measures, and some of them for each video. Results of other commands, recipes, worlds or bases
are not shown.
"""
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from experiments.paper import (
    EVALUATIONS, LLM, LOOK, RECIPE, TRAININGS, VIDEOS, VISION, Row, Table,
)
from support.common.disk import is_number, read_json, read_jsonl, write_json
from support.common.errors import BadData
from toy import world

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"
FOLDER = "out/tables"           # of trained narrators, unless another one is given
MADE = "training.json"          # beside a trained narrator: how it was trained
EACH = ("memory_words", "exact", "f1", "ppl")         # measures that are kept for each video
LAST_STEPS = 50                 # of a stage, whose losses are averaged


class Experiment(NamedTuple):
    """A training with a seed, an evaluation of its narrator, and options of that evaluation."""
    training: str
    evaluation: str
    options: str
    seed: int

    @property
    def name(self) -> str:
        """No two experiments have the same."""
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

def train_command(training: str, seed: int, folder: str) -> list[str]:
    """The command that trains a narrator of the toy, without `python`."""
    options = TRAININGS[training]
    command = ["train.py", "--data", "toy", "--seed", str(seed)]
    command += options.method.split() + options.course.split()
    if options.init:
        command += ["--init", f"{folder}/{options.init}-{seed}"]
    else:
        command += ["--vision", VISION]
        if not options.own_llm:
            command += ["--llm", LLM]
        if not options.own_look:
            command += ["--look", LOOK]
    return [*command, "--output", f"{folder}/{training}-{seed}"]


def evaluate_command(experiment: Experiment, folder: str) -> list[str]:
    """The command that evaluates a narrator, without `python`. It prints a JSON object last."""
    command = EVALUATIONS[experiment.evaluation]
    # Predictions are kept beside the narrator. Its seed is in the folder's name: here stands 0.
    model = f"{folder}/{experiment.training}-{experiment.seed}"
    kept = "-".join(["kept", experiment.evaluation, *option_words(experiment.options), "0"])
    places = {"keep": f"{model}/{kept}", "each": f"{model}/{kept}.json",
              "videos": f"{folder}/videos"}
    words = [word.format(**places) for word in command.split()]     # a folder may have spaces
    return [*words, "--model", model, *experiment.options.split(), "--json"]


# ------------------------------------------------------------------------------- results

@cache
def fingerprint_of_worlds() -> str:
    """A hash over two test videos of every world: all of their narrations, one picture of each."""
    digest = hashlib.sha256()
    for variant in world.WORLDS.values():
        for kitchen in world.kitchens("test", 2, world=variant):
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


def origin(command: list[str]) -> dict:
    """What a narrator is made by: its `train_command`, and what that does today."""
    return {
        "train": " ".join(["python", *command]),
        "recipe": RECIPE,
        "worlds": fingerprint_of_worlds(),
        "base": fingerprint_of_base(),
    }


def identity_of(experiment: Experiment) -> dict:
    """The fields of a result that tell of which experiment it is."""
    evaluate = evaluate_command(experiment, FOLDER)
    return {
        "name": experiment.name,
        "evaluate": " ".join(["python", *evaluate]),
        "seed": experiment.seed,
        **origin(train_command(experiment.training, experiment.seed, FOLDER)),
    }


@cache
def lines_of(file: Path) -> list[dict]:
    """The results in a file; none if there is no such file."""
    return read_jsonl(file) if file.exists() else []


def find_result(file: Path, identity: dict) -> dict | None:
    """The latest result in a file that has all fields of an identity. None if there is none."""
    found = [line for line in lines_of(file) if identity.items() <= line.items()]
    return found[-1] if found else None


def add_line(file: Path, line: dict) -> None:
    """Add a result to a file."""
    file.parent.mkdir(exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(line) + "\n")
    lines_of.cache_clear()


def result(experiment: Experiment) -> dict | None:
    """The result of an experiment. None if there is none, or if other commands, another recipe,
    world or base has made it."""
    return find_result(RESULTS / f"{experiment.evaluation}.jsonl", identity_of(experiment))


def add_result(experiment: Experiment, numbers: dict) -> None:
    line = identity_of(experiment) | numbers
    add_line(RESULTS / f"{experiment.evaluation}.jsonl", line)


def measures_of_videos(file: Path) -> dict[str, dict[str, float | None]]:
    """{measure: {video: value}} of what a command has written with --per-video."""
    kept = {}
    for video, row in read_json(file).items():
        for measure in EACH:
            if measure in row:
                value = row[measure]
                rounded = None if value is None else round(value, 4)
                kept.setdefault(measure, {})[video] = rounded
    return kept


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

def carry_out(experiment: Experiment, folder: str) -> None:
    """Make the result of an experiment, and before it all that it needs, unless it is there."""
    if result(experiment):
        return
    training, evaluation, _, seed = experiment
    commit = TRAININGS[training].commit
    if commit:
        raise BadData(f"{experiment.name} is of commit {commit}, whose code trains another "
                      f"narrator than today's: check it out to make such results")
    if "{videos}" in EVALUATIONS[evaluation]:
        for line in VIDEOS:                    # the command leaves videos that are there
            words = [word.format(videos=f"{folder}/videos") for word in line.split()]
            run_command(words, folder)
    init = TRAININGS[training].init
    if init:
        train_once(train_command(init, seed, folder), folder)
    train_once(train_command(training, seed, folder), folder)

    command = evaluate_command(experiment, folder)
    printed = run_command(command, folder)
    videos = {}
    if "--per-video" in command:
        videos = measures_of_videos(ROOT / command[command.index("--per-video") + 1])
    add_result(experiment, {
        "commit": present_commit(),
        "losses": losses_of(ROOT / folder / f"{training}-{seed}"),
        "measures": measures(json.loads(printed.splitlines()[-1])),
        "videos": videos,
    })


def train_once(command: list[str], folder: str) -> None:
    """Carry out a `train_command`, unless that is done.

    BadData if the narrator there was not made as it would be today.
    """
    output = ROOT / command[-1]
    file = output / MADE
    if not output.exists():
        write_json(file, origin(command))      # before the training: an interrupted one has it, too
    elif not file.exists() or read_json(file) != origin(command):
        raise BadData(f"{output} was not trained as it would be today; delete it, or choose "
                      "another --output")
    else:
        command = [*command, "--resume"]
    if not (output / "narrator.json").exists():            # the training has not ended
        run_command(command, folder)


@cache
def present_commit() -> str:
    """The present commit, with a + if a file has changed since. "" where there is no repository."""
    git = ["git", "describe", "--always", "--abbrev=10", "--exclude=*", "--dirty=+"]
    return subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def run_command(command: list[str], folder: str) -> str:
    """Run a command and return what it prints. Its messages go to a log. If it fails: BadData with
    the last of them."""
    log = ROOT / folder / "messages.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    print("python", *command, file=sys.stderr)
    with log.open("w") as messages:
        process = subprocess.run([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE,
                                 stderr=messages, text=True)
    if process.returncode:
        lines = log.read_text().splitlines() or [f"exit code {process.returncode}"]
        raise BadData(f"{lines[-1]} (see {log})")
    return process.stdout
