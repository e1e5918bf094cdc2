"""Memories alone in kitchens that overwrite: the parts of the delta rule, one after the other.

    python -m experiments.alone encode 0 12900 --cache KITCHENS             in files of 100 kitchens
    python -m experiments.alone train "+ write strength" --seed 0 --cache KITCHENS --state FOLDER

The tokens of whole kitchens as the encoder gives them (world "overwriting"), and no language model:
a linear map of each memory token says what its place showed last, where that is hidden. The first
100 kitchens are the test, of whose memory words shares are measured as in the table "kitchen": where
nothing was before ("once"), and of what took a place ("replaced"). A training takes the others in
their order, each once as long as they last. A training that is stopped goes on.
"""
import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments import paper
from experiments.ablation import ARMS, new_memory
from experiments.runs import RESULTS, add_line, present_commit
from narrator import VisionEncoder
from support.common.errors import BadData
from support.files.features import encode_pictures
from toy import world
from toy.stages import last_seen

FILE = RESULTS / "alone.jsonl"
TEST = 100                      # kitchens
FRAMES = [16, 24, 32, 40, 48, 56]       # after which a training asks
BATCH = 8
WARM_UP = 50                    # steps; in the last fifth the rate falls
LOOK_AT = (200, 400, 800, 1200, 1600, 2400, 3200, 4800)


def kitchens_between(begin: int, end: int) -> list[world.Kitchen]:
    all_of_them = world.kitchens("train", end, world.WORLDS["overwriting"])
    return [kitchen for n, kitchen in enumerate(all_of_them) if n >= begin]


def encode_kitchens(begin: int, end: int, cache: Path) -> None:
    """Tokens [T, J, D] in half precision, and labels [T, 9, 2]."""
    torch.set_num_threads(1)
    vision = VisionEncoder(paper.VISION, 3)
    for first in range(begin, end, 100):
        file = cache / f"{first}.pt"
        if file.exists():
            continue
        part = []
        for kitchen in kitchens_between(first, first + 100):
            frames = len(kitchen) if first < TEST else min(len(kitchen), FRAMES[-1])
            pictures = map(kitchen.render, range(frames))
            with torch.no_grad():
                x = torch.stack(list(encode_pictures(pictures, vision, 64))).half()
            part.append((x, torch.from_numpy(kitchen.labels()[:frames, :, :2]).long()))
        torch.save(part, file.with_suffix(".tmp"))
        file.with_suffix(".tmp").rename(file)
        print(first, round(time.process_time()), flush=True)


def memory_tokens(memory: nn.Module, x: Tensor, frames: list[int]) -> Tensor:
    """Memory tokens [B, N, M, D] after so many frames of x [B, T, J, D]."""
    state = memory.initial_state(len(x))
    states = []
    absorbed = 0
    for end in frames:
        state = memory.step(x[:, absorbed:end].flatten(1, 2), state)
        states.append(state)
        absorbed = end
    return memory.read(torch.stack(states, dim=1))


@torch.no_grad()
def words_said(memory: nn.Module, head: nn.Module, tests: list) -> dict[str, list]:
    """Of each test kitchen, the memory words that are said: [right, all] where nothing was before,
    and where another thing was; and of that thing's words."""
    said = {"once": [], "replaced": [], "before": []}
    for kitchen, x in tests:
        right = {name: [0, 0] for name in said}
        asked = [i for i, a in enumerate(kitchen.narrations) if a.memory_words]
        ends = sorted({kitchen.narrations[i - 1].frame + 1 for i in asked})
        if asked:
            scores = head(memory_tokens(memory, x.float()[None], ends)[0])          # [N, 10, 14]
        for i in asked:
            narration = kitchen.narrations[i]
            words = narration.text.rstrip(".").split()
            place = next(p for p, name in enumerate(kitchen.world.places) if name in words)
            score = scores[ends.index(kitchen.narrations[i - 1].frame + 1), 1 + place]
            thing = kitchen.world.words(int(score[1:7].argmax()) + 1, int(score[8:].argmax()) + 1)
            others = [word for word in narration.before if word not in narration.memory_words]
            for name, asked_for in [("replaced" if narration.before else "once",
                                     narration.memory_words), ("before", others)]:
                right[name][0] += sum(word in thing for word in asked_for)
                right[name][1] += len(asked_for)
        for name in said:
            said[name].append(right[name])
    return said


def shares_said(said: dict[str, list]) -> dict[str, float]:
    return {f"words_{name}": round(sum(right for right, _ in of) / sum(all_ for _, all_ in of), 4)
            for name, of in said.items()}


def train_alone(args: argparse.Namespace, commit: str) -> None:
    torch.set_num_threads(1)
    files = sorted(args.cache.glob("*.pt"), key=lambda file: int(file.stem))
    tests = [(kitchen, x) for kitchen, (x, _) in zip(kitchens_between(0, TEST), torch.load(files[0]))]
    # videos of fewer frames are not trained on
    videos = []
    for file in files[1:]:
        if len(videos) < args.videos:
            videos += [(x, labels.byte()) for x, labels in torch.load(file) if len(x) == FRAMES[-1]]
    videos = videos[:args.videos]
    name = f"{args.arm}, {args.rate}, {args.steps}, {args.seed}"
    state_file = args.state / f"{name}.pt"

    torch.manual_seed(args.seed)
    memory = new_memory(args.arm, torch.cat([x for x, _ in videos[:64]]).float(), tokens=10)
    head = nn.Linear(128, 14)                   # scores of types, and of colours; 0 is none
    learned = [*memory.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(learned, weight_decay=0.0)
    losses, looks, done, seconds = [], [], 0, 0.0
    if state_file.exists():
        kept = torch.load(state_file, weights_only=False)
        if kept["commit"] != commit or kept["videos"] != len(videos):
            raise BadData(f"{state_file} is of another commit, or of other videos")
        memory.load_state_dict(kept["memory"])
        head.load_state_dict(kept["head"])
        optimizer.load_state_dict(kept["optimizer"])
        losses, looks, done, seconds = kept["losses"], kept["looks"], kept["done"], kept["seconds"]

    generator = torch.Generator()
    at = torch.tensor(FRAMES) - 1
    started = time.process_time()
    for step in range(done + 1, args.steps + 1):
        optimizer.param_groups[0]["lr"] = args.rate * min(
            1, step / WARM_UP, 5 * (args.steps + 1 - step) / args.steps)
        # step by step through one order a pass; each pass and each seed has an order of its own
        batch = []
        for number in range((step - 1) * BATCH, step * BATCH):
            of_pass, index = divmod(number, len(videos))
            generator.manual_seed(1000 * args.seed + of_pass)
            order = torch.randperm(len(videos), generator=generator)
            batch.append(videos[order[index]])
        x = torch.stack([x for x, _ in batch]).float()
        labels = [labels.long() for _, labels in batch]
        last = torch.stack([last_seen(of_video)[at] for of_video in labels])    # [B, N, 9, 2]
        now = torch.stack([of_video[at] for of_video in labels])
        scores = head(memory_tokens(memory, x, FRAMES)[:, :, 1:])                   # [B, N, 9, 14]
        is_asked = (now[..., 0] == 0) & (last[..., 0] > 0)
        scores, last = scores[is_asked], last[is_asked]
        loss = (F.cross_entropy(scores[:, :7], last[:, 0])
                + F.cross_entropy(scores[:, 7:], last[:, 1]))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        losses.append(round(loss.item(), 4))
        if step in LOOK_AT:
            looks.append({"step": step, "loss": sum(losses[-25:]) / 25}
                         | shares_said(words_said(memory, head, tests)))
            print(name, looks[-1], flush=True)
        if step % 100 == 0:
            args.state.mkdir(parents=True, exist_ok=True)
            torch.save({"commit": commit, "videos": len(videos), "memory": memory.state_dict(),
                        "head": head.state_dict(), "optimizer": optimizer.state_dict(),
                        "losses": losses, "looks": looks, "done": step,
                        "seconds": seconds + time.process_time() - started},
                       state_file.with_suffix(".tmp"))
            state_file.with_suffix(".tmp").rename(state_file)
    said = words_said(memory, head, tests)
    print(name, shares_said(said))
    add_line(args.results, {
        "arm": args.arm, "seed": args.seed, "steps": args.steps, "rate": args.rate, "batch": BATCH,
        "kitchens": len(videos), "commit": commit, "loss": round(sum(losses[-25:]) / 25, 4),
        **shares_said(said), "videos": said, "looks": looks,
        "seconds": round(seconds + time.process_time() - started),
    })


def main():
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    of_encode = commands.add_parser("encode")
    of_encode.add_argument("begin", type=int)
    of_encode.add_argument("end", type=int)
    of_train = commands.add_parser("train")
    of_train.add_argument("arm", choices=ARMS)
    of_train.add_argument("--seed", type=int, default=0)
    of_train.add_argument("--steps", type=int, default=1600)
    of_train.add_argument("--rate", type=float, default=7e-4)   # as in train.py
    of_train.add_argument("--videos", type=int, default=12800, help="at most so many")
    of_train.add_argument("--state", type=Path, required=True, help="folder")
    of_train.add_argument("--results", type=Path, default=FILE)
    for command in (of_encode, of_train):
        command.add_argument("--cache", type=Path, required=True, help="folder")
    args = parser.parse_args()
    if args.command == "encode":
        encode_kitchens(args.begin, args.end, args.cache)
        return
    commit = present_commit()
    if commit.endswith("+"):
        raise BadData("files have changed since the last commit")
    train_alone(args, commit)


if __name__ == "__main__":
    main()
