"""What any training needs: valid paths of models, the order of examples, sums over processes,
resumable states, the log and the loss curve.

No section of the paper, and nothing about narrators.
"""
from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from support.common.devices import rank
from support.common.disk import read_jsonl, write_tensors, write_text
from support.common.errors import BadData
from support.common.figures import pyplot, save_figure
from support.common.progress import progress, say
from support.engine.run_options import RunOptions

# options that may differ from those of the state, on --resume
MAY_CHANGE = {"given", "output", "device", "resume", "save_every", "val_limit", "checkpointing"}


def portable_path(source: str, folder: str | Path = "") -> str:
    """The path of a model in a form that stays valid.

    An existing file or folder becomes an absolute path; a folder inside `folder` becomes a path
    relative to it. Anything else is a hub id and stays the same.
    """
    if not Path(source).exists():
        return source
    path = Path(source).resolve()
    if folder and path.is_dir() and path.is_relative_to(Path(folder).resolve()):
        path = path.relative_to(Path(folder).resolve())
    return str(path)


def order(count: int, batch: int, step: int, seed: int) -> list[int]:
    """The examples (of `count`) of a step. Each epoch has a new random order.

    The result depends on seed and step alone, so that training can be resumed at any step.
    """
    examples = []
    for position in range(step * batch, (step + 1) * batch):
        epoch, index = divmod(position, count)
        # another number for each seed and epoch, below a million epochs
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        permutation = torch.randperm(count, generator=generator)
        examples.append(int(permutation[index]))
    return examples


# ------------------------------------------------------------------ several processes

def seed_dropout(seed: int, step: int) -> None:
    """Each step and each process has random numbers of its own."""
    process, processes = rank()
    torch.manual_seed((seed * 1_000_003 + step) * processes + process)


def summed(*numbers: float) -> list[float]:
    """Each number, summed over all processes."""
    _, processes = rank()
    if processes == 1:
        return list(numbers)
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    total = torch.tensor(numbers, dtype=torch.float32, device=device)
    dist.all_reduce(total)
    return total.tolist()


def sum_gradients(parameters: dict[str, Tensor]) -> None:
    """Sum gradients over all processes (data parallelism); once a step, after the accumulation."""
    _, processes = rank()
    if processes > 1:
        for p in parameters.values():
            dist.all_reduce(p.grad)


# ------------------------------------------------------------------ one training

class Run:
    """The steps of a training: resumable, logged, shown, on one process or several.

    A context manager. Iterating gives the numbers of the steps that are left; each must be followed
    by `update` and `after`. Ctrl-C, and an error that a user can mend (a file that is missing),
    write the state after the last complete step.

    stage       the name of its files in the folder --output: STAGE-state.safetensors,
                STAGE-log.jsonl, STAGE-loss.png
    """

    def __init__(self, stage: str, parameters: dict[str, Tensor],
                 optimizer: torch.optim.Optimizer, steps: int, options: RunOptions):
        self.stage = stage
        self.parameters = parameters
        self.optimizer = optimizer
        self.steps = steps
        self.save_every = options.save_every
        folder = Path(options.output)
        folder.mkdir(parents=True, exist_ok=True)
        self.state = folder / f"{stage}-state.safetensors"
        self.log = folder / f"{stage}-log.jsonl"
        self.settings = settings_of_run(options) | {
            "steps": steps,
            "weights": sum(p.numel() for p in parameters.values()),
        }
        process, _ = rank()
        self.is_first_process = process == 0
        # The steps that are done; None within a step of the optimizer, from where no training can
        # be resumed.
        self.done: int | None = 0
        if options.resume and self.state.exists():
            self.done = self.read_state()
        self.saved = self.done
        self.random = torch.get_rng_state()                    # after the steps that are done
        if self.is_first_process:
            cut_log(self.log, self.done)

    def __enter__(self) -> Run:
        return self

    def __iter__(self) -> Iterator[int]:
        steps = range(self.done, self.steps)
        self.bar = progress(steps, self.stage, self.steps, "step", initial=self.done, mininterval=1)
        yield from self.bar

    @contextmanager
    def update(self, step: int) -> Iterator[None]:
        """Around a step of the optimizer."""
        self.done = None
        yield
        self.done = step + 1
        self.random = torch.get_rng_state()

    def after(self, step: int, loss: float, validate: Callable[[int], dict]) -> None:
        """Validate, log the step, and save the state if it is time to."""
        entry = {"step": step, "loss": loss}
        try:
            entry |= validate(step)
        finally:                                               # Ctrl-C during the validation
            if self.is_first_process:
                with self.log.open("a") as file:
                    file.write(json.dumps(entry) + "\n")
        self.bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        steps_done = step + 1
        if steps_done % self.save_every == 0 or steps_done == self.steps:
            self.save_state()

    def __exit__(self, kind, error, traceback) -> None:
        if not self.is_first_process:
            return
        if kind is None:
            report_losses(self.log)
        elif issubclass(kind, KeyboardInterrupt | BadData | OSError):
            if self.done:
                self.save_state()
            if self.saved:
                say(f"{self.stage}: {self.saved} of {self.steps} steps are saved; the same command "
                    f"with --resume goes on from there")

    def save_state(self) -> None:
        """Write one file with everything that `read_state` needs."""
        if not self.is_first_process:
            return
        tensors = {"random": self.random}
        for name, p in self.parameters.items():
            tensors[f"{name}|value"] = p
            for key, tensor in self.optimizer.state[p].items():
                tensors[f"{name}|{key}"] = tensor
        about = {"step": str(self.done), "settings": json.dumps(self.settings)}
        write_tensors(self.state, tensors, about)
        self.saved = self.done

    @torch.no_grad()
    def read_state(self) -> int:
        """Continue with the state -> the number of steps that are done.

        BadData if it is damaged, or of a run with other settings.
        """
        about = check_settings_of_state(self.state, self.settings)
        tensors = load_file(self.state)
        for name, p in self.parameters.items():
            p.copy_(tensors[f"{name}|value"])
            self.optimizer.state[p] = {key: tensors[f"{name}|{key}"].to(p.device)
                                       for key in ("step", "exp_avg", "exp_avg_sq")}
        torch.set_rng_state(tensors["random"])
        return int(about["step"])


# ------------------------------------------------------------------ what is written

def settings_of_run(options: RunOptions) -> dict:
    """The options that must be the same when a training is resumed."""
    return {name: value for name, value in asdict(options).items() if name not in MAY_CHANGE}


def check_settings_of_state(state: Path, settings: dict, but: Container[str] = ()) -> dict:
    """What a state says of itself; BadData if it is damaged, or of a run with other settings.

    but         names of settings that are not compared
    """
    try:
        with safe_open(state, "pt") as file:
            about = file.metadata()
        saved = json.loads(about["settings"])
    except Exception as error:                                 # damaged files raise anything
        raise BadData(f"{state} is damaged; delete it, and start again") from error
    for name, value in settings.items():
        if name not in but and saved.get(name) != value:
            raise BadData(f"{state} is of a run with {name} = {saved.get(name)}, "
                          f"not {value}; use the same settings, or another --output")
    return about


def cut_log(log: Path, steps: int) -> None:
    """Keep the lines of the first `steps` steps; those after them are trained again."""
    text = log.read_text(encoding="utf-8") if log.exists() else ""
    whole_lines, _, _ = text.rpartition("\n")                  # a full disk leaves half a line
    lines = [line + "\n" for line in whole_lines.splitlines() if json.loads(line)["step"] < steps]
    write_text(log, "".join(lines))


def report_losses(log: Path) -> None:
    """Draw the losses of a log: of every step, their running mean, and the validation's. Say where
    the validation's was least.
    """
    rows = read_jsonl(log)
    losses = np.array([row["loss"] for row in rows])
    validated = {row["step"]: row["val_loss"] for row in rows if "val_loss" in row}
    width = max(1, len(losses) // 50)
    running_mean = np.convolve(losses, np.ones(width) / width, "valid")
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6, 3.5))
    axes.plot(losses, color="#c0c0c0", linewidth=0.8)
    axes.plot(np.arange(width - 1, len(losses)), running_mean, color="#2060a0", label="training")
    if validated:
        axes.plot(validated.keys(), validated.values(), "o-", color="#c04020", label="validation")
        axes.legend()
        least = min(validated, key=validated.get)
        last = max(validated)
        say(f"validation loss: {validated[least]:.3f} after {least + 1} steps, its least; "
            f"{validated[last]:.3f} after {last + 1}")
    axes.set(xlabel="step", ylabel="loss", title=log.stem, yscale="log")
    save_figure(figure, log.with_name(log.name.replace("-log.jsonl", "-loss.png")))
