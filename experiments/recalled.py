"""Kitchens that overwrite: the bundled narrator is first asked what each place showed last.

    python -m experiments.recalled --seed 0

Stage `recall` on 4,000 kitchens of that world, 3,600 steps from the bundled narrator; then the
paper's loss as in the row "bundled, trained on here" (experiments/paper.py: overwriting-tuned).
"""
import argparse
import json

import torch

from commands.train_command import options_from
from experiments.runs import RESULTS, ROOT, add_line, measures, present_commit, run_command
from streams.late import LateBatches
from toy import stages, world
from train import pretrained, save, train_narrator

FILE = RESULTS / "earlier" / "recalled.jsonl"
STEPS = 3600
ASKED = 4000                    # videos of the stage
TRAINED_ON = 800                # of which so many are for the paper's loss, three times each


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    torch.set_num_threads(1)
    output = ROOT / "out" / f"recalled-{seed}"
    output.mkdir(parents=True, exist_ok=True)
    options = options_from(
        data="toy",
        seed=seed,
        world="overwriting",
        init="toy/checkpoint",
        output=str(output),
        last_k=10,
        long=0.0,
        warmup=0.2,
        epochs=3,
        recall_steps=STEPS,
    )
    torch.manual_seed(seed)
    narrator = pretrained(options)
    kitchens = world.kitchens("train", ASKED, world=world.WORLDS["overwriting"])
    scenes = stages.scenes(narrator.vision_encoder(), narrator.layout, kitchens)
    stages.inventories(options, "recall", narrator, scenes)
    torch.manual_seed(seed)
    train_narrator(narrator, scenes[:TRAINED_ON], options, batches=LateBatches)
    save(narrator, options, torch.bfloat16)
    command = ["evaluate.py", "stream", "--data", "toy", "--limit", "60", "--world", "overwriting",
               "--model", str(output), "--json"]
    printed = run_command(command, str(output))
    add_line(FILE, {"name": f"recalled-{seed}", "seed": seed, "commit": present_commit(),
                    "measures": measures(json.loads(printed.splitlines()[-1]))})


if __name__ == "__main__":
    main()
