"""Summaries of videos, made of their streamed narrations (paper App. C.4, Table 17).

    python -m experiments.summary --pred out/predictions --data ego4d --llm meta-llama/Meta-Llama-3-8B-Instruct
    python -m experiments.summary --pred out/predictions --data toy --llm none

A language model that was not trained for it condenses the narrations of a video, or a rule does (`--llm none`). The
summary is scored against those that people wrote of the same interval (Ego4D's segment_summaries.json). The miniature
has none: there, and for any other file of true narrations, the reference is the rule's summary of the true narrations.
A file {video: summary}, such as --output writes, can be the reference as well.

The task of the language model is that of the paper's prompt (App. C.4), in other words and with other examples.

The paper prints CIDEr 11.20, METEOR 17.94 and ROUGE-L 32.63 (hundredths) for FlowNar with Llama-3-8B. It does not say
how several annotators' summaries count. Here CIDEr is the mean over them; ROUGE-L and METEOR are those of the best one.
"""
import argparse
import json
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

from tqdm import tqdm

from evaluate import average, split_of
from experiments.truth import known_truth, parse_truth, protect, truth_options
from support import captions
from support.annotations import Interval, Notes, intervals, summarised
from support.answers import Answers
from support.common import BadData, command_line, one_line, print_table, read_json, write_json
from support.narrations import Sentence, Truth, paired, read_predictions, read_truth
from toy.world import FPS

ACTS = 5                                       # a rule's summary has at most so many
IRREGULAR = {"bring": "brought", "break": "broke", "cut": "cut", "draw": "drew", "drink": "drank", "eat": "ate",
             "feed": "fed", "get": "got", "give": "gave", "go": "went", "hang": "hung", "hit": "hit", "hold": "held",
             "leave": "left", "put": "put", "read": "read", "set": "set", "shake": "shook", "shut": "shut",
             "sit": "sat", "spread": "spread", "stand": "stood", "swing": "swung", "sweep": "swept", "take": "took",
             "throw": "threw", "turn": "turned", "write": "wrote"}
PROMPT = """Below are notes on what a person did, one (seconds, note) each. A machine took them while watching a video:
some repeat, some are wrong. Find the main activities and write one short summary of them. Leave out what is minor or
said twice, join what belongs together, keep the order. Write in the past tense, to the person, a sequence of actions:
[You were in a garden, watered the roses, swept the path and spoke with a neighbour.]
[You were in an office, sorted letters and typed on a computer.]
Answer with the summary alone, in square brackets.
Notes: {notes}
Summary:"""


# ---------------------------------------------------------------------- by rule

def past(verb: str) -> str:
    """The past tense of an English verb: wash, wipe, empty, tap -> washed, wiped, emptied, tapped."""
    if verb in IRREGULAR:
        return IRREGULAR[verb]
    if re.fullmatch(r"[^aeiou]*[aeiou][^aeiouwxy]", verb):                     # one short syllable
        return verb + verb[-1] + "ed"
    return re.sub(r"(?<=[^aeiou])y$", "i", verb).removesuffix("e") + "ed"


def condense(narrations: list[str]) -> str:
    """A summary by rule: the room, then the most frequent verbs, at most ACTS, in the order in which they came, each
    with what it was done to most often; of equals, what came first. "" without a sentence that begins with "You".
    """
    room, acts = [], defaultdict(Counter)
    for text in narrations:
        words = text.strip(" .").split()
        if found := re.fullmatch(r"You (?:look around|enter) the (\w+)", " ".join(words)):
            room = [f"were in a {found[1]}"]
        elif len(words) > 1 and words[0] == "You":
            acts[words[1]][" ".join(words[2:])] += 1
    chosen = sorted(acts, key=lambda verb: -acts[verb].total())[:ACTS]         # stable
    parts = room + [f"{past(verb)} {acts[verb].most_common(1)[0][0]}".strip() for verb in acts if verb in chosen]
    return f"You {' and '.join(filter(None, [', '.join(parts[:-1]), parts[-1]]))}." if parts else ""


# ---------------------------------------------------------------------- by a language model

def question_about(narrations: list[Sentence]) -> str:
    return PROMPT.format(notes=", ".join(f"({y.time:g}, {one_line(y.text)})" for y in narrations))


def unwrap(answer: str) -> str:
    """The summary of an answer: what stands in square brackets, if anything does, else all of it."""
    return one_line(" ".join(re.findall(r"\[([^\[\]]+)\]", answer)) or answer.strip("[] \n"))


def summarise(predictions: dict[str, list[Sentence]], args: argparse.Namespace) -> dict[str, str]:
    """{video: summary}; "" for a video without narrations."""
    if args.llm == "none":
        return {name: condense([y.text for y in narrations]) for name, narrations in predictions.items()}
    answers, summaries = Answers(args.llm, args.answers, args.device, args.dtype), {}
    for name, narrations in tqdm(predictions.items(), "summaries", unit="video"):
        summaries[name] = unwrap(answers.ask(question_about(narrations))) if narrations else ""
    return summaries


# ---------------------------------------------------------------------- references and scores

def of_intervals(found: list[Interval]) -> dict[str, list[str]]:
    """Ego4D's summaries, by the names that streamed intervals have (data.py: interval_sample)."""
    return {f"{y.video}_{int(y.start * FPS)}_{int(y.end * FPS) + 1}": y.summaries for y in found}


def condensed(truths: dict[str, Truth]) -> dict[str, list[str]]:
    print("references: true narrations, condensed by the rule of --llm none", file=sys.stderr)
    return {name: [text for one in truth.annotators if (text := condense([y.text for y in one]))]
            for name, truth in truths.items()}


def references(path: Path) -> dict[str, list[str]]:
    """{video: summaries} from {video: summary}, from segment_summaries.json, or made of true narrations."""
    entries = list(content.values()) if path.is_file() and isinstance(content := read_json(path), dict) else []
    if entries and all(isinstance(entry, str) for entry in entries):
        return {name: [text] for name, text in content.items()}
    if any(isinstance(entry, dict) and "annotators" not in entry for entry in entries):
        return of_intervals(summarised(path, Notes()))
    return condensed(read_truth(path))


def known_references(args: argparse.Namespace) -> dict[str, list[str]]:
    """The references of --gt or --data."""
    if args.gt:
        return references(Path(args.gt))
    if args.data == "toy":
        return condensed(known_truth(args))
    if args.data != "ego4d":
        raise BadData(f"--data {args.data} has no summaries: use ego4d or toy, or give --gt a file {{video: summary}}")
    found = intervals("ego4d", Path(args.root or "data/ego4d"), split_of(args), Notes())[:args.limit]
    return of_intervals(found)


def score_summaries(truth: dict[str, list[str]], summaries: dict[str, str], tokenise: bool = False) -> dict:
    """CIDEr-D, METEOR (None without Java) and ROUGE-L of summaries, each against one or more references.

    Videos without a reference are left out and counted; BadData if none is left.
    """
    groups, pairs = [], []
    for name, texts in truth.items():
        if texts:
            groups.append(range(len(pairs), len(pairs) + len(texts)))
            pairs += [(text, summaries[name]) for text in texts]
    if not pairs:
        raise BadData("there is nothing to score: no video has a reference")
    empty = sum(not pairs[group[0]][1] for group in groups)
    pairs, meteor = captions.ptb(pairs) if tokenise else pairs, captions.java_problem() is None
    _, each = captions.captions(pairs, meteor)
    best = lambda measure: [max(group, key=lambda i: each[measure][i]) for group in groups]
    return {"videos": len(groups), "without_truth": len(truth) - len(groups), "references": len(pairs),
            "empty": empty, "cider": average([average([each["cider"][i] for i in group]) for group in groups]),
            "meteor": captions.meteor([pairs[i] for i in best("meteor")])[1] if meteor else None,
            "rouge_l": average([each["rouge_l"][i] for i in best("rouge_l")])}


# ---------------------------------------------------------------------- the command line

def run_summary(args: argparse.Namespace):
    """Print a summary of each video, and their scores if there is something to compare them with."""
    protect(args, args.output or "")
    if args.ptb and (problem := captions.java_problem()):
        raise BadData(f"--ptb {problem}")
    predictions, truth = read_predictions(Path(args.pred)), None
    if args.gt or args.data:
        truth, predictions = paired(known_references(args), predictions, args.gt or args.data, args.pred, args.partial)
    summaries = summarise({name: sorted(y, key=lambda one: one.time) for name, y in predictions.items()}, args)
    for name, text in summaries.items():
        print(f"{name}: {text}")
    if args.output:
        write_json(args.output, summaries)
    result = {"videos": len(summaries), "empty": sum(not text for text in summaries.values())}
    if truth is not None:
        result = score_summaries(truth, summaries, args.ptb)
        if result["meteor"] is None:
            print(f"METEOR is not computed: {captions.java_problem()}", file=sys.stderr)
    print_table([("all", result)])
    if args.json:
        print(json.dumps(result))


def main():
    parser = argparse.ArgumentParser(prog="python -m experiments.summary",
                                     description="Summaries of videos, made of their narrations and scored.")
    truth_options(parser)
    parser.add_argument("--output", metavar="FILE", help="also write the summaries, as JSON {video: summary}")
    parser.add_argument("--ptb", action="store_true",
                        help="split sentences by the Penn Treebank tokeniser (needs Java, pycocoevalcap)")
    args = parse_truth(parser, needed=False)
    command_line(lambda: run_summary(args))


if __name__ == "__main__":
    main()
