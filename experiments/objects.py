"""Objects that narrations make up (paper App. C.1), and what the made-up ones have to do with the picture (App. C.5).

    python -m experiments.objects --pred out/predictions --data egoexo4d --llm Qwen/Qwen3-8B
    python -m experiments.objects --pred out/predictions --data toy --world clutter

Each true sentence is compared with that of the predicted segment that fits it best, as in `evaluate.py score`. A
language model names the objects that a sentence says are in use, or the toy's templates do (`--llm none`). Two objects
match if they are one word but for article and plural, or if the language model says so.

The paper reports one *object accuracy* (FlowNar 36.6 %, VideoLLM-online 33.8 %, VideoLLM-MoD 25.8 %) and neither its
questions nor how it averages. Here it is the share of all predicted objects that match one of their pair's true
objects; `objects_found` is the share of all true objects that are matched; `..._of_pairs` are means over pairs instead.

For the toy's rendered videos it also asks the kitchen: how many of the wrong things were in sight, though not in use
(`by_chance`: how many of all 36 things were in sight then), and what is missed in which light.
"""
import argparse
import json
import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np
from tqdm import tqdm

from evaluate import TAU, average, match, overlaps, segments, split_of
from experiments.truth import known_truth, parse_truth, protect, truth_options
from support.answers import Answers
from support.common import BadData, command_line, one_line, print_table
from support.narrations import Sentence, Truth, is_list_of, paired, read_predictions
from toy import world

LIGHT = 0.1, 0.3, 0.6                          # the groups of segments by light begin here; daylight is 0.7 to 1.15
OBJECTS = """List the objects that the person in the sentence touches or uses, as a JSON list of short singular nouns.
No places, no parts of the body. Answer with the list alone; if there is no object, answer [].
Sentence: You pour water from the jugs into the glass on the table.
Objects: ["water", "jug", "glass"]
Sentence: You walk to the window with your hands up.
Objects: []
Sentence: {sentence}
Objects:"""
SAME = """Can both words name the same object in a description of a video? Answer yes or no.
Words: mug, cup
Answer: yes
Words: spoon, plate
Answer: no
Words: {one}, {other}
Answer:"""


# ---------------------------------------------------------------------- which objects a sentence names

@lru_cache(maxsize=None)
def templates() -> list[re.Pattern]:
    """The toy's sentences, of all its worlds; a match's groups are the objects."""
    found = set()
    for kind in world.WORLDS.values():
        thing, place = f"((?:{'|'.join(kind.colours)}) (?:{'|'.join(world.TYPES)}))", f"({'|'.join(kind.places)})"
        found |= {y.replace(".", r"\.").format(thing=thing, place=place) for y in kind.sentences.values()}
    return [re.compile(pattern) for pattern in found]


class ByTemplate:
    """Objects of the toy's sentences; `unread`: the sentences that are none of them."""

    def __init__(self):
        self.unread = set()

    def objects(self, sentence: str) -> list[str]:
        found = next(filter(None, (pattern.fullmatch(sentence) for pattern in templates())), None)
        if found is None:
            self.unread.add(sentence)
        return list(found.groups()) if found else []

    def same(self, one: str, other: str) -> bool:
        return False


class ByModel:
    """Objects of any sentence, by a language model; `unread`: the questions whose answers make no sense."""

    def __init__(self, ask):
        self.ask, self.unread = ask, set()

    def objects(self, sentence: str) -> list[str]:
        question = OBJECTS.format(sentence=one_line(sentence))
        for part in re.findall(r"\[[^\[\]]*\]", self.ask(question, 128)):
            try:
                listed = json.loads(part)
            except ValueError:
                continue
            if is_list_of(listed, str):
                return listed
        self.unread.add(question)
        return []

    def same(self, one: str, other: str) -> bool:
        question = SAME.format(one=one, other=other)
        said = re.match(r"\W*(yes|no)\b", self.ask(question, 8), re.IGNORECASE)
        if said is None:
            self.unread.add(question)
        return said is not None and said[1].lower() == "yes"


def singular(name: str) -> str:
    """An object's name in lower case, without article and plural: "The Red Cups" -> "red cup"."""
    name = re.sub(r"^(the|a|an|your|some) ", "", one_line(name).lower())
    name = re.sub(r"(?<=[^aeiou])ies$", "y", name)
    return re.sub(r"(ss|x|ch|sh)es$|([^su])s$", r"\1\2", name)


# ---------------------------------------------------------------------- which of them are right

@dataclass
class Judged:
    """The objects of a pair of sentences: each true one, is it found; each predicted one, is it right."""
    found: dict[str, bool]
    right: dict[str, bool]


def judge(reader: ByTemplate | ByModel, truth: str, text: str) -> Judged:
    """Compare the objects of a true and a predicted sentence ("" if nothing is predicted)."""
    true, predicted = ([y for y in dict.fromkeys(map(singular, reader.objects(one))) if y] if one.strip() else []
                       for one in (truth, text))
    same = {(one, other): one == other or other not in true and reader.same(one, other)
            for one, other in product(true, predicted)}
    return Judged({one: any(same[one, other] for other in predicted) for one in true},
                  {other: any(same[one, other] for one in true) for other in predicted})


def object_measures(rows: list[Judged]) -> dict:
    """Shares over all objects, and means over pairs; pairs without a true object are left out and counted."""
    kept = [row for row in rows if row.found]
    right, found = ([y for one in kept for y in one.right.values()], [y for one in kept for y in one.found.values()])
    return {"pairs": len(kept), "without_objects": len(rows) - len(kept), "true_objects": len(found),
            "predicted_objects": len(right), "object_accuracy": average(right), "objects_found": average(found),
            "object_accuracy_of_pairs": average([average(list(y.right.values())) for y in kept if y.right]),
            "objects_found_of_pairs": average([average(list(y.found.values())) for y in kept])}


# ---------------------------------------------------------------------- what the picture has to do with it (the toy)

@dataclass
class Shown:
    """A true segment of a toy video: its light (mean over its frames), whether a predicted segment is it, its objects,
    the looks (type, colour) of the things in sight and of those among them that are clutter."""
    light: float
    hit: bool
    judged: Judged
    sight: set[tuple[int, int]]
    clutter: set[tuple[int, int]]


def shown(kitchen: world.Kitchen, truth: Truth, predicted: list[Sentence], rows: list[Judged]) -> list[Shown]:
    """The segments of a video; `rows` are their pairs' objects. What a hand carries does not count as in sight."""
    true = segments([y.time for y in truth.annotators[0]])
    hits = (overlaps(true, segments([y.time for y in predicted]))[0] >= TAU).any(1)
    labels, clutter = kitchen.labels(), {(thing.type, thing.colour) for thing in kitchen.clutter if thing}
    found = []
    for (start, end), hit, row in zip(true, hits, rows):
        frames = range(round(start * world.FPS), round(end * world.FPS))
        looks = labels[frames][..., [world.TYPE, world.COLOUR]].reshape(-1, 2)
        sight = {(kind, colour) for kind, colour in looks.tolist() if kind} | clutter
        found.append(Shown(float(np.mean([kitchen.light(t) for t in frames])), bool(hit), row, sight, clutter))
    return found


def failures(rows: list[Shown], kind: world.World) -> dict:
    """Were wrong things in sight, and is more missed in the dark? Shares; None where there is nothing to count."""
    looks = {" ".join(kind.words(*look)): look for look in product(range(1, 7), range(1, 7))}
    wrong = [(looks[name], row) for row in rows for name, right in row.judged.right.items()
             if row.judged.found and not right and name in looks]
    result = {"wrong_things": len(wrong), "wrong_in_sight": average([look in row.sight for look, row in wrong]),
              "by_chance": average([len(row.sight) / len(looks) for _, row in wrong]),
              "wrong_clutter": average([look in row.clutter for look, row in wrong])}
    groups = {}
    for low, high in zip((0.0, *LIGHT), (*LIGHT, np.inf)):
        if dim := [row for row in rows if low <= row.light < high]:
            objects = object_measures([row.judged for row in dim])
            groups[f"light {low:g} - {high:g}" if high < np.inf else f"light >= {low:g}"] = {
                "segments": len(dim), "recall": average([row.hit for row in dim]),
                "object_accuracy": objects["object_accuracy"], "objects_found": objects["objects_found"]}
    return result | {"by_light": groups}


# ---------------------------------------------------------------------- the command line

def run_objects(args: argparse.Namespace):
    """Print the shares; for the toy's rendered videos, also what wrong and missing objects have to do with the picture.
    """
    protect(args)
    truths, predictions = paired(known_truth(args), read_predictions(Path(args.pred)), args.gt or args.data, args.pred,
                                 args.partial)
    reader = ByTemplate() if args.llm == "none" else ByModel(
        Answers(args.llm, args.answers, args.device, args.dtype).ask)
    rows = {}
    for name, truth in tqdm(truths.items(), "objects", unit="video", disable=args.llm == "none"):
        if any(truth.annotators):
            rows[name] = [judge(reader, y.text, text) for y, text in match(truth, predictions[name])[1]]
    every = [row for judged in rows.values() for row in judged]
    result = {"videos": len(rows), "not_understood": len(reader.unread)} | object_measures(every)
    if not result["pairs"] and args.llm == "none":
        raise BadData("there is nothing to score: --llm none knows only the toy's sentences; give a language model")
    if args.data == "toy" and not args.root:
        kind, segments_shown = world.find_world(args.world), []
        for seed, kitchen in world.kitchens(split_of(args), args.limit, world=kind):
            if (name := f"toy-{seed}") in rows:
                segments_shown += shown(kitchen, truths[name], predictions[name], rows[name])
        result |= failures(segments_shown, kind)
    print_table([("all", {key: value for key, value in result.items() if key != "by_light"})])
    if len(groups := result.get("by_light", {})) > 1:
        print_table(list(groups.items()))
    if result["not_understood"]:
        what = "sentences that the toy does not have" if args.llm == "none" else "answers that make no sense"
        print(f"no objects are counted for {result['not_understood']} {what}", file=sys.stderr)
    if args.json:
        print(json.dumps(result))


def main():
    parser = argparse.ArgumentParser(prog="python -m experiments.objects",
                                     description="How many of the objects that narrations name are in use.")
    truth_options(parser)
    args = parse_truth(parser, needed=True)
    command_line(lambda: run_objects(args))


if __name__ == "__main__":
    main()
