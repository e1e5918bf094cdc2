"""What any training needs: valid paths of models, the order of examples, the loss in parts, sums
over processes, resumable states, the loss curve.

No section of the paper, and nothing about narrators.
"""
from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from support.common.devices import rank
from support.common.disk import naming, write_tensors, write_text
from support.common.errors import BadData
from support.common.figures import pyplot, save_figure
from support.common.progress import progress


def portable_path(source: str, folder: str | Path | None = None) -> str:
    """The path of a model in a form that stays valid.

    An existing file or folder becomes an absolute path; a folder inside `folder` becomes a path
    relative to it. Anything else is a hub id and stays the same.
    """
    if not Path(source).exists():
        return source
    path = Path(source).resolve()
    if folder:
        folder = Path(folder).resolve()
        if path.is_dir() and path.is_relative_to(folder):
            return str(path.relative_to(folder))
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


def cross_entropy(logits: Callable[[Tensor], Tensor], hidden: Tensor, labels: Tensor,
                  rows: int = 256) -> Tensor:
    """Sum of the cross-entropy over hidden states [R, D_lm] with labels [R].

    `logits` maps hidden states to logits [.., V]. Only the logits of `rows` hidden states are held
    at once, because the backward pass computes them again.
    """
    def loss_of(hidden_rows: Tensor, label_rows: Tensor) -> Tensor:
        return F.cross_entropy(logits(hidden_rows), label_rows, reduction="sum")

    total = 0
    for hidden_rows, label_rows in zip(hidden.split(rows), labels.split(rows)):
        total = total + checkpoint(loss_of, hidden_rows, label_rows, use_reentrant=False)
    return total


# -------------------------------------------------------------------------------- several processes

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
    """Sum gradients over all processes (data parallelism); once a step, after the accumulation.

    A parameter that got no gradient in any process stays without one, as in a single process.
    """
    _, processes = rank()
    if processes == 1:
        return
    gradients = []
    has_gradient = []
    for p in parameters.values():
        gradients.append(torch.zeros_like(p) if p.grad is None else p.grad)
        has_gradient.append(float(p.grad is not None))
    has_gradient = torch.tensor(has_gradient, device=gradients[0].device)

    # all in one tensor: a single all_reduce
    tensors = [gradient.flatten().float() for gradient in gradients]
    tensors.append(has_gradient)
    flat = torch.cat(tensors)
    dist.all_reduce(flat)
    *sums, processes_with_gradient = flat.split([len(tensor) for tensor in tensors])
    for p, gradient, count in zip(parameters.values(), sums, processes_with_gradient.tolist()):
        p.grad = gradient.view_as(p).to(p.dtype) if count else None


# ------------------------------------------------------------------------------- resumable states

def snapshot(path: Path, step: int, generator: Tensor, parameters: dict[str, Tensor],
             optimizer: torch.optim.Optimizer, settings: dict) -> None:
    """Write one file with everything that `restore` needs after `step` steps.

    generator: the state of the random generator after these steps.
    """
    tensors = {"random": generator}
    for name, p in parameters.items():
        tensors[f"{name}|value"] = p.detach()
        for key, tensor in optimizer.state.get(p, {}).items():
            tensors[f"{name}|{key}"] = tensor
    metadata = {"step": str(step), "settings": json.dumps(settings)}
    write_tensors(path, tensors, metadata)


def read_snapshot(path: Path, tensors: bool = True) -> tuple[int, dict, dict[str, Tensor]]:
    """Read a file of `snapshot`: step, settings, and the tensors ({} with tensors=False).

    Raises BadData if the file is damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            names = file.keys() if tensors else []
            contents = {name: file.get_tensor(name) for name in names}
        step = int(metadata["step"])
        settings = json.loads(metadata["settings"])
        return step, settings, contents
    except (SafetensorError, OSError, LookupError, TypeError, ValueError) as error:
        raise BadData(f"{path} is damaged or of another version; "
                      f"delete it, and start again") from error


def unfinished(folder: Path) -> Path | None:
    """The state of a stage that was interrupted, if there is one."""
    for path in folder.glob("*-state.safetensors"):
        step, settings, _ = read_snapshot(path, tensors=False)
        if step < settings["steps"]:
            return path
    return None


@torch.no_grad()
def restore(path: Path, parameters: dict[str, Tensor], optimizer: torch.optim.Optimizer,
            settings: dict) -> int:
    """Load a snapshot; returns the step to continue with.

    Raises BadData if the snapshot belongs to a run with other settings.
    """
    step, saved_settings, tensors = read_snapshot(path)
    for name, value in settings.items():
        if saved_settings.get(name) != value:
            raise BadData(f"{path} is of a run with {name} = {saved_settings.get(name)}, "
                          f"not {value}; use the same settings, or another --output")
    for name, p in parameters.items():
        p.copy_(tensors[f"{name}|value"])
        # Adam has no state for a parameter that never got a gradient
        if f"{name}|step" in tensors:
            optimizer.state[p] = {
                "step": tensors[f"{name}|step"].to(p.device),
                "exp_avg": tensors[f"{name}|exp_avg"].to(p),
                "exp_avg_sq": tensors[f"{name}|exp_avg_sq"].to(p),
            }
    torch.set_rng_state(tensors["random"])
    return step


# ------------------------------------------------------------------------------------- the log

class Run:
    """The steps of one training: resumable, logged, shown, on one process or several.

    A context manager. Iterating gives the numbers of the steps that are left; each must be followed
    by `update` and `after`. Ctrl-C writes the state after the last complete step.

    stage       the name of its files in `folder`: STAGE-state.safetensors, STAGE-log.jsonl,
                STAGE-loss.png
    settings    of the run; a state of other settings is refused
    resume      go on with the state, if there is one
    save_every  steps between two states
    validate    validate(step) gives further entries for the log
    """

    def __init__(self, stage: str, folder: Path, parameters: dict[str, Tensor],
                 optimizer: torch.optim.Optimizer, steps: int, settings: dict, resume: bool,
                 save_every: int, validate: Callable[[int], dict]):
        self.stage = stage
        self.folder = folder
        self.state = folder / f"{stage}-state.safetensors"
        self.log = folder / f"{stage}-log.jsonl"
        self.parameters = parameters
        self.optimizer = optimizer
        self.steps = steps
        weights = sum(p.numel() for p in parameters.values())
        self.settings = settings | {"steps": steps, "weights": weights}
        self.resume = resume
        self.save_every = save_every
        self.validate = validate
        self.is_first_process = rank()[0] == 0

    def __enter__(self) -> Run:
        self.folder.mkdir(parents=True, exist_ok=True)
        start = 0
        if self.resume and self.state.exists():
            start = restore(self.state, self.parameters, self.optimizer, self.settings)
        if self.resume and not self.state.exists() and self.is_first_process:
            print(f"{self.stage}: starts from the beginning, {self.state} is not there",
                  file=sys.stderr)
        cut_log(self.log, start, self.validate)
        steps = range(start, self.steps)
        self.bar = progress(steps, self.stage, self.steps, "step", initial=start, mininterval=1)
        # the steps done, and the random state after them; None in the middle of a step, from where
        # training cannot be resumed
        self.done: tuple[int, Tensor] | None = (start, torch.get_rng_state())
        return self

    def __iter__(self) -> Iterator[int]:
        for step in self.bar:
            self.began = time.perf_counter()
            yield step

    def update(self, step: int) -> None:
        """A step of the optimizer."""
        self.done = None
        self.optimizer.step()
        self.done = (step + 1, torch.get_rng_state())

    def after(self, step: int, loss: float, tokens: float) -> None:
        """Log the step, and save the state if it is time to."""
        speed = round(tokens / (time.perf_counter() - self.began))
        entry = {"step": step, "loss": loss, "tokens_per_s": speed}
        try:
            # an interrupted validation still leaves the step in the log; see `cut_log`
            entry |= self.validate(step)
        finally:
            if self.is_first_process:
                append_log(self.log, entry)
        self.bar.set_postfix(loss=f"{loss:.3f}", tok_s=speed)
        steps_done = step + 1
        if steps_done % self.save_every == 0 or steps_done == self.steps:
            self.save()

    def save(self) -> None:
        if self.is_first_process and self.done is not None:
            snapshot(self.state, *self.done, self.parameters, self.optimizer, self.settings)

    def __exit__(self, kind, error, traceback) -> None:
        if kind is KeyboardInterrupt:
            self.save()
        elif kind is None and self.is_first_process:
            curve(self.log, self.folder / f"{self.stage}-loss.png")


def append_log(log: Path, entry: dict) -> None:
    with naming(log), log.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def cut_log(log: Path, steps: int, validate: Callable[[int], dict]) -> None:
    """Keep the lines of the first `steps` steps in the log.

    If the training was interrupted during the validation after the last of these steps, the
    validation is done now.
    """
    entries = []
    if steps:
        text = log.read_text(encoding="utf-8")
        whole_lines, _, _ = text.rpartition("\n")          # a full disk leaves half a line
        entries = [json.loads(line) for line in whole_lines.splitlines()]
        entries = [entry for entry in entries if entry["step"] < steps]
    # Ctrl-C just after a step leaves no line of it.
    if entries and entries[-1]["step"] == steps - 1 and "val_loss" not in entries[-1]:
        entries[-1] |= validate(steps - 1)
    process, _ = rank()
    if process == 0:
        lines = [json.dumps(entry) + "\n" for entry in entries]
        write_text(log, "".join(lines))


def curve(log: Path, png: Path) -> None:
    """Draw the loss curve of a .jsonl log: every step, and a running mean."""
    plt = pyplot()
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    losses = [entry["loss"] for entry in entries]
    width = max(1, len(losses) // 50)
    running_mean = []
    for end in range(1, len(losses) + 1):
        latest = losses[max(0, end - width):end]
        running_mean.append(sum(latest) / len(latest))
    figure, axes = plt.subplots(figsize=(6, 3.5))
    axes.plot(losses, color="#c0c0c0", linewidth=0.8)
    axes.plot(running_mean, color="#2060a0")
    scale = "log" if any(losses) else "linear"          # zeros alone have no logarithm
    axes.set(xlabel="step", ylabel="loss", title=log.stem, yscale=scale)
    save_figure(figure, png)
