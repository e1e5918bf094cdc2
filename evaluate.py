"""Evaluation (paper §4.1, App. B.5): the self-conditioned protocol, temporal alignment, and the toy's own measures.

    python evaluate.py stream --data toy --limit 30              30 videos that no training has seen
    python evaluate.py stream --data toy --root DIR --last-k 10  the videos written to DIR by data.py toy

Each narration closes a segment that began at the one before it (first align, then evaluate):
    precision, recall, F1     share of segments with a counterpart of IoU >= 0.5, per video, then averaged
    exact                     share of ground-truth sentences whose best match (GIoU) says the very same
    memory words              share of the words that only visual memory can give that the best match contains

Glossary (P predicted, N true segments):
    segments    (start, end) in seconds                                   [P or N, 2]
    iou, giou   of every true with every predicted segment                [N, P]

Does not include yet: CIDEr, METEOR, ROUGE-L, the teacher-forced protocol, efficiency figures.
"""
import argparse
import json
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm

import data
import stream
from narrator import BadCheckpoint, Narrator, VisionEncoder, choose, load

TAU = 0.5  # IoU from which two segments match


def segments(times: list[float], start: float = 0.0) -> np.ndarray:
    """Narration times chained to segments (previous time, time), the first from `start`; reversed ones are turned."""
    bounds = np.array([start, *times], dtype=float)
    return np.sort(np.stack([bounds[:-1], bounds[1:]], axis=1), axis=1)


def overlaps(truth: np.ndarray, predicted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """IoU and generalised IoU of true [N, 2] with predicted [P, 2] segments -> [N, P] each."""
    latest, earliest = (f(truth[:, None], predicted[None]) for f in (np.maximum, np.minimum))      # [N, P, 2]
    intersection = np.clip(earliest[..., 1] - latest[..., 0], 0, None)
    union = np.clip(np.diff(truth) + np.diff(predicted).T - intersection, 1e-8, None)
    enclosing = np.clip(latest[..., 1] - earliest[..., 0], 1e-8, None)
    iou = intersection / union
    return iou, iou - (enclosing - union) / enclosing


def alignment(iou: np.ndarray) -> tuple[float, float, float]:
    """Precision, recall and F1 at TAU of one video (App. B.5) from iou [N, P]."""
    if iou.size == 0:
        return 0.0, 0.0, 0.0
    precision, recall = (iou >= TAU).any(0).mean(), (iou >= TAU).any(1).mean()
    return precision, recall, 2 * precision * recall / max(precision + recall, 1e-8)


@dataclass
class Tally:
    """Hits and chances."""
    hits: int = 0
    of: int = 0

    def add(self, hits: int, of: int = 1):
        self.hits, self.of = self.hits + hits, self.of + of

    @property
    def share(self) -> float | None:
        return self.hits / self.of if self.of else None


def compare(samples: list[data.Sample], predictions: list[list[stream.Narration]]) -> dict:
    """All measures over videos: the true narrations of samples against predicted ones."""
    aligned, plain, every, words = [], Tally(), Tally(), Tally()
    for sample, predicted in zip(samples, predictions):
        truth = segments([data.time_of(frame, sample.fps) for frame, _ in sample.narrations])
        iou, giou = overlaps(truth, segments([narration.end for narration in predicted]))
        aligned.append(alignment(iou))
        for (_, text), memory, scores in zip(sample.narrations, sample.memory, giou):
            said = predicted[int(scores.argmax())].text if len(scores) else ""
            every.add(said == text)
            if memory:
                words.add(sum(word in said.rstrip(".").split() for word in memory), len(memory))
            else:
                plain.add(said == text)
    precision, recall, f1 = np.mean(aligned, axis=0)
    return {"videos": len(predictions), "narrations": every.of, "precision": precision, "recall": recall, "f1": f1,
            "exact": every.share, "exact_without_memory": plain.share, "memory_words": words.share}


def narrate_samples(narrator: Narrator, vision: VisionEncoder, samples, static: bool):
    """Yield (sample, its narrations by the self-conditioned streaming loop), one video at a time."""
    for sample in samples:
        frames = (vision(torch.from_numpy(frame)[None])[0] for frame in sample.frames())
        steps = stream.narrate(narrator, frames, static)
        yield sample, [step.narration for step in steps if step.narration]


def run_stream(args: argparse.Namespace):
    """Self-conditioned: every narration depends on the model's own narrations before it."""
    device, dtype = choose(args.device)
    changes = {name: getattr(args, name) for name in ("theta", "theta_low", "refractory", "last_k")
               if getattr(args, name) is not None}
    narrator = load(args.model, args.llm, device, dtype, **changes)
    vision = VisionEncoder(args.vision or narrator.config.vision, narrator.config.grid, device, dtype)
    found = data.load_dataset(args.data, args.root, args.split, args.limit)
    pairs = list(tqdm(narrate_samples(narrator, vision, found, args.static), total=args.limit, unit="video", desc="streaming"))
    if not pairs:
        raise data.BadData(f"no videos in the {args.split} split of {args.data}")
    result = compare(*zip(*pairs))
    shown = {key: f"{value:.3f}" if isinstance(value, float) else value for key, value in result.items()}
    print("\n".join(f"{key.replace('_', ' '):22}{value}" for key, value in shown.items()))
    if args.json:
        print(json.dumps({key: float(value) if isinstance(value, float) else value for key, value in result.items()}))


def main():
    parser = argparse.ArgumentParser(description="Evaluate a narrator.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("stream", help="self-conditioned protocol over a split of a data set")
    one.add_argument("--data", required=True, help="toy (others: not yet)")
    one.add_argument("--root", help="folder of the data set (toy: rendered by seed without it)")
    one.add_argument("--split", default="test", help="train, val or test (default)")
    one.add_argument("--limit", type=stream.count, default=30, help="use only so many videos (default 30)")
    one.add_argument("--model", default=str(stream.TOY), help="checkpoint folder or hub id (default: the bundled toy)")
    one.add_argument("--llm", help="base language model (default: what the checkpoint names)")
    one.add_argument("--vision", help="vision encoder (default: what the checkpoint names)")
    one.add_argument("--theta", type=float, help="narrate when p([SKIP]) <= theta (default 0.8)")
    one.add_argument("--theta-low", type=float, help="the same soon after a narration (default 0.5)")
    one.add_argument("--refractory", type=float, help="how soon, in seconds (default 4)")
    one.add_argument("--static", action="store_true", help="one threshold, theta, all the time")
    one.add_argument("--last-k", type=stream.count, help="FlowNar-C: keep only the last k narrations")
    one.add_argument("--device", default="auto")
    one.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    data.run(lambda: run_stream(args), (BadCheckpoint,))


if __name__ == "__main__":
    main()
