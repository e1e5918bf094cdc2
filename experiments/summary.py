"""Summaries of videos, made of their streamed narrations (paper App. C.4, Table 17).

    python -m experiments.summary --pred out/pred --llm meta-llama/Meta-Llama-3-8B-Instruct \\
        --gt data/ego4d/annotations/segment_summaries.json

A language model that was not trained for it condenses the narrations of a video. With --gt, the
summary is scored against those that people wrote of the same interval (Ego4D's
segment_summaries.json). The toy has none.

The task of the language model is that of the paper's prompt (App. C.4), in other words and with
other examples.

The paper prints CIDEr 11.20, METEOR 17.94 and ROUGE-L 32.63 (hundredths) for FlowNar with
Llama-3-8B. It does not say how several annotators' summaries count. Here CIDEr is the mean over
them; ROUGE-L and METEOR are those of the best summary.
"""
import argparse
import json
import re
from pathlib import Path

import evaluate
from experiments.answers import Answers, answers_for, question_options
from support.common.errors import BadData, command_line
from support.common.figures import print_table
from support.common.options import Parser
from support.common.progress import progress
from support.common.text import one_line
from support.files.annotations import summarised
from support.files.narrations import Sentence, paired, read_predictions
from support.files.tracks import NarratedVideo, Notes
from toy.world import FPS

PROMPT = """Below are notes on what a person did, one (seconds, note) each. A machine took them while watching a video:
some repeat, some are wrong. Find the main activities and write one short summary of them. Leave out what is minor or
said twice, join what belongs together, keep the order. Write in the past tense, to the person, a sequence of actions:
[You were in a garden, watered the roses, swept the path and spoke with a neighbour.]
[You were in an office, sorted letters and typed on a computer.]
Answer with the summary alone, in square brackets.
Notes: {notes}
Summary:"""


# ------------------------------------------------------------- summaries

def question_about(narrations: list[Sentence]) -> str:
    notes = [f"({sentence.time:g}, {one_line(sentence.text)})" for sentence in narrations]
    return PROMPT.format(notes=", ".join(notes))


def unwrap(answer: str) -> str:
    """The summary in an answer: the text in square brackets, or all of it if there are none."""
    # A model that was asked for one pair of brackets may write several.
    bracketed = " ".join(re.findall(r"\[([^\[\]]+)\]", answer))
    if bracketed:
        return one_line(bracketed)
    return one_line(answer.strip("[] \n"))


def summarise(predictions: dict[str, list[Sentence]], answers: Answers) -> dict[str, str]:
    """{video: summary} of predictions, sorted by time; "" for a video without narrations."""
    summaries = {}
    for name, narrations in progress(predictions.items(), "summaries", unit="video"):
        summaries[name] = unwrap(answers.ask(question_about(narrations))) if narrations else ""
    return summaries


# ------------------------------------------------------------- references and scores

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
    if not text:
        return ""
    return text[0].upper() + text[1:] + "."


def of_intervals(annotated: list[NarratedVideo]) -> dict[str, list[str]]:
    """Ego4D's summaries, by the names of streamed intervals (data.py: interval_sample)."""
    summaries = {}
    for interval in annotated:
        first = int(interval.start * FPS)
        stop = int(interval.end * FPS) + 1
        cleaned = [clean_summary(text) for text in interval.summaries]
        summaries[f"{interval.video}_{first}_{stop}"] = [text for text in cleaned if text]
    return summaries


def score_summaries(truth: dict[str, list[str]], summaries: dict[str, str]) -> dict:
    """CIDEr-D, METEOR (None without Java) and ROUGE-L of summaries.

    truth    one or more references for each video; a video without any is left out and counted
    Raises BadData if no video has a reference.
    """
    pairs = []                                 # (reference, summary)
    groups = []                                # of each video, the indices of its pairs
    for name, texts in truth.items():
        if texts:
            groups.append(range(len(pairs), len(pairs) + len(texts)))
            pairs += [(text, summaries[name]) for text in texts]
    if not pairs:
        raise BadData("there is nothing to score: no video has a reference")

    with_meteor = evaluate.java_problem() is None
    _, scores = evaluate.caption_scores(pairs, with_meteor)      # {measure: of each pair}

    def best(measure: str) -> list[int]:
        """Of each video, the pair with the highest score."""
        return [max(group, key=lambda i: scores[measure][i]) for group in groups]

    cider = [evaluate.average([scores["cider"][i] for i in group]) for group in groups]
    corpus_meteor = None
    if with_meteor:
        # METEOR of a set is not the mean over its pairs: it is computed once more.
        _, corpus_meteor = evaluate.meteor([pairs[i] for i in best("meteor")])
    return {
        "videos": len(groups),
        "without_truth": len(truth) - len(groups),
        "references": len(pairs),
        "empty": sum(not summaries[name] for name, texts in truth.items() if texts),
        "cider": evaluate.average(cider),
        "meteor": corpus_meteor,
        "rouge_l": evaluate.average([scores["rouge_l"][i] for i in best("rouge_l")]),
    }


# ------------------------------------------------------------- the command line

def run_summary(args: argparse.Namespace) -> None:
    """Print a summary of each video, and the scores if there is something to compare with."""
    answers = answers_for(args)
    predictions = read_predictions(Path(args.pred))
    truth = None
    if args.gt:
        truth = of_intervals(summarised(Path(args.gt), Notes()))
        truth, predictions = paired(truth, predictions, args.gt, args.pred, partial=False)
    summaries = summarise(predictions, answers)
    for name, text in summaries.items():
        print(f"{name}: {text}")
    if truth is None:
        return
    result = score_summaries(truth, summaries)
    print_table([("all", result)])
    if args.json:
        print(json.dumps(result))


def main() -> None:
    parser = Parser(
        prog="python -m experiments.summary",
        description="Summaries of videos, made of their narrations and scored.")
    question_options(parser)
    parser.add_argument("--gt", metavar="FILE",
                        help="Ego4D's segment_summaries.json, to compare with")
    args = parser.parse_args()
    if args.json and not args.gt:
        parser.error("--json is for scores: give --gt")
    command_line(lambda: run_summary(args))


if __name__ == "__main__":
    main()
