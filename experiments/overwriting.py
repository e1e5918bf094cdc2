"""Does an input-dependent gate help, and when is it learned? (not in the paper: App. B.2's claim)

    python -m experiments.overwriting              trains what has no result yet
    python -m experiments.overwriting --show       tables of the results
    python -m experiments.overwriting --picture    draws assets/overwriting.png

A world that asks for a gate, with the memories alone: no language model, no video. Places show
things one after the other, each for a while, and are then hidden. A frame has a token for each
place: the place, what it shows, and noise. After the last frame, the memory is asked what each
place showed last. One fixed decay has to choose: if it is fast, the last thing has faded when it is
asked for; if it is slow, the thing before weighs as much. A gate can forget where a thing comes in,
and keep what is hidden.

Results are lines of results/overwriting.jsonl, each with its settings and its commit.
"""
import argparse
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baselines.memories import MEMORIES
from clam import CLAM
from experiments.paper import Claim
from experiments.runs import RESULTS, ROOT, add_line, find_result, present_commit
from experiments.show import as_markdown, cell, say_claim
from support.common.errors import command_line
from support.common.figures import pyplot, save_figure
from support.common.intervals import compare_means
from support.common.options import Parser, in_range
from support.common.progress import progress
from support.engine.gates import effect_of_gate, gate_at_mean, has_gate
from support.engine.start import start_memory

FILE = RESULTS / "overwriting.jsonl"
PICTURE = ROOT / "assets" / "overwriting.png"

WIDTH = 32                      # D
THINGS = 8                      # that a place may show; so 1 in 8 can be guessed
SIZE = 0.6 * WIDTH ** 0.5       # of each part of a token: its numbers are then about 1

BATCH = 16                      # fresh videos for every step
TEST = 256                      # videos, the same for all
WARM_UP = 50                    # steps; then the rate is constant, and falls in the last fifth
LEARNED = 0.01                  # mean loss of 50 steps at which a training ends early
EVALUATE_AT = (50, 100, 200, 400, 800, 1200, 1600, 3200)    # and after the last step
LONGEST, LONG, SHORT, TRIAL = 6400, 1600, 800, 400          # steps
RATES = (0.001, 0.003, 0.01)
SEEDS = (0, 1, 2)
TRIAL_SEED = 100                # rates are chosen with this one: other weights, other videos


# ------------------------------------------------------------------------------- the world

class PlacesWorld(NamedTuple):
    """Each place shows `things` in a row, each for 1 to `stay` frames, and is then hidden."""
    things: int = 2
    stay: int = 8
    gap: tuple[int, int] = (8, 16)      # frames for which a place is hidden at the end, at least
    idle: int = 0                       # frames after that in which all places are hidden
    places: int = 4
    heads: int = 4                      # of the memory: its state has D^2 / 2h numbers
    noise: float = 0.05                 # standard deviation, in parts of SIZE

    @property
    def frames(self) -> int:
        return self.things * self.stay + self.gap[1] + self.idle


BASE = PlacesWorld()
# the base world, and what differs from it in one thing
WORLDS = {
    "the base world": BASE,
    "one thing": PlacesWorld(things=1),
    "four things in a row": PlacesWorld(things=4),
    "hidden for 1 to 4 frames": PlacesWorld(gap=(1, 4)),
    "hidden for 16 to 32 frames": PlacesWorld(gap=(16, 32)),
    "32 idle frames": PlacesWorld(idle=32),
    "8 places": PlacesWorld(places=8),
    "8 heads: half of the state": PlacesWorld(heads=8),
    "noise 0.1": PlacesWorld(noise=0.1),
}


def directions(world: PlacesWorld) -> tuple[Tensor, Tensor, Tensor]:
    """Orthogonal parts of tokens, the same in every world: places [P, D], that something is
    visible [D], and what a place can show [1 + THINGS, D], the first: it is hidden.
    """
    generator = torch.Generator().manual_seed(5)
    random = torch.randn(WIDTH, WIDTH, generator=generator)
    basis, _ = torch.linalg.qr(random)
    hidden, visible, *others = SIZE * basis
    things = torch.stack(others[:THINGS])
    places = torch.stack(others[THINGS:THINGS + world.places])
    contents = torch.cat([hidden[None], visible + things])
    return places, visible, contents


def timelines(world: PlacesWorld, videos: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """What each place shows in each frame [B, T, P] (0: it is hidden), and its things in their
    order [B, things, P], 1 to THINGS. No place shows the same thing twice in a row.
    """
    def draw(low: int, high: int, rows: int) -> Tensor:
        size = (videos, rows, world.places)
        return torch.randint(low, high + 1, size, generator=generator)

    first = draw(0, THINGS - 1, 1)
    changes = draw(1, THINGS - 1, world.things - 1)
    things = torch.cat([first, changes], dim=1).cumsum(1)
    things = things % THINGS + 1
    stays = draw(1, world.stay, world.things)
    gap = draw(*world.gap, 1)

    # from the last thing to the first
    frame = torch.arange(world.frames)[:, None]                         # [T, 1]
    shown = torch.zeros(videos, world.frames, world.places, dtype=torch.long)
    end = world.frames - world.idle - gap                               # [B, 1, P]
    for k in reversed(range(world.things)):
        begin = end - stays[:, k:k + 1]
        is_there = (begin <= frame) & (frame < end)                     # [B, T, P]
        shown += is_there * things[:, k:k + 1]
        end = begin
    return shown, things


def tokens_shown(world: PlacesWorld, shown: Tensor, generator: torch.Generator) -> Tensor:
    """x [B, T, P, D]"""
    places, _, contents = directions(world)
    x = places + contents[shown]
    noise = torch.randn(x.shape, generator=generator)
    return x + world.noise * SIZE * noise


def last_shown(shown: Tensor) -> Tensor:
    """What each place showed last, up to each frame [B, T, P]; 0: nothing yet."""
    frame = torch.arange(shown.shape[1])[:, None]
    seen = torch.where(shown > 0, frame, 0)
    last_frame = seen.cummax(1).values                  # frame 0, where nothing was shown yet
    return shown.gather(1, last_frame)


def questions(world: PlacesWorld) -> list[int]:
    """The frames after which trainings ask. Tests ask after the last one alone."""
    return [world.frames * 3 // 4, world.frames]


# ------------------------------------------------------------------------------- the memories

class Arm(NamedTuple):
    memory: str
    start: str                  # authors, mimetic, place
    gate: str = "learned"       # or fixed: learned decays; hand: set by hand, and not trained


ARMS = {}
for start in ("mimetic", "place"):
    ARMS[f"retnet, {start}"] = Arm("retnet", start)
    ARMS[f"fixed, {start}"] = Arm("clam", start, "fixed")
    ARMS[f"scalar, {start}"] = Arm("scalar", start)
    ARMS[f"clam, {start}"] = Arm("clam", start)
    ARMS[f"delta, {start}"] = Arm("delta", start)
    ARMS[f"gateddelta, {start}"] = Arm("gateddelta", start)
ARMS["clam, authors"] = Arm("clam", "authors")
ARMS["clam, by hand"] = Arm("clam", "mimetic", "hand")
SWEPT = ["fixed, place", "scalar, place", "clam, place", "clam, mimetic", "gateddelta, place"]
NOT_YET_FLAT = ["retnet, place", "fixed, place", "scalar, mimetic", "clam, authors"]
PICTURED = ["retnet, place", "fixed, place", "scalar, place", "clam, place", "clam, by hand",
            "gateddelta, place"]
COMPARED = [("clam, place", "retnet, place"), ("clam, place", "fixed, place"),
            ("clam, place", "scalar, place"), ("clam, place", "clam, mimetic"),
            ("delta, place", "clam, place")]
MEMORY_LABELS = {
    "retnet": "RetNet", "fixed": "learned fixed decays", "scalar": "one gate a head",
    "clam": "CLAM", "delta": "delta rule", "gateddelta": "gated delta rule",
}
START_LABELS = {"authors": "the authors' start", "mimetic": "mimetic start",
                "place": "keys by place"}


@torch.no_grad()
def keys_by_place(memory: CLAM, x: Tensor) -> None:
    """After `start_memory`, with the same frames x [T, J, D]: each key channel belongs to one of
    the J tokens of a frame, and is 0 for the average of every other one.
    """
    average = x.mean(0)                                                 # [J, D]
    own = F.normalize(torch.linalg.pinv(average).mT, dim=1)             # own @ average.T: diagonal
    channel = torch.arange(memory.width // 2)
    memory.w_k.weight.copy_(own[channel % len(own)])
    memory.w_q.weight.copy_(memory.w_k.weight)


@torch.no_grad()
def set_by_hand(memory: CLAM, world: PlacesWorld) -> None:
    """Each key channel belongs to a place. Its G is 0.0003 for a token in which that place shows a
    thing, and 0.9997 or more for all others: the thing before is forgotten, what is hidden is kept.
    """
    places, visible, _ = directions(world)
    parts = torch.cat([places, visible[None]]) / SIZE ** 2              # of a token: 1 or 0
    channel = torch.arange(WIDTH // 2)
    place = channel % world.places
    memory.w_k.weight.copy_(SIZE * parts[place])
    memory.w_q.weight.copy_(memory.w_k.weight)
    to_rank, to_gate = memory.w_gate
    to_rank.weight.zero_()
    to_rank.weight[:len(parts)] = parts
    to_gate.weight.zero_()
    to_gate.weight[channel, place] = -16
    to_gate.weight[:, world.places] = -16
    to_gate.bias.fill_(24)                      # 24, with one of the two 8, with both -8


def new_arm(arm: Arm, world: PlacesWorld, generator: torch.Generator) -> CLAM:
    """A memory of M = P tokens with its first weights, made from 32 videos."""
    kind = MEMORIES[arm.memory]
    target = arm.start != "authors"
    memory = kind(WIDTH, world.places, heads=world.heads, target=target, dropout=0.0)
    shown, _ = timelines(world, 32, generator)
    x = tokens_shown(world, shown, generator).flatten(0, 1)
    if arm.start != "authors":
        start_memory(memory, x)
    if arm.start == "place":
        keys_by_place(memory, x)
    if arm.gate == "fixed":                     # logits are the bias alone
        nn.init.zeros_(memory.w_gate[0].weight).requires_grad_(False)
    if arm.gate == "hand":
        set_by_hand(memory, world)
        memory.w_gate.requires_grad_(False)
    return memory


def memory_at(memory: CLAM, x: Tensor, frames: list[int]) -> Tensor:
    """Memory tokens [B, N, M, D] after so many frames of x [B, T, P, D]."""
    state = memory.initial_state(len(x))
    states = []
    absorbed = 0
    for end in frames:
        piece = x[:, absorbed:end]
        state = memory.step(piece.flatten(1, 2), state)
        states.append(state)
        absorbed = end
    return memory.read(torch.stack(states, dim=1))


# ------------------------------------------------------------------------------- one training

class MemoryTraining(NamedTuple):
    arm: str
    world: PlacesWorld
    seed: int
    rate: float
    steps: int

    @property
    def settings(self) -> dict:
        """The fields of a result that tell of which training it is."""
        world = self.world._asdict() | {"gap": list(self.world.gap)}
        return {**self._asdict(), "world": world, "batch": BATCH, "test": TEST}


def train_memory(run: MemoryTraining) -> dict:
    """Train a memory and a linear map from each of its tokens to the thing its place showed last.

    Returns what a result says beside the settings.
    """
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    started = time.process_time()
    world = run.world
    generator = torch.Generator().manual_seed(1000 + run.seed)
    memory = new_arm(ARMS[run.arm], world, generator)
    to_thing = nn.Linear(WIDTH, THINGS)
    parameters = [*memory.parameters(), *to_thing.parameters()]
    learned = [p for p in parameters if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, weight_decay=0.0, fused=True)

    of_test = torch.Generator().manual_seed(1 if run.seed == TRIAL_SEED else 0)
    shown, things = timelines(world, TEST, of_test)
    x = tokens_shown(world, shown, of_test)

    curve = []
    losses = []
    for step in range(1, run.steps + 1):
        steps_left = run.steps + 1 - step
        factor = min(1, step / WARM_UP, 5 * steps_left / run.steps)
        optimizer.param_groups[0]["lr"] = run.rate * factor
        loss = loss_of_answers(memory, to_thing, world, generator)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()

        losses.append(loss.item())
        latest = losses[-50:]
        mean = sum(latest) / len(latest)
        has_learned = step >= 50 and mean < LEARNED
        ends = has_learned or step == run.steps
        if step in EVALUATE_AT or ends:
            said = answers(memory, to_thing, x)
            right = share_of(said == things[:, -1])
            curve.append([step, right, round(mean, 4)])
        if ends:
            break
    measured = measure_memory(memory, to_thing, world, x, things)
    return {"loss": round(mean, 4), "curve": curve, **measured,         # steps, share right, loss
            "seconds": round(time.process_time() - started)}


def loss_of_answers(memory: CLAM, to_thing: nn.Linear, world: PlacesWorld,
                    generator: torch.Generator) -> Tensor:
    """Of fresh videos: all places that are hidden and have shown something are asked for."""
    shown, _ = timelines(world, BATCH, generator)
    x = tokens_shown(world, shown, generator)
    frames = questions(world)
    scores = to_thing(memory_at(memory, x, frames))                  # [B, N, P, THINGS]
    index = torch.tensor(frames) - 1
    last = last_shown(shown)[:, index]
    is_asked = (shown[:, index] == 0) & (last > 0)
    return F.cross_entropy(scores[is_asked], last[is_asked] - 1)


@torch.no_grad()
def answers(memory: CLAM, to_thing: nn.Linear, x: Tensor) -> Tensor:
    """What each place showed last in x [B, T, P, D], as the memory has it after the last frame."""
    frames = x.shape[1]
    memory_tokens = memory_at(memory, x, [frames])[:, 0]                # [B, P, D]
    scores = to_thing(memory_tokens)
    return scores.argmax(-1) + 1                                        # [B, P]


def share_of(is_so: Tensor) -> float:
    return round(is_so.float().mean().item(), 4)


def measure_memory(memory: CLAM, to_thing: nn.Linear, world: PlacesWorld, x: Tensor,
                   things: Tensor) -> dict:
    """How often a memory is right in the test videos, and says the thing before; with a gate, also
    how often it is right if the gate is fixed at its mean."""
    said = answers(memory, to_thing, x)
    is_right = said == things[:, -1]
    measured = {
        "right": share_of(is_right),
        "videos": is_right.sum(1).tolist(),                             # right answers in each
    }
    if world.things > 1:
        measured["before"] = share_of(said == things[:, -2])
    if has_gate(memory):
        few = x[:64].flatten(1, 2)
        read_at = world.places * torch.tensor(questions(world))
        read_at = read_at.expand(len(few), -1)
        measured["effect_of_gate"] = round(effect_of_gate(memory, few, read_at), 4)
        with gate_at_mean(memory, few):
            of_mean = answers(memory, to_thing, x)
        measured["right_at_mean"] = share_of(of_mean == things[:, -1])
    return measured


# ------------------------------------------------------------------------------- theory

@cache
def best_fixed_decay(world: PlacesWorld) -> tuple[float, float]:
    """The share of right answers that one fixed decay reaches at best, and that decay q a frame.

    Keys of places and values of things are orthogonal, so for a place the state holds of thing v

        w_v + noise,   w_v = sum of q^age over the frames that showed v,   age in frames

    where the noise is normal, its variance noise^2 sum_t q^2t. The thing that weighs most is
    answered. The probability that it is the last one is integrated over its noise; it is the mean
    over drawn timelines, for the best q. (Several decays, and read-outs that compare them, can do
    more.)
    """
    one_place = world._replace(places=1)                                # all are alike
    shown, things = timelines(one_place, 5000, torch.Generator().manual_seed(0))
    shown = shown.squeeze(2)                                            # [B, T]
    last = things[:, -1] - 1                                            # [B, 1]
    shows = F.one_hot(shown, THINGS + 1).float()
    shows = shows[..., 1:]                                              # [B, T, THINGS]
    is_last = F.one_hot(last.squeeze(1), THINGS).bool()                 # [B, THINGS]
    age = torch.arange(world.frames).flip(0)
    z = torch.linspace(-4, 4, 33)                                       # of the last thing's noise
    density = (-z.square() / 2).exp()
    density = density / density.sum()
    best = (0.0, 0.0)
    for log_q in -torch.logspace(-3.5, 0, 49):
        decay = (log_q * age).exp()                                     # [T]
        weights = torch.einsum("b t v, t -> b v", shows, decay)
        deviation = world.noise * decay.square().sum().sqrt()
        ahead = weights.gather(1, last) - weights                       # [B, THINGS]
        ahead = ahead / deviation
        is_below = torch.special.ndtr(ahead[..., None] + z)             # [B, THINGS, z]
        is_below = is_below.masked_fill(is_last[..., None], 1)
        all_below = is_below.prod(1)                                    # [B, z]
        right = (all_below @ density).mean().item()
        best = max(best, (right, log_q.exp().item()))
    return best


# ------------------------------------------------------------------------------- all trainings

def trials() -> list[MemoryTraining]:
    return [MemoryTraining(arm, BASE, TRIAL_SEED, rate, TRIAL) for arm in ARMS for rate in RATES]


def result_of(run: MemoryTraining) -> dict | None:
    return find_result(FILE, run.settings)


def chosen_rate(arm: str) -> float | None:
    """Of the trial that learned first, or else ended with the lowest loss. None if one is missing.
    """
    found = {}
    for run in trials():
        if run.arm == arm:
            result = result_of(run)
            if result is None:
                return None
            steps, _, _ = result["curve"][-1]
            found[run.rate] = (steps, result["loss"])
    return min(found, key=found.get)


def run_of(arm: str, world: PlacesWorld, seed: int, steps: int) -> MemoryTraining:
    return MemoryTraining(arm, world, seed, chosen_rate(arm), steps)


def all_runs() -> list[MemoryTraining]:
    """Long trainings of all arms in the base world, short ones of some arms in all worlds, and the
    longest of some that long ones have not ended. Rates must have been chosen."""
    runs = [run_of(arm, BASE, seed, LONG) for seed in SEEDS for arm in ARMS]
    for seed in SEEDS:
        for world in WORLDS.values():
            runs += [run_of(arm, world, seed, SHORT) for arm in SWEPT]
    runs += [run_of(arm, BASE, seed, LONGEST) for seed in SEEDS for arm in NOT_YET_FLAT]
    return runs


def complete(runs: Iterable[MemoryTraining], jobs: int = 1) -> None:
    """Carry out the runs that have no result, in their order, so many at once."""
    missing = [run for run in runs if result_of(run) is None]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        run_of_job = {pool.submit(train_memory, run): run for run in missing}
        for job in progress(as_completed(run_of_job), total=len(missing), unit="training"):
            commit = {"commit": present_commit()}
            add_line(FILE, run_of_job[job].settings | commit | job.result())


# ------------------------------------------------------------------------------- what is shown

def results_of_arm(arm: str, world: PlacesWorld, steps: int) -> list[dict]:
    """The results that are there, of all seeds."""
    runs = [run_of(arm, world, seed, steps) for seed in SEEDS]
    results = [result_of(run) for run in runs]
    return [result for result in results if result is not None]


def kept_numbers(results: list[dict], field: str) -> list[float]:
    return [result[field] for result in results if result.get(field) is not None]


def steps_to_learn(results: list[dict]) -> str:
    """The first evaluation at which all trainings are right in nine of ten. - if one never is."""
    first = []
    for result in results:
        learned = [steps for steps, right, _ in result["curve"] if right >= 0.9]
        if not learned:
            return "-"
        first.append(learned[0])
    return str(max(first, default="-"))


def label_of_arm(name: str) -> str:
    arm = ARMS[name]
    memory = "fixed" if arm.gate == "fixed" else arm.memory
    label = f"{MEMORY_LABELS[memory]}, {START_LABELS[arm.start]}"
    return "CLAM, keys and gate set by hand" if arm.gate == "hand" else label


def table_of_arms() -> str:
    """All arms in the base world, after long trainings."""
    headers = ["overwriting. Each place shows two things, one after the other (not in the paper)",
               "right", "says the thing before", "right, G at its mean", "steps to .9",
               f"right after {LONGEST} steps", "seeds"]
    rows = []
    for arm in ARMS:
        results = results_of_arm(arm, BASE, LONG)
        numbers = [cell(kept_numbers(results, field))
                   for field in ("right", "before", "right_at_mean")]
        longest = cell(kept_numbers(results_of_arm(arm, BASE, LONGEST), "right"))
        rows.append([label_of_arm(arm), *numbers, steps_to_learn(results), longest,
                     str(len(results))])
    share, decay = best_fixed_decay(BASE)
    theory = f"*theory: the best single decay, {decay:.2f} a frame*"
    rows.append([theory, f"{share:.3f}", *"-----"])
    return as_markdown(headers, rows)


def table_of_worlds() -> str:
    """Some arms in all worlds, after short trainings."""
    headers = [f"right after {SHORT} steps", *map(label_of_arm, SWEPT),
               "*theory: the best single decay*", "seeds"]
    rows = []
    for name, world in WORLDS.items():
        results = [results_of_arm(arm, world, SHORT) for arm in SWEPT]
        numbers = [cell(kept_numbers(of_arm, "right")) for of_arm in results]
        share, _ = best_fixed_decay(world)
        rows.append([name, *numbers, f"{share:.3f}", str(min(map(len, results)))])
    return as_markdown(headers, rows)


def differences() -> list[str]:
    """Differences of two arms after long trainings, as items of a list."""
    lines = []
    for first, second in COMPARED:
        of_arms = []
        for arm in (first, second):
            shares = []
            for result in results_of_arm(arm, BASE, LONG):
                shares.append({str(video): right / BASE.places
                               for video, right in enumerate(result["videos"])})
            of_arms.append(shares)
        interval = compare_means(*of_arms)
        if interval:
            claim = Claim(label_of_arm(first), label_of_arm(second), "right")
            lines.append(say_claim(claim, interval))
    return lines


def table_of_overwriting() -> str:
    """What the page shows."""
    parts = [table_of_arms(), "\n".join(differences()), table_of_worlds()]
    return "\n\n".join(part for part in parts if part)


def draw_overwriting(png: str | Path) -> None:
    """Left: the share of right answers over steps. Right: for how long things have been hidden."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    worlds = [world for world in WORLDS.values() if world._replace(gap=BASE.gap) == BASE]
    worlds.sort()
    colours = dict(zip(PICTURED, plt.cm.tab10.colors))
    for arm, colour in colours.items():
        results = results_of_arm(arm, BASE, LONGEST) or results_of_arm(arm, BASE, LONG)
        for result in results:
            steps, shares, _ = zip(*result["curve"])
            # who has learned ends early
            left.plot([*steps, LONGEST], [*shares, shares[-1]], color=colour, alpha=0.8)

        points = []
        for world in worlds:
            numbers = kept_numbers(results_of_arm(arm, world, SHORT), "right")
            if numbers:
                points.append((sum(world.gap) / 2, sum(numbers) / len(numbers)))
        left.plot([], [], color=colour, label=label_of_arm(arm))
        if points:
            right.plot(*zip(*points), "o-", color=colour)
    theory = [(sum(world.gap) / 2, best_fixed_decay(world)[0]) for world in worlds]
    right.plot(*zip(*theory), "k--")
    left.axhline(best_fixed_decay(BASE)[0], color="black", linestyle="--",
                 label="theory: the best single decay")
    left.set(xscale="log", xlim=(EVALUATE_AT[0], LONGEST), xlabel="steps (each line a seed)",
             ylabel="right", ylim=(0, 1.02))
    right.set(xscale="log", xlabel=f"frames for which a thing has been hidden ({SHORT} steps)")
    for axes in (left, right):
        axes.axhline(1 / THINGS, color="grey", linestyle=":")           # guessing
    left.legend(fontsize=8, loc="lower right")
    save_figure(figure, png)


# ------------------------------------------------------------------------------- the command

def run_overwriting(args: argparse.Namespace) -> None:
    if args.picture:
        draw_overwriting(args.picture)
        return
    if not args.show:
        complete(trials(), args.jobs)
        complete(all_runs(), args.jobs)
    print(table_of_overwriting())


def main():
    parser = Parser(prog="python -m experiments.overwriting",
                    description="Does an input-dependent gate help, and when is it learned?")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--show", action="store_true", help="show what is there; train nothing")
    what.add_argument("--picture", nargs="?", const=PICTURE, metavar="FILE",
                      help="draw what is there (default: assets/overwriting.png)")
    parser.add_argument("--jobs", type=in_range(int, 1, 64, "a number from 1 to 64"), default=1,
                        metavar="N", help="trainings at once (default: 1)")
    args = parser.parse_args()
    command_line(lambda: run_overwriting(args))


if __name__ == "__main__":
    main()
