"""What any training needs: the order of examples, several processes, states
from which it goes on, the log and the loss curve.

No section of the paper, and nothing about narrators.
"""
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, fields
from math import isfinite, nan
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from support.common.devices import is_alone, is_first
from support.common.disk import read_jsonl, write_tensors, write_text
from support.common.errors import BadData, uninterrupted
from support.common.figures import pyplot, save_figure
from support.common.iterate import next_one_ready
from support.common.marks import (
    digest_of_features, digest_of_file, digest_of_samples, refuse_if_changed,
)
from support.common.processes import (
    Different, KnownToAll, all_go_on, check_equal, gathered, my_share, sum_tensors, summed,
    tell_others, tensor_from_first, together,
)
from support.common.progress import progress, say, say_as_one
from beyond.training.options import RunOptions


def recompute_activations(llm: nn.Module) -> None:
    """The backward pass computes the activations of layers anew: less memory, more time."""
    # up to transformers 5.17 it has the second name
    enable = getattr(llm, "activation_checkpointing_enable", llm.gradient_checkpointing_enable)
    enable({"use_reentrant": False})


# ------------------------------------------------------------------ several processes

def begin_together(narrator: nn.Module, samples: Sequence, held_out: Sequence,
                   options: RunOptions) -> None:
    """All processes get the first one's trainable weights. Different if something else that they
    must have in common is not the same: settings (with the marks of frozen models), videos, kind of
    device.
    """
    options.identity = identity_of_training(narrator, options) | {
        "the training videos": digest_of_samples(samples),
        "the features": digest_of_features(samples, finite=True),
    }
    if is_alone():
        return
    check_equal(options.identity | {
        "the validation videos": digest_of_samples(held_out),
        "the features for validation": digest_of_features(held_out),
        "--device": narrator.llm.device.type,
    })
    weights_from_first(narrator.trainable())


def identity_of_training(narrator: nn.Module, options: RunOptions) -> dict:
    """What a training is made of, but for its videos: it must be the same in all processes and when
    it is resumed, wherever it lies.
    """
    same = {"--dtype": str(narrator.llm.dtype)}
    for name, value in asdict(narrator.config).items():
        if name not in narrator.config.MODEL_NAMES:
            same[f"the narrator's {name}"] = value
    if options.init:
        same["--init"] = narrator.mark
    if options.look:
        same["--look"] = digest_of_file(options.look)
    return same


def weights_from_first(parameters: dict[str, Tensor]) -> None:
    """All processes get the first one's weights: GPUs of several kinds round differently."""
    for weight in parameters.values():
        tensor_from_first(weight)


# ------------------------------------------------------------------ one training

class Run(AbstractContextManager):
    """What a training needs that is not the paper's: several processes, states, the log.

        with Run("narrator", options) as run:
            for step in run.steps(parameters, optimizer, number):
                ...
                loss = run.sum(backward(step))
                run.clip(largest)
                optimizer.step()
                run.done(loss)

    Whatever ends it between two steps of the optimizer, the state is written: Ctrl-C, a damaged
    file, an error in another process.

    stage       the name of its files in the folder --output: STAGE-state.safetensors,
                STAGE-log.jsonl, STAGE-loss.png
    validate    gives the loss on held-out videos, every `every` steps and after the last one
    """

    def __init__(
        self,
        stage: str,
        options: RunOptions,
        validate: Callable[[], float] | None = None,
        every: int = 1,
    ):
        self.stage = stage
        self.options = options
        self.validate = validate
        self.every = every
        folder = Path(options.output)
        self.state = folder / f"{stage}-state.safetensors"
        self.log = folder / f"{stage}-log.jsonl"
        # The steps that are done; None from `clip` to `done`: from within a step of the optimizer no
        # training can go on.
        self.steps_done: int | None = 0
        self.loss = nan                                        # of the last of them
        self.saved = 0

    def steps(
        self,
        parameters: dict[str, Tensor],
        optimizer: torch.optim.Optimizer,
        number: int,
    ) -> Iterator[int]:
        """The numbers of the steps that are left, with a progress bar."""
        self.parameters = parameters
        self.optimizer = optimizer
        self.number_of_steps = number
        self.settings = {f.name: getattr(self.options, f.name) for f in fields(self.options)
                         if f.metadata.get("compared")}
        self.settings |= self.options.identity | {"steps": number}
        for p in parameters.values():
            p.grad = torch.zeros_like(p)                       # all processes have some to sum
        self.go_on_from_state()
        if is_first():
            self.log.parent.mkdir(parents=True, exist_ok=True)
            cut_log(self.log, self.steps_done - 1)
        left = range(self.steps_done, number)
        self.bar = progress(left, self.stage, number, "step",
                            initial=self.steps_done, mininterval=1)
        if self.saved:              # what came before may have ended within the last step's `done`
            self.step = self.saved - 1
            self.done(self.loss)
        for self.step in self.bar:
            yield self.step

    def share(self, videos: Sequence[Callable]) -> Iterator:
        """This process's part of what the functions of a step read, each video with random numbers
        of its own (dropout), the same ones with any number of processes.
        """
        numbers = my_share(range(self.step * len(videos), (self.step + 1) * len(videos)))
        for number, video in zip(numbers, next_one_ready(my_share(videos))):
            torch.manual_seed(self.options.seed * 1_000_003 + number)
            yield video

    def sum(self, loss: float) -> float:
        """The loss of a step and its gradients, summed over all processes."""
        all_go_on()
        total, = summed(loss)
        sum_tensors([p.grad for p in self.parameters.values()])
        return total

    def clip(self, largest: float) -> None:
        """Scale the gradients, so that the norm of all of them is at most `largest`."""
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), largest)
        if not norm.isfinite():
            raise KnownToAll(f"{self.stage}: the gradient is not finite at step {self.step}: are "
                             f"features or weights damaged (NaN)? If they are not, lower --lr")
        self.steps_done = None                                 # the optimizer's step comes next

    def done(self, loss: float) -> None:
        """Validate and save the state, if it is time to, and log the step."""
        self.steps_done = self.step + 1
        self.loss = loss
        self.random = torch.get_rng_state()                    # for the steps that are left
        entry = {"step": self.step, "loss": loss}
        if self.is_time(self.every):
            entry |= self.validated()
        together(self.write, entry)
        self.bar.set_postfix(loss=f"{loss:.3f}", refresh=False)

    def is_time(self, every: int) -> bool:
        """For what is done every so many steps, and after the last one."""
        return self.steps_done == self.number_of_steps or self.steps_done % every == 0

    def validated(self) -> dict:
        """What the validation adds to the log."""
        all_go_on()
        weights_from_first(self.parameters)
        if self.validate is None:
            return {}
        loss = self.validate()
        if not isfinite(loss):
            say_as_one("the loss on held-out videos is not finite; look at their features")
            return {}
        return {"val_loss": loss}

    def write(self, entry: dict) -> None:
        """Log a step, and save the state if it is time to."""
        if not is_first():
            return
        with self.log.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        if self.is_time(self.options.save_every):
            self.save_state()

    def __exit__(self, kind, error, traceback) -> None:
        tell_others(error)
        if not is_first() or kind is Different:
            return
        if kind is None:
            report_losses(self.log)
            return
        with uninterrupted():
            if self.steps_done and self.steps_done != self.saved:
                self.save_state()
            if self.saved:
                say(f"{self.stage}: {self.saved} of {self.number_of_steps} steps are saved; the "
                    f"same command with --resume goes on from there")

    def save_state(self) -> None:
        """Write one file with everything that `read_state` needs."""
        tensors = {"random": self.random}
        for name, p in self.parameters.items():
            tensors[f"{name}|value"] = p
            for key, tensor in self.optimizer.state[p].items():
                tensors[f"{name}|{key}"] = tensor
        about = {"step": str(self.steps_done), "loss": str(self.loss),
                 "settings": json.dumps(self.settings)}
        with uninterrupted():
            write_tensors(self.state, tensors, about)
        self.saved = self.steps_done

    def go_on_from_state(self) -> None:
        """With --resume: from the state that the first process has, if there is one."""
        all_go_on()
        check_equal(self.settings | {"resume": self.options.resume})
        if not self.options.resume:
            return
        self.saved, *others = gathered(together(self.steps_in_folder))
        for process, steps in enumerate(others, 1):
            if steps > self.saved:
                raise Different(f"{self.state}: process {process} has a state of {steps} steps, "
                                f"and process 0 one of {self.saved}: process 0 alone reads and "
                                f"writes states; copy the folder to its machine")
        if self.saved:
            self.read_state()

    def steps_in_folder(self) -> int:
        """The steps of the state that this process finds; 0 without one. BadData if it is damaged,
        or of a run with other settings.
        """
        if not self.state.exists():
            return 0
        try:
            with safe_open(self.state, "pt") as file:
                about = file.metadata()
            settings = json.loads(about["settings"])
            self.loss = float(about["loss"])
        except Exception as error:                             # damaged files raise anything
            raise BadData(f"{self.state} is damaged, or of an earlier version of this program; "
                          f"delete it, and start again") from error
        refuse_if_changed(f"{self.state}, a run that was interrupted,", settings, self.settings,
                          "use the same settings, or another --output")
        return int(about["step"])

    @torch.no_grad()
    def read_state(self) -> None:
        """Continue with the state, which the first process reads for all."""
        self.steps_done = self.saved
        tensors = together(load_file, self.state) if is_first() else together(dict)
        for name, p in self.parameters.items():
            state = self.optimizer.state[p]
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros_like(p)
            state["step"] = torch.zeros((), device=p.device)   # fused AdamW has it on the device
            for key, tensor in {"value": p, **state}.items():
                if tensors:
                    tensor.copy_(tensors[f"{name}|{key}"])
                tensor_from_first(tensor)
        if tensors:
            torch.set_rng_state(tensors["random"])


# ------------------------------------------------------------------ what is written

def cut_log(log: Path, steps: int) -> None:
    """Keep the lines of the first `steps` steps; those after them are trained again. Lines that are
    damaged, as a full disk or a loss of power leaves them, are left out.
    """
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    kept = ""
    for line in text.splitlines():
        with suppress(ValueError):                             # half a line, or none
            if json.loads(line)["step"] < steps:
                kept += line + "\n"
    write_text(log, kept)


def report_losses(log: Path) -> None:
    """Draw the losses of a log: of every step, and the validation's. Say where the validation's was
    least.
    """
    rows = read_jsonl(log)
    losses = [row["loss"] for row in rows]
    validated = {row["step"]: row["val_loss"] for row in rows if "val_loss" in row}
    figure, axes = pyplot().subplots(figsize=(6, 3.5))
    axes.plot(losses, ".", markersize=2, label="training")
    if validated:
        axes.plot(validated.keys(), validated.values(), "o-", label="validation")
        axes.legend()
        least = min(validated, key=validated.get)
        last = max(validated)
        say(f"validation loss: {validated[least]:.3f} after {least + 1} steps, its least; "
            f"{validated[last]:.3f} after {last + 1}")
    axes.set(xlabel="step", ylabel="loss", title=log.stem, yscale="log")
    picture = log.name.replace("-log.jsonl", "-loss.png")
    save_figure(figure, log.with_name(picture))
