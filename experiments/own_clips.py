"""What a few own videos teach (docs/own_videos.md; not in the paper): clips that are made from a seed,
narrators that are trained on 12, 40 and 5 of them, and how many of their sentences are right.

    OMP_NUM_THREADS=1 python -m experiments.own_clips

A coloured ball climbs, sinks, rolls or rests; where a sentence ends, a lamp in the corner is lit.
"""
import random
from pathlib import Path
from time import process_time

import numpy as np

import narrator as nar
from commands import data_command, train_command
from data import load_dataset
from streams.learned import stream_beside_truth
from support.common.errors import command_line
from support.common.options import Parser
from support.files.video import write_video

OUTPUT = Path("out/own_clips")
TOY = "toy/checkpoint"
SIZE = 96                                      # height and width of a picture [px]
RADIUS = 13                                    # of the ball
FPS = 10
LIT = 5                                        # pictures: one frame of the narrator
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (40, 80, 220), "yellow": (235, 205, 40)}


def draw_clip(seed: int) -> tuple[list[np.ndarray], str]:
    """Pictures, uint8 [SIZE, SIZE, 3], and a table of seven sentences of 2 to 4 s."""
    chance = random.Random(seed)
    colour = chance.choice([*COLOURS])
    place = np.array(chance.choices(range(20, 31), k=2))            # [px] from the left, from above
    right, down = np.meshgrid(range(SIZE), range(SIZE))
    pictures = []
    table = "time,text\n"
    for act in ["appears", *chance.choices(["rolls", "climbs", "rests"], k=6)]:
        goal = place.copy()
        if act == "rolls":
            goal[0] = SIZE - place[0]
        if act == "climbs":
            goal[1] = SIZE - place[1]
            act = "sinks" if goal[1] > place[1] else "climbs"
        steps = LIT * chance.randint(4, 8)
        for step, (x, y) in enumerate(np.linspace(place, goal, steps)):
            picture = np.full((SIZE, SIZE, 3), 160, np.uint8)
            picture[(right - x) ** 2 + (down - y) ** 2 < RADIUS ** 2] = COLOURS[colour]
            picture[:12, -12:] = 255 if step >= steps - LIT else 60
            pictures.append(picture)
        place = goal
        table += f"{len(pictures) / FPS},The {colour} ball {act}.\n"
    return pictures, table


def make_clips(name: str, seeds: range) -> str:
    """A folder of clips, with narrations beside them, and their features -> its path."""
    folder = OUTPUT / name
    folder.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        pictures, table = draw_clip(seed)
        write_video(folder / f"{seed}.mp4", pictures, FPS)
        (folder / f"{seed}.csv").write_text(table)
    data_command.run(["encode", "--data", str(folder), "--model", TOY])
    return str(folder)


def count_right(narrator: nar.Narrator, folder: str, split: str) -> str:
    """Of how many sentences the time, the text and the colour are right."""
    in_time = 0.0
    right = []
    for sample in load_dataset(folder, split=split):
        found, pairs = stream_beside_truth(narrator, sample)
        in_time += found
        for sentence, text in pairs:
            _, colour, *_ = sentence.text.split()
            right.append((text == sentence.text, colour in text.split()))
    exact, colours = np.sum(right, axis=0)
    return f"{in_time:.0f}/{exact}/{colours} of {len(right)}"


def run_own_clips() -> None:
    folders = {count: make_clips(f"{count}", range(count)) for count in (12, 40, 5)}
    others = make_clips("others", range(900, 908))
    print("| clips | minutes | trained on: in time/exact/colour | held out | eight others |")
    print("|---|---|---|---|---|")
    for count, folder in folders.items():
        output = str(OUTPUT / f"narrator-{count}")
        begin = process_time()
        train_command.check_and_train(train_command.options_from(data=folder, init=TOY, output=output))
        minutes = (process_time() - begin) / 60
        narrator = nar.load(output).merge()
        sets = [(folder, "train"), (folder, "val"), (others, "all")]
        rights = [count_right(narrator, *clips) for clips in sets]
        print(f"| {count} | {minutes:.1f} | {' | '.join(rights)} |", flush=True)


def main():
    Parser(prog="python -m experiments.own_clips", description="What do a few own videos teach?").parse_args()
    command_line(run_own_clips)


if __name__ == "__main__":
    main()
