"""experiments/summary.py (App. C.4): summaries by rule and by a model, references, scores."""
import json
from functools import partial

import pytest

import data
import evaluate
from experiments import summary
from helpers import ROOT
from support.files.narrations import Sentence
from test_evaluate import command, write

run_summary = partial(command, main=summary.main)
EGO4D = ROOT / "tests" / "golden" / "data" / "ego4d"


@pytest.fixture(autouse=True)
def without_java(monkeypatch):
    monkeypatch.setattr(evaluate, "java_problem", lambda: "needs Java")


def rows(*texts):
    """Rows of a file of narrations, one every two seconds."""
    return [{"time": 2.0 * n + 0.5, "text": text} for n, text in enumerate(texts)]


FIRST = rows("You look around the kitchen.", "You wash the red cup.",
             "You tap the drawer hiding the pan.")
SECOND = rows("You enter the room.", "You empty the sink.", "You swing the lime knife.")


SIX = [f"You {verb} it." for verb in ("wash", "heat", "fill", "check", "clear", "wipe")]


@pytest.mark.parametrize("texts, expected", [
    ([], ""),
    (["C opens the door.", "You."], ""),
    (["You look around the kitchen."], "You were in a kitchen."),
    (["You wash the cup.", "You fix it.", "You wash the pan.", "You wash the pan."],
     "You washed the pan and fixed it."),
    (["You tap it.", "You empty it.", "You shake it.", "You play."],
     "You tapped it, emptied it, shook it and played."),
    (SIX, "You washed it, heated it, filled it, checked it and cleared it."),
    ([*SIX, "You wipe it."], "You washed it, heated it, filled it, checked it and wiped it."),
])
def test_condensed_by_hand(texts, expected):
    assert summary.condense(texts) == expected


def test_perfect_and_worse(tmp_path):
    """The toy's .json in a folder as truth: its own narrations are perfect, fewer are not."""
    for name, narrations in (("a", FIRST), ("b", SECOND)):
        write(tmp_path / f"{name}.json", {"video": f"{name}.mp4", "fps": 2, "duration": 9.0,
                                          "narrations": narrations})
    pred = write(tmp_path.parent / "pred.json", {"a": FIRST[::-1], "b": SECOND})
    result = run_summary("--pred", pred, "--gt", tmp_path, "--llm", "none", "--json")
    assert result == {"videos": 2, "without_truth": 0, "references": 2, "empty": 0,
                      "cider": pytest.approx(10), "meteor": None, "rouge_l": 1}
    write(pred, {"a": FIRST[:-1], "b": []})
    result = run_summary("--pred", pred, "--gt", tmp_path, "--json")
    assert result["empty"] == 1
    assert result["cider"] < 10
    assert 0 < result["rouge_l"] < 0.5
    printed = run_summary("--pred", pred)
    assert printed == "a: You were in a kitchen and washed the red cup.\nb: \n"


def test_several_references(monkeypatch):
    """CIDEr: the mean; ROUGE-L and METEOR: the best of a video's references.

    A video without any reference is left out.
    """
    truth = {"a": ["a b c d", "e f"], "b": ["x y", "x z"], "c": []}
    summaries = {"a": "a b c d", "b": "x z", "c": "q"}
    scored = []

    def meteor(pairs):
        """1 for equal sentences; of the corpus, the number of pairs."""
        scored.append(pairs)
        return [float(true == predicted) for true, predicted in pairs], len(pairs)

    monkeypatch.setattr(evaluate, "java_problem", lambda: None)
    monkeypatch.setattr(evaluate, "meteor", meteor)
    result = summary.score_summaries(truth, summaries)
    pairs = [("a b c d", "a b c d"), ("e f", "a b c d"), ("x y", "x z"), ("x z", "x z")]
    each = evaluate.cider(pairs)
    assert result["cider"] == pytest.approx(sum(each) / 4)
    assert result["rouge_l"] == 1
    assert scored[-1] == [("a b c d", "a b c d"), ("x z", "x z")]
    assert result["meteor"] == 2
    assert (result["videos"], result["without_truth"], result["references"]) == (2, 1, 4)


def test_ego4d_summaries_have_the_names_of_streamed_intervals(tmp_path):
    samples = data.load_dataset("ego4d", EGO4D, "val", streaming=True)
    names = [sample.name for sample in samples]
    pred = write(tmp_path / "pred.json", {name: rows("You pick up a cup.") for name in names})
    file = EGO4D / "annotations" / "segment_summaries.json"
    result = run_summary("--pred", pred, "--gt", file, "--json")
    assert result["videos"] == len(names)
    assert result["references"] == 3

    content = json.loads(file.read_text())
    interval = content[next(iter(content))]["1.77, 8.81"]
    interval["anno-1"]["summary"] = "#Summary C was in a kitchen"
    interval["anno-2"]["summary"] = None
    references = summary.references(write(tmp_path / "segment_summaries.json", content))
    assert references[names[0]] == ["You were in a kitchen."]
    interval["anno-2"]["summary"] = 3
    bad = write(tmp_path / "segment_summaries.json", content)
    assert "segment_summaries.json: expected what" in run_summary("--pred", pred, "--gt", bad, ok=False)


@pytest.mark.parametrize("raw, cleaned", [
    ("#Summary C was in a room, C's dog barked. ", "You were in a room, your dog barked."),
    ("#Summary", ""),
    ("#summary C was with lady X; Car C is red", "You were with lady X; Car you are red."),
])
def test_summaries_in_the_second_person(raw, cleaned):
    assert summary.clean_summary(raw) == cleaned


def test_answers_are_unwrapped_and_empty_ones_counted(tmp_path):
    """Of a language model whose answers are kept: it is not loaded."""
    narrations = [Sentence(row["time"], row["text"]) for row in FIRST]
    question = summary.question_about(narrations)
    assert "(0.5, You look around the kitchen.), (2.5, You wash the red cup.)" in question
    second = summary.question_about([Sentence(row["time"], row["text"]) for row in SECOND])
    answer = "Here it is:\n[You were in a kitchen\nand washed a cup.]\n[You left.]"
    kept = tmp_path / "answers.jsonl"
    kept.write_text("".join(json.dumps([f"any: {asked}", text]) + "\n"
                            for asked, text in ((question, answer), (second, " []"))))
    pred = write(tmp_path / "pred.json", {"a": FIRST[::-1], "b": SECOND, "silent": []})
    options = ("--pred", pred, "--llm", "any", "--answers", kept)
    printed = run_summary(*options)
    assert printed.startswith(
        "a: You were in a kitchen and washed a cup. You left.\nb: \nsilent: \n")
    result = run_summary(*options, "--gt", pred, "--json")
    assert result["empty"] == result["without_truth"] == 1
    assert result["rouge_l"] > 0


@pytest.mark.parametrize("answer, text", [
    ("You [ran] off", "ran"), ("[You ran.", "You ran."), ("You\nran.", "You ran."), ("[ ]", "")])
def test_unwrapped(answer, text):
    assert summary.unwrap(answer) == text


@pytest.mark.parametrize("options, says", [
    ("--gt other.json", "are not in"),
    ("--gt silent.json", "no video has a reference"),
    ("--gt pred.json --llm x --answers pred.json", "given twice"),
])
def test_bad_input_of_summaries(tmp_path, monkeypatch, options, says):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "pred.json", {"a": FIRST, "b": SECOND})
    write(tmp_path / "other.json", {"z": FIRST, "y": FIRST})
    write(tmp_path / "silent.json", {"a": [], "b": [{"time": 1, "text": "A bell rings."}]})
    assert says in run_summary("--pred", "pred.json", *options.split(), ok=False)
