"""What a language model is asked about streamed narrations: summaries of videos (paper App. C.4,
Table 17), and objects that narrations make up (App. C.1).

    python -m beyond.experiments.asked summaries --pred out/pred --llm meta-llama/Meta-Llama-3-8B-Instruct \\
        --gt data/ego4d/annotations/segment_summaries.json
    python -m beyond.experiments.asked objects --pred out/pred --llm Qwen/Qwen3-8B --data egoexo4d

summaries   the model, which was not trained for it, condenses the narrations of each video. A
            summary is scored against those that people wrote of the same interval (Ego4D). Its task
            is that of the paper's prompt, in other words and with other examples
objects     the model names the objects that a sentence says are in use: of each true sentence, and
            of the predicted one that fits it best (as in `evaluate.py score`). Two objects match if
            they are one word, or if the model says so

The paper prints CIDEr 11.20, METEOR 17.94 and ROUGE-L 32.63 (hundredths) for FlowNar with
Llama-3-8B, and not how several annotators' summaries count. Here a video's CIDEr is the mean over
them, its ROUGE-L and METEOR those with the best one. Of objects it prints one accuracy (FlowNar 36.6 %,
VideoLLM-online 33.8 %, VideoLLM-MoD 25.8 %), and not its questions. Here object accuracy is the
share of all predicted objects that match one of their pair's true objects.
"""
import argparse
import json
import re
from collections.abc import Callable
from functools import cache
from operator import itemgetter
from pathlib import Path

import torch

import evaluate
from beyond.commands.data_command import samples_of
from beyond.commands.evaluate_command import split_of
from support.common import java
from support.common.devices import device_and_dtype
from support.common.errors import BadData, command_line
from support.common.figures import print_table
from support.common.options import Parser, data_options, json_option
from support.common.progress import progress
from support.common.text import one_line
from support.engine.frozen import load_llm
from support.files.annotations import summarised
from support.files.narrations import Sentence, is_list_of, paired, read_predictions
from support.files.sentences import Notes

Ask = Callable[[str, int], str]                # (question, longest answer [tokens]) -> answer

SUMMARY = """Below are notes on what a person did, one (seconds, note) each. A machine took them while watching a video:
some repeat, some are wrong. Find the main activities and write one short summary of them. Leave out what is minor or
said twice, join what belongs together, keep the order. Write in the past tense, to the person, a sequence of actions:
[You were in a garden, watered the roses, swept the path and spoke with a neighbour.]
[You were in an office, sorted letters and typed on a computer.]
Answer with the summary alone, in square brackets.
Notes: {notes}
Summary:"""
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


# ------------------------------------------------------------------------------- answers

def new_asker(llm: str) -> Ask:
    """Asks a language model (folder or hub id), always in the same way, and no question twice. An
    answer can be empty. BadData if the model has no chat template.
    """
    device, dtype = device_and_dtype("auto", "auto")
    model, tokenizer = load_llm(llm, dtype)
    if not tokenizer.chat_template:
        raise BadData(f"{llm}: its tokenizer has no chat template, so it cannot be asked")
    model = model.to(device).eval()
    model.set_attn_implementation("sdpa")

    @cache
    @torch.no_grad()
    def ask(question: str, tokens: int) -> str:
        fed = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True,
            enable_thinking=False, return_dict=True, return_tensors="pt").to(device)
        output = model.generate(**fed, max_new_tokens=tokens, do_sample=False, num_beams=1,
                                pad_token_id=tokenizer.eos_token_id)
        answer = output[0, fed["input_ids"].shape[1]:]
        return tokenizer.decode(answer, skip_special_tokens=True).strip()

    return ask


# ------------------------------------------------------------------------------- summaries

def summarise(ask: Ask, narrations: list[Sentence]) -> str:
    """A summary of narrations, sorted by time; "" of none."""
    if not narrations:
        return ""
    notes = [f"({sentence.time:g}, {one_line(sentence.text)})" for sentence in narrations]
    answer = ask(SUMMARY.format(notes=", ".join(notes)), 128)
    return one_line(answer.strip("[]"))


def clean_summary(text: str) -> str:
    """An Ego4D summary without its tags and in the second person:

    "#Summary C was in a room, C's dog sat" -> "You were in a room, your dog sat."
    Returns "" if nothing is left.
    """
    text = re.sub(r"#\s?\w+", "", text)
    second_person = {"C was": "you were", "C is": "you are", "C has": "you have", "C's": "your",
                     "C": "you"}               # "C" comes last, because it matches in the others
    for before, after in second_person.items():
        text = re.sub(rf"\b{before}\b", after, text)
    text = text.strip("., \n\t")
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def score_summaries(truth: dict[str, list[str]], summaries: dict[str, str]) -> dict:
    """CIDEr-D, METEOR (not without Java) and ROUGE-L of summaries, means over videos.

    truth    the references of each video; a video without any is left out
    Raises BadData if no video has a reference.
    """
    pairs = []                                 # (reference, summary)
    places = []                                # of each video's pairs
    for name, references in filter(itemgetter(1), truth.items()):
        places.append(slice(len(pairs), len(pairs) + len(references)))
        pairs += [(reference, summaries[name]) for reference in references]
    if not pairs:
        raise BadData("there is nothing to score: no video has a reference")
    _, scores = evaluate.caption_scores(pairs, java.java_problem() is None)

    measures = {"videos": len(places), "references": len(pairs)}
    for measure, of_pairs in scores.items():
        several = evaluate.average if measure == "cider" else max
        measures[measure] = evaluate.average([several(of_pairs[place]) for place in places])
    return measures


def run_summaries(args: argparse.Namespace) -> dict:
    """Prints the summaries; their scores."""
    truth = {}                                 # Ego4D's summaries, by the name of their interval
    for interval in summarised(Path(args.gt), Notes()):
        cleaned = map(clean_summary, interval.summaries)
        truth[interval.name] = list(filter(None, cleaned))
    truth, predictions = paired(truth, read_predictions(Path(args.pred)), args.gt, args.pred, False)
    ask = new_asker(args.llm)
    summaries = {}
    for name, narrations in progress(predictions.items(), "summaries", unit="video"):
        summaries[name] = summarise(ask, narrations)
        print(f"{name}: {summaries[name]}")
    return score_summaries(truth, summaries)


# ------------------------------------------------------------------------------- objects

class Reader:
    """Objects of sentences, by a language model; `unread`: questions whose answer is no list of names,
    and neither yes nor no."""

    def __init__(self, ask: Ask):
        self.ask = ask
        self.unread = set()

    def objects(self, sentence: str) -> list[str]:
        """The names of a sentence's objects in lower case, each once; none of ""."""
        if not sentence.strip():
            return []
        question = OBJECTS.format(sentence=one_line(sentence))
        try:
            names = json.loads(self.ask(question, 128))
        except (ValueError, RecursionError):
            names = None
        if not is_list_of(names, str):
            self.unread.add(question)
            return []
        # in their order, which decides the order of the questions to the model
        return list(dict.fromkeys(one_line(name).lower() for name in names))

    def same(self, one: str, other: str) -> bool:
        question = SAME.format(one=one, other=other)
        answer = self.ask(question, 8).rstrip(".").lower()
        if answer not in ("yes", "no"):
            self.unread.add(question)
        return answer == "yes"

    def judge(self, truth: str, text: str) -> list[bool]:
        """Of each object of a predicted sentence ("" for none), whether the true one has it."""
        true_names = self.objects(truth)
        # the model is not asked about a word that is one of the true ones
        return [name in true_names or any(self.same(other, name) for other in true_names)
                for name in self.objects(text)]


def run_objects(args: argparse.Namespace) -> dict:
    """The measures of the videos of a data set."""
    truths = {sample.name: sample for sample in samples_of(args, split_of(args), streaming=True)}
    truths, predictions = paired(truths, read_predictions(Path(args.pred)), args.data, args.pred,
                                 False)
    reader = Reader(new_asker(args.llm))
    right = []                                 # of each predicted object
    for name, truth in progress(truths.items(), "objects", unit="video"):
        if any(truth.annotators):
            _, pairs = evaluate.measure_video(truth, predictions[name])
            for sentence, text in pairs:
                right += reader.judge(sentence.text, text)
    return {
        "predicted_objects": len(right),
        "object_accuracy": evaluate.average(right),
        "not_understood": len(reader.unread),
    }


# ------------------------------------------------------------------------------- the command line

def run_asked(args: argparse.Namespace) -> None:
    result = args.run(args)
    print_table([("all", result)])
    if args.json:
        print(json.dumps(result))


def main() -> None:
    parser = Parser(prog="python -m beyond.experiments.asked",
                    description="What a language model says of narrations.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    summaries = commands.add_parser("summaries", help="of videos, made of their narrations")
    summaries.add_argument("--gt", required=True, metavar="FILE",
                           help="Ego4D's segment_summaries.json, to compare with")
    summaries.set_defaults(run=run_summaries)
    objects = commands.add_parser("objects", help="how many of those that are named are in use")
    data_options(objects)
    objects.set_defaults(run=run_objects)
    for command in (summaries, objects):
        command.add_argument("--pred", required=True, help="predictions, as for evaluate.py score")
        command.add_argument("--llm", required=True, help="language model: folder or hub id")
        json_option(command)
    args = parser.parse_args()
    command_line(lambda: run_asked(args))


if __name__ == "__main__":
    main()
