"""Objects that narrations make up (paper App. C.1).

    python -m experiments.objects --pred out/predictions --data egoexo4d --llm Qwen/Qwen3-8B

Each true sentence is compared with that of the predicted segment that fits it best, as in
`evaluate.py score`. A language model names the objects that a sentence says are in use. Two objects
match if they are one word but for article and plural, or if the language model says so.

The paper reports one *object accuracy* (FlowNar 36.6 %, VideoLLM-online 33.8 %, VideoLLM-MoD
25.8 %), and not its questions. Here object accuracy is the share of all predicted objects that
match one of their pair's true objects; `objects_found` is the share of all true objects that are
matched.
"""
import argparse
import json
import re
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from commands.evaluate_command import samples_of
from evaluate import average, measure_video
from experiments.answers import answers_for, question_options
from support.common.errors import command_line
from support.common.figures import print_table
from support.common.options import Parser, data_options
from support.common.progress import progress
from support.common.text import one_line
from support.files.narrations import is_list_of, paired, read_predictions, read_truth
from support.files.tracks import NarratedVideo

OBJECTS = """\
List the objects that the person in the sentence touches or uses, as a JSON list of short singular nouns.
No places, no parts of the body. Answer with the list alone; if there is no object, answer [].
Sentence: You pour water from the jugs into the glass on the table.
Objects: ["water", "jug", "glass"]
Sentence: You walk to the window with your hands up.
Objects: []
Sentence: {sentence}
Objects:"""
SAME = """\
Can both words name the same object in a description of a video? Answer yes or no.
Words: mug, cup
Answer: yes
Words: spoon, plate
Answer: no
Words: {one}, {other}
Answer:"""


# ------------------------------------------------------------- which objects a sentence names

class Reader:
    """Objects of sentences, by a language model; `unread`: questions without a valid answer.

    ask         asks the model: (question, longest answer [tokens]) -> answer
    """

    def __init__(self, ask):
        self.ask = ask
        self.unread = set()

    def objects(self, sentence: str) -> list[str]:
        question = OBJECTS.format(sentence=one_line(sentence))
        # Some models write text around the list: take the first list of strings.
        for brackets in re.findall(r"\[[^\[\]]*\]", self.ask(question, 128)):
            try:
                names = json.loads(brackets)
            except ValueError:
                continue
            if is_list_of(names, str):
                return names
        self.unread.add(question)
        return []

    def same(self, one: str, other: str) -> bool:
        question = SAME.format(one=one, other=other)
        answer = re.match(r"\W*(yes|no)\b", self.ask(question, 8), re.IGNORECASE)
        if answer is None:
            self.unread.add(question)
            return False
        return answer[1].lower() == "yes"


def singular(name: str) -> str:
    """An object's name in lower case, without article and plural: "The Red Cups" -> "red cup"."""
    name = re.sub(r"^(the|a|an|your|some) ", "", one_line(name).lower())
    name = re.sub(r"(?<=[^aeiou])ies$", "y", name)
    return re.sub(r"(ss|x|ch|sh)es$|([^su])s$", r"\1\2", name)


# ------------------------------------------------------------- which of them are right

@dataclass
class Judged:
    """The objects of a pair of sentences."""
    found: dict[str, bool]                     # each true object: does a predicted one match it?
    right: dict[str, bool]                     # each predicted object: does a true one match it?


def named_objects(reader: Reader, sentence: str) -> list[str]:
    """The names of a sentence's objects, each once."""
    if not sentence.strip():
        return []
    names = [singular(name) for name in reader.objects(sentence)]
    # A dictionary keeps the order, which decides the order of the questions to a model.
    return [name for name in dict.fromkeys(names) if name]


def judge(reader: Reader, truth: str, text: str) -> Judged:
    """Compare the objects of a true and a predicted sentence ("" if nothing is predicted)."""
    true_names = named_objects(reader, truth)
    names = named_objects(reader, text)
    judged = Judged(dict.fromkeys(true_names, False), dict.fromkeys(names, False))
    for true_name, name in product(true_names, names):
        # The model is not asked about a word that is one of the true ones: that is its match.
        if name in true_names:
            same = name == true_name
        else:
            same = reader.same(true_name, name)
        if same:
            judged.found[true_name] = True
            judged.right[name] = True
    return judged


def object_measures(rows: list[Judged]) -> dict:
    """Shares over all objects. Pairs without a true object are left out and counted."""
    kept = [row for row in rows if row.found]
    found = [matched for row in kept for matched in row.found.values()]
    right = [matched for row in kept for matched in row.right.values()]
    return {
        "pairs": len(kept),
        "without_objects": len(rows) - len(kept),
        "true_objects": len(found),
        "predicted_objects": len(right),
        "object_accuracy": average(right),
        "objects_found": average(found),
    }


# ------------------------------------------------------------- the command line

def known_truth(args: argparse.Namespace) -> dict[str, NarratedVideo]:
    """The ground truth of --gt, or of the streamed videos of --data."""
    if args.gt:
        return read_truth(Path(args.gt))
    return {sample.name: sample for sample in samples_of(args, streaming=True)}


def run_objects(args: argparse.Namespace) -> None:
    reader = Reader(answers_for(args).ask)
    truths, predictions = paired(known_truth(args), read_predictions(Path(args.pred)),
                                 args.gt or args.data, args.pred, partial=False)
    rows = []
    for name, truth in progress(truths.items(), "objects", unit="video"):
        if any(truth.annotators):
            _, pairs = measure_video(truth, predictions[name])
            rows += [judge(reader, sentence.text, text) for sentence, text in pairs]
    result = object_measures(rows) | {"not_understood": len(reader.unread)}
    print_table([("all", result)])
    if reader.unread:
        print("not understood, and so without objects: answers that make no sense",
              file=sys.stderr)
    if args.json:
        print(json.dumps(result))


def main() -> None:
    parser = Parser(
        prog="python -m experiments.objects",
        description="How many of the objects that narrations name are in use.")
    question_options(parser)
    parser.add_argument("--gt", help="ground truth: a file or a folder, as for evaluate.py score")
    data_options(parser, required=False)
    args = parser.parse_args()
    if bool(args.gt) == bool(args.data):
        parser.error("give ground truth by --gt or by --data")
    command_line(lambda: run_objects(args))


if __name__ == "__main__":
    main()
