"""Carries out the experiments of `paper.py`: trains and evaluates the narrators that lack a result.

An interrupted run goes on where it stopped, and nothing is trained twice. A result is a line of
experiments/results/EVALUATION.jsonl: its commands, its commit and its seed, the measures, and some
of them for each video. Its commands are what it is known by: results of others are not shown. It is
made in a tree without changes alone, so that its commit says what has made it.
(Lines from before carry a recipe's number and hashes of the toy's worlds and of the base, too.)
"""
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

from experiments.paper import EVALUATIONS, LLM, LOOK, TRAININGS, VIDEOS, VISION, Row, Table
from support.common.disk import is_number, read_json, read_jsonl, write_json
from support.common.errors import BadData
from support.common.seal import refuse_if_changed

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"
FOLDER = "out/tables"           # of trained narrators, unless another one is given
MADE = "training.json"          # beside a trained narrator: its command
# measures that are kept for each video
EACH = ("memory_words", "exact", "f1", "ppl")


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


def experiments_of(row: Row, evaluation: str, seeds: list[int] | None = None) -> list[Experiment]:
    """A row's experiments with one evaluation, and these seeds; None: those of the row. With seed 0
    alone: the cost of a narrator, which does not depend on its seed, and a narrator that is there."""
    if seeds is None:
        seeds = row.seeds
    if evaluation == "cost" or TRAININGS[row.training].folder:
        seeds = [0]
    return [Experiment(row.training, evaluation, row.options, seed) for seed in seeds]


def needed(table: Table, seeds: list[int] | None = None) -> list[Experiment]:
    """All experiments whose results a table shows, each once; those of the first seed first."""
    experiments = []
    for row in table.rows:
        for column in table.columns:
            experiments += experiments_of(row, column.evaluation, seeds)
    return sorted(dict.fromkeys(experiments), key=lambda experiment: experiment.seed)


# ------------------------------------------------------------------------------- commands

def train_command(training: str, seed: int, folder: str) -> list[str]:
    """The command that trains a narrator of the toy, without `python`."""
    options = TRAININGS[training]
    command = ["train.py", "--data", "toy", "--seed", str(seed)]
    command += options.method.split() + options.course.split()
    if options.init:
        command += ["--init", narrator_of(options.init, seed, folder)]
    else:
        command += ["--vision", VISION, "--llm", LLM]
        if not options.own_look:
            command += ["--look", LOOK]
    return [*command, "--output", f"{folder}/{training}-{seed}"]


def narrator_of(training: str, seed: int, folder: str) -> str:
    """Where the narrator of a training lies."""
    return TRAININGS[training].folder or f"{folder}/{training}-{seed}"


def evaluate_command(experiment: Experiment, folder: str) -> list[str]:
    """The command that evaluates a narrator, without `python`. It prints a JSON object last."""
    command = EVALUATIONS[experiment.evaluation]
    # Predictions are kept beside the narrator. Its seed is in the folder's name: here stands 0.
    trained = f"{folder}/{experiment.training}-{experiment.seed}"
    model = narrator_of(experiment.training, experiment.seed, folder)
    kept = "-".join(["kept", experiment.evaluation, *option_words(experiment.options), "0"])
    places = {
        "keep": f"{trained}/{kept}",
        "each": f"{trained}/{kept}.json",
        "videos": f"{folder}/videos",
    }
    words = [word.format(**places) for word in command.split()]     # a folder may have spaces
    return [*words, "--model", model, *experiment.options.split(), "--json"]


# ------------------------------------------------------------------------------- results

def identity_of(experiment: Experiment) -> dict:
    """The fields of a result that tell of which experiment it is."""
    train = train_command(experiment.training, experiment.seed, FOLDER)
    evaluate = evaluate_command(experiment, FOLDER)
    return {
        "name": experiment.name,
        "seed": experiment.seed,
        "train": " ".join(["python", *train]),
        "evaluate": " ".join(["python", *evaluate]),
    }


@cache
def lines_of(file: Path) -> list[dict]:
    """The results in a file; none if there is no such file."""
    return read_jsonl(file) if file.exists() else []


def add_line(file: Path, line: dict) -> None:
    """Add a result to a file."""
    file.parent.mkdir(exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(line) + "\n")
    lines_of.cache_clear()


def result(experiment: Experiment) -> dict | None:
    """The result of an experiment. None if there is none, or if other commands have made it."""
    identity = identity_of(experiment)
    for line in lines_of(RESULTS / f"{experiment.evaluation}.jsonl"):
        if identity.items() <= line.items():
            return line
    return None


def add_result(experiment: Experiment, numbers: dict) -> None:
    add_line(RESULTS / f"{experiment.evaluation}.jsonl", identity_of(experiment) | numbers)


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
    commit = present_commit()
    training, evaluation, _, seed = experiment
    if "{videos}" in EVALUATIONS[evaluation]:
        for line in VIDEOS:                    # the command leaves videos that are there
            words = [word.format(videos=f"{folder}/videos") for word in line.split()]
            run_command(words)
    for name in (TRAININGS[training].init, training):
        if name and TRAININGS[name].folder is None:
            train_once(train_command(name, seed, folder))

    command = evaluate_command(experiment, folder)
    printed = run_command(command)
    videos = {}
    if "--per-video" in command:
        file = command[command.index("--per-video") + 1]
        videos = measures_of_videos(ROOT / file)
    last_line = json.loads(printed.splitlines()[-1])
    add_result(experiment, {
        "commit": commit,
        "measures": measures(last_line),
        "videos": videos,
    })


def train_once(command: list[str]) -> None:
    """Carry out a `train_command`, unless that is done.

    BadData if the narrator there is of another command.
    """
    output = ROOT / command[-1]
    made = {"train": " ".join(["python", *command])}
    if output.exists():
        kept = read_json(output / MADE) if (output / MADE).exists() else {}
        refuse_if_changed(str(output), kept, made, "delete it, or choose another --output")
        command = [*command, "--resume"]
    else:
        write_json(output / MADE, made)        # before the training: an interrupted one has it, too
    if not (output / "narrator.json").exists():            # the training has not ended
        run_command(command)


def present_commit() -> str:
    """The present commit, in ten digits. BadData where there is none, or where a file has changed
    since, but for results."""
    commit = git("rev-parse", "--short=10", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", ":!experiments/results")
    if changed or not commit:
        raise BadData(f"{ROOT}: results are made of a commit; commit what has changed")
    return commit


def git(*words: str) -> str:
    """What git prints; "" if it fails."""
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def run_command(command: list[str]) -> str:
    """Run a command and return what it prints; its messages are seen. BadData if it fails."""
    print("python", *command, file=sys.stderr)
    process = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    if process.returncode:
        raise BadData(f"this has failed, as its message above says: python {' '.join(command)}")
    return process.stdout
