"""What any training needs: paths of models that stay valid, the order of examples, the loss in parts, sums over
processes, resumable states, the loss curve.

No section of the paper, and nothing about narrators.
"""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from support.common import LARGEST, BadData, pyplot, rank, save_figure, write_tensors, write_text


def located(source: str, folder: str | Path | None = None) -> str:
    """A file or folder as an absolute path (relative if it is a folder inside `folder`); a hub id as it is."""
    if not Path(source).exists():
        return source
    path, folder = Path(source).resolve(), Path(folder).resolve() if folder else None
    return str(path.relative_to(folder) if folder and path.is_dir() and path.is_relative_to(folder) else path)


def order(count: int, batch: int, step: int, seed: int) -> list[int]:
    """Which examples a step sees: each epoch in a new random order, a function of seed and step alone."""
    chosen = []
    for position in range(step * batch, (step + 1) * batch):
        epoch, index = divmod(position, count)
        permutation = torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
        chosen.append(int(permutation[index]))
    return chosen


def random_restarts(share: float, chance: Random) -> range:
    """The frames before which a video's segments are restarted (narrator.py: Layout): in this share of the videos, one
    in 4 to 60, all through the video; in the others, none."""
    gap = chance.randint(4, 60) if share and chance.random() < share else LARGEST
    return range(gap, LARGEST, gap)


def cross_entropy(logits: Callable[[Tensor], Tensor], hidden: Tensor, labels: Tensor, rows: int = 256) -> Tensor:
    """Sum over hidden states [R, D_lm] with labels [R]; `logits` makes [.., V] of the former.

    Only the logits of so many rows are held at once: the backward pass computes them again.
    """
    part = lambda hidden, labels: F.cross_entropy(logits(hidden), labels, reduction="sum")
    return sum(checkpoint(part, *piece, use_reentrant=False) for piece in zip(hidden.split(rows), labels.split(rows)))


def summed(*numbers: float) -> list[float]:
    """Each number, summed over all processes."""
    if rank()[1] == 1:
        return list(numbers)
    total = torch.tensor(numbers, dtype=torch.float32, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(total)
    return total.tolist()


def sum_gradients(parameters: dict[str, Tensor]) -> None:
    """Sum gradients over all processes (data parallelism; once a step, after the accumulation).

    A parameter that got no gradient in any process stays without one, as it does in a single process.
    """
    if rank()[1] == 1:
        return
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters.values()]
    reached = torch.tensor([float(p.grad is not None) for p in parameters.values()], device=gradients[0].device)
    flat = torch.cat([g.flatten().float() for g in gradients] + [reached])
    dist.all_reduce(flat)
    *pieces, reached = flat.split([g.numel() for g in gradients] + [len(reached)])
    for p, piece, processes in zip(parameters.values(), pieces, reached.tolist()):
        p.grad = piece.view_as(p).to(p.dtype) if processes else None


def snapshot(path: Path, step: int, generator: Tensor, parameters: dict[str, Tensor], optimizer: torch.optim.Optimizer,
             settings: dict) -> None:
    """All that `restore` needs after `step` steps (`generator`: the random state then), in one file."""
    tensors = {"random": generator}
    for name, p in parameters.items():
        tensors |= {f"{name}|value": p.detach()} | {f"{name}|{key}": t for key, t in optimizer.state.get(p, {}).items()}
    write_tensors(path, tensors, {"step": str(step), "settings": json.dumps(settings)})


def read_snapshot(path: Path, tensors: bool = True) -> tuple[int, dict, dict[str, Tensor]]:
    """What `snapshot` wrote: step, settings, and the tensors if they are wanted. BadData if it is damaged."""
    try:
        with safe_open(path, "pt") as file:
            about, found = file.metadata(), {key: file.get_tensor(key) for key in file.keys() if tensors}
        return int(about["step"]), json.loads(about["settings"]), found
    except (SafetensorError, OSError, LookupError, TypeError, ValueError) as error:
        raise BadData(f"{path} is damaged or of another version; delete it, and start again") from error


def unfinished(folder: Path) -> Path | None:
    """The state of a stage that was interrupted, if there is one."""
    for path in folder.glob("*-state.safetensors"):
        step, settings, _ = read_snapshot(path, tensors=False)
        if step < settings["steps"]:
            return path


@torch.no_grad()
def restore(path: Path, parameters: dict[str, Tensor], optimizer: torch.optim.Optimizer, settings: dict) -> int:
    """Load a snapshot; returns the step to continue with. BadData if it is of a run with other settings."""
    step, there, tensors = read_snapshot(path)
    for name, value in settings.items():
        if there.get(name) != value:
            raise BadData(f"{path} is of a run with {name} = {there.get(name)}, not {value}; use the same settings, or "
                          f"another --output")
    for name, p in parameters.items():
        p.copy_(tensors[f"{name}|value"])
        if f"{name}|step" in tensors:                                # Adam counts the steps of each parameter
            optimizer.state[p] = {"step": tensors[f"{name}|step"].to(p.device)} | {
                key: tensors[f"{name}|{key}"].to(p) for key in ("exp_avg", "exp_avg_sq")}
    torch.set_rng_state(tensors["random"])
    return step


def append_log(log: Path, entry: dict) -> None:
    with log.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def cut_log(log: Path, steps: int, validate: Callable[[int], dict]) -> None:
    """Leave the first `steps` lines. If the last of these steps was interrupted while it was validated, this is done
    now."""
    kept = [json.loads(line) for line in log.read_text().splitlines()[:steps]] if steps else []
    if kept and "val_loss" not in kept[-1]:
        kept[-1] |= validate(steps - 1)
    if rank()[0] == 0:
        write_text(log, "".join(json.dumps(entry) + "\n" for entry in kept))


def curve(log: Path, png: Path) -> None:
    """The loss curve of a .jsonl log as a picture: every step, and a running mean."""
    plt = pyplot()
    losses = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
    width = max(1, len(losses) // 50)
    smooth = [sum(losses[max(0, i - width + 1):i + 1]) / min(i + 1, width) for i in range(len(losses))]
    figure, axes = plt.subplots(figsize=(6, 3.5))
    axes.plot(losses, color="#c0c0c0", linewidth=0.8)
    axes.plot(smooth, color="#2060a0")
    axes.set(xlabel="step", ylabel="loss", title=log.stem, yscale="log" if any(losses) else "linear")
    save_figure(figure, png)
