"""Real parts, row clam-shown: before the paper's loss, CLAM alone learns what each place showed last.

    python -m experiments.shown --device cuda

One linear map reads what a frame's tokens show, and what the memory tokens hold, at six times of
each video. CLAM and the map are trained together, from the toy's labels; then the map is kept as it
is, to look into the memory while the narrator is trained as all rows (experiments/real_parts.py).
"""
import argparse

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import narrator as nar
import train
from commands.train_command import options_from, start_as_chosen
from experiments import real_parts
from support.common.options import Parser, device_option
from support.files.features import feature_file
from toy import world
from toy.stages import last_seen

FRAMES = torch.tensor([16, 24, 32, 40, 48, 56])        # after which it is asked
STEPS = 665                                            # as many as fitted in 160 s, beside six trainings
BATCH = 32
RATE = 1e-3


def shown_videos(split: str, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Frame tokens [N, T, J, D] of videos that are long enough; what each place shows, and showed
    last, at FRAMES [N, n, 9, 2]."""
    tokens, now, last = [], [], []
    for kitchen in world.kitchens(split, real_parts.VIDEOS[split]):
        if len(kitchen) < FRAMES[-1]:
            continue
        labels = torch.from_numpy(kitchen.labels()[..., :2]).long()
        file = feature_file(real_parts.FOLDER / real_parts.KITCHENS, f"toy-{kitchen.seed}")
        tokens.append(load_file(file)["features"][:FRAMES[-1]])
        now.append(labels[FRAMES - 1])
        last.append(last_seen(labels)[FRAMES - 1])
    return tuple(torch.stack(part).to(device) for part in (tokens, now, last))


def scores_of(memory: nn.Module, head: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of types and colours [B, n, 9, 14]: of what the memory tokens hold, and of what the
    frames show."""
    x = x.float()
    read_at = (FRAMES * x.shape[2]).expand(len(x), -1)
    held, _ = memory(x.flatten(1, 2), read_at)
    return head(held[:, :, 1:10]), head(x[:, (FRAMES - 1).to(x.device), 1:10])


def loss_of(scores: Tensor, truth: Tensor) -> Tensor:
    return F.cross_entropy(scores[:, :7], truth[:, 0]) + F.cross_entropy(scores[:, 7:], truth[:, 1])


def words_right(scores: Tensor, truth: Tensor) -> float:
    kinds = scores[:, :7].argmax(1) == truth[:, 0]
    colours = scores[:, 7:].argmax(1) == truth[:, 1]
    return torch.stack([kinds, colours]).float().mean().item()


@torch.no_grad()
def read_by_map(memory: nn.Module, head: nn.Module, videos: tuple[Tensor, Tensor, Tensor]) -> dict:
    """The shares of words that the map reads: of hidden and visible things from the memory, and of
    visible ones from frames."""
    x, now, last = videos
    parts = [scores_of(memory, head, part) for part in x.split(BATCH)]
    held, seen = map(torch.cat, zip(*parts))
    hidden = (now[..., 0] == 0) & (last[..., 0] > 0)
    visible = now[..., 0] > 0
    return {
        "map_hidden": words_right(held[hidden], last[hidden]),
        "map_visible": words_right(held[visible], last[visible]),
        "map_frames": words_right(seen[visible], now[visible]),
    }


def show(memory: nn.Module, device: str) -> tuple[nn.Module, list[dict]]:
    x, now, last = shown_videos("train", device)
    held_out = shown_videos("val", device)
    head = nn.Linear(x.shape[-1], 14).to(device)
    learned = [p for p in [*memory.parameters(), *head.parameters()] if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    looks = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * min(1, (step + 1) / 50, 4 * (1 - step / STEPS))
        chosen = torch.randint(len(x), (BATCH,), generator=generator).to(device)
        held, seen = scores_of(memory, head, x[chosen])
        known = last[chosen][..., 0] > 0
        visible = now[chosen][..., 0] > 0
        loss = loss_of(held[known], last[chosen][known])
        loss = loss + loss_of(seen[visible], now[chosen][visible])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        if step + 1 in (50, 100, 200, 400, STEPS):
            looks.append({"step": step + 1} | read_by_map(memory, head, held_out))
            print(looks[-1], flush=True)
    return head, looks


def learn(narrator: nar.Narrator, examples: train.Examples, options, held_out) -> None:
    """`learn_in_passes`, after the memory was shown; each look also reads it by the map."""
    device = str(narrator.llm.device)
    head, _ = show(narrator.memory, device)
    videos = shown_videos("val", device)
    words = real_parts.measured_words

    def words_and_map(narrator, examples, folder, batch):
        measured = words(narrator, examples, folder, batch)
        return measured | read_by_map(narrator.memory, head, videos)

    real_parts.measured_words = words_and_map
    real_parts.learn_in_passes(narrator, examples, options, held_out)


def main():
    parser = Parser(description="Show CLAM the kitchens, then train its narrator.")
    device_option(parser)
    args: argparse.Namespace = parser.parse_args()
    what = real_parts.training("clam")
    output = real_parts.FOLDER / f"clam-shown-0-{what.lr:g}-{what.steps}"
    options = options_from(
        data=str(real_parts.FOLDER / real_parts.KITCHENS),
        llm=str(real_parts.FOLDER / real_parts.LLM),
        vision=str(real_parts.FOLDER / real_parts.VISION),
        output=str(output),
        limit=what.videos,
        epochs=what.steps * what.settings["batch"] / what.videos,
        lr=what.lr,
        device=args.device,
        **what.settings,
    )
    train.train(options, start_as_chosen, learn)


if __name__ == "__main__":
    main()
