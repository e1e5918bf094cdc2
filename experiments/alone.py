"""Memories alone in kitchens that overwrite: how many different videos does each need?

    python -m experiments.alone clam 3900 --seed 0

The tokens of whole kitchens as the encoder gives them (world "overwriting"), and no language model:
a linear map of each memory token says what its place showed last, where that is hidden. It is
trained on so many videos, and tested on 100 others, of whose memory words shares are measured as in
the table "kitchen". "at mean": with G fixed at its mean.
"""
import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baselines.memories import MEMORIES
from experiments import paper
from experiments.overwriting import memory_at
from experiments.runs import RESULTS, ROOT, add_line, present_commit
from narrator import VisionEncoder
from support.engine.gates import gate_at_mean, has_gate
from support.engine.start import start_memory
from support.files.features import encode_pictures
from toy import world
from toy.stages import last_seen

FILE = RESULTS / "earlier" / "alone.jsonl"
CACHE = ROOT / "out" / "alone"
TEST = range(700, 800)          # videos that are not trained on
FRAMES = [16, 24, 32, 40, 48, 56]       # after which it is asked
BATCH = 8
RATE = 7e-4                     # as in train.py
WARM_UP = 50                    # steps; in the last fifth the rate falls
LOOK_AT = (400, 800, 1600, 3200)


def encoded(kitchens: list[world.Kitchen]) -> list[tuple[Tensor, Tensor]]:
    """Tokens [T, J, D] in half precision, and labels [T, 9, 2]; kept in files of 100 kitchens."""
    CACHE.mkdir(parents=True, exist_ok=True)
    encoder = VisionEncoder(paper.VISION, 3)
    videos = []
    for begin in range(0, len(kitchens), 100):
        file = CACHE / f"{begin}.pt"
        if not file.exists():
            part = []
            for kitchen in kitchens[begin:begin + 100]:
                pictures = map(kitchen.render, range(len(kitchen)))
                x = torch.stack(list(encode_pictures(pictures, encoder, 64))).half()
                part.append((x, torch.from_numpy(kitchen.labels()[..., :2]).long()))
            torch.save(part, file)
        videos += torch.load(file)
    return videos


@torch.no_grad()
def shares(memory: nn.Module, head: nn.Module, kitchens: list, videos: list) -> dict:
    """Of the memory words of TEST: the shares that are said where nothing was there before, and
    where another thing was; and the share of that thing's words."""
    said = {"once": [], "replaced": [], "before": []}
    for n in TEST:
        kitchen, x = kitchens[n], videos[n][0].float()[None]
        asked = [i for i, a in enumerate(kitchen.narrations) if a.memory_words]
        if not asked:
            continue
        ends = sorted({kitchen.narrations[i - 1].frame + 1 for i in asked})
        scores = head(memory_at(memory, x, ends)[0])                    # [N, 10, 14]
        for i in asked:
            narration = kitchen.narrations[i]
            words = narration.text.rstrip(".").split()
            place = next(p for p, name in enumerate(kitchen.world.places) if name in words)
            score = scores[ends.index(kitchen.narrations[i - 1].frame + 1), 1 + place]
            thing = kitchen.world.words(int(score[1:7].argmax()) + 1, int(score[8:].argmax()) + 1)
            said["replaced" if narration.before else "once"] += [
                word in thing for word in narration.memory_words]
            said["before"] += [word in thing for word in narration.before
                               if word not in narration.memory_words]
    return {f"words_{name}": round(sum(right) / len(right), 4) for name, right in said.items()}


def train(kind: str, count: int, seed: int, steps: int) -> dict:
    torch.set_num_threads(1)
    kitchens = list(world.kitchens("train", count + len(TEST), world.WORLDS["overwriting"]))
    videos = encoded(kitchens)
    torch.manual_seed(seed)
    memory = MEMORIES["clam" if kind == "fixed" else kind](
        128, 10, heads=4, target=True, dropout=0.0)
    start_memory(memory, torch.cat([x[:128] for x, _ in videos[:64]]))
    if kind == "fixed":                         # logits of the gate are its bias alone
        nn.init.zeros_(memory.w_gate[0].weight).requires_grad_(False)
    head = nn.Linear(128, 14)                   # scores of types, and of colours; 0 is none
    learned = [p for p in [*memory.parameters(), *head.parameters()] if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, weight_decay=0.0, fused=True)
    chosen_of = [n for n, (x, _) in enumerate(videos) if n not in TEST and len(x) >= FRAMES[-1]]
    truth = [last_seen(labels) for _, labels in videos]
    at = torch.tensor(FRAMES) - 1
    generator = torch.Generator().manual_seed(seed)
    losses = []
    curve = []
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = RATE * min(
            1, step / WARM_UP, 5 * (steps + 1 - step) / steps)
        drawn = torch.randint(len(chosen_of), (BATCH,), generator=generator)
        batch = [chosen_of[i] for i in drawn.tolist()]
        x = torch.stack([videos[n][0][:FRAMES[-1]] for n in batch]).float()
        last = torch.stack([truth[n][at] for n in batch])               # [B, N, 9, 2]
        now = torch.stack([videos[n][1][at] for n in batch])
        scores = head(memory_at(memory, x, FRAMES)[:, :, 1:])           # [B, N, 9, 14]
        is_asked = (now[..., 0] == 0) & (last[..., 0] > 0)
        scores, last = scores[is_asked], last[is_asked]
        loss = F.cross_entropy(scores[:, :7], last[:, 0]) + F.cross_entropy(scores[:, 7:], last[:, 1])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step in LOOK_AT:
            curve.append({"step": step, "loss": round(sum(losses[-25:]) / 25, 4)}
                         | shares(memory, head, kitchens, videos))
            print(kind, count, seed, curve[-1], flush=True)
    measures = {"loss": round(sum(losses[-25:]) / 25, 4)} | shares(memory, head, kitchens, videos)
    if has_gate(memory):
        x = torch.stack([videos[n][0][:FRAMES[-1]] for n in chosen_of[:16]])
        with gate_at_mean(memory, x.float().flatten(1, 2)):
            at_mean = shares(memory, head, kitchens, videos)
        measures |= {f"{name}_at_mean": share for name, share in at_mean.items()}
    return {"measures": measures, "looks": curve}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("memory", choices=[*MEMORIES, "fixed"])
    parser.add_argument("videos", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=6400)
    args = parser.parse_args()
    result = train(args.memory, args.videos, args.seed, args.steps)
    print(result["measures"])
    add_line(FILE, {"name": f"{args.memory}-{args.videos}-{args.seed}", "seed": args.seed,
                    "steps": args.steps, "commit": present_commit(), **result})


if __name__ == "__main__":
    main()
