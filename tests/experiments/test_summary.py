"""experiments/summary.py (App. C.4): summaries by a model, references, scores."""
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


pytestmark = pytest.mark.usefixtures("no_java")


def rows(*texts):
    """Rows of a file of narrations, one every two seconds."""
    return [{"time": 2.0 * n + 0.5, "text": text} for n, text in enumerate(texts)]


FIRST = rows("You look around the kitchen.", "You wash the red cup.",
             "You tap the drawer hiding the pan.")
SECOND = rows("You enter the room.", "You empty the sink.", "You swing the lime knife.")


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


def kept_answers(path, *answers):
    """A file of kept answers of the model "any", which is then not loaded: (rows, answer)."""
    lines = []
    for narrations, answer in answers:
        sentences = [Sentence(row["time"], row["text"]) for row in narrations]
        lines.append(json.dumps([f"any: {summary.question_about(sentences)}", answer]) + "\n")
    path.write_text("".join(lines))
    return path


def test_ego4d_summaries_have_the_names_of_streamed_intervals(tmp_path):
    samples = data.load_dataset("ego4d", EGO4D, "val", streaming=True)
    names = [sample.name for sample in samples]
    narrations = rows("You pick up a cup.")
    pred = write(tmp_path / "pred.json", {name: narrations for name in names})
    kept = kept_answers(tmp_path / "answers.jsonl", (narrations, "[You picked up a cup.]"))
    file = EGO4D / "annotations" / "segment_summaries.json"
    options = ("--pred", pred, "--llm", "any", "--answers", kept)
    result = run_summary(*options, "--gt", file, "--json")
    assert (result["videos"], result["references"], result["empty"]) == (len(names), 3, 0)

    content = json.loads(file.read_text())
    changed = tmp_path / "summaries.json"
    interval = content[next(iter(content))]["1.77, 8.81"]
    interval["anno-1"]["summary"] = "#Summary C picked up a cup"
    interval["anno-2"]["summary"] = None
    result = run_summary(*options, "--gt", write(changed, content), "--json")
    assert result["references"] == 2
    interval["anno-2"]["summary"] = 3
    error = run_summary(*options, "--gt", write(changed, content), ok=False)
    assert "summaries.json: expected what" in error

    other = write(tmp_path / "other.json", {"z": narrations, "y": narrations})
    error = run_summary("--pred", other, "--llm", "any", "--answers", kept, "--gt", file, ok=False)
    assert "are not in" in error
    error = run_summary("--pred", pred, "--llm", "any", "--answers", pred, ok=False)
    assert "given twice" in error


@pytest.mark.parametrize("raw, cleaned", [
    ("#Summary C was in a room, C's dog barked. ", "You were in a room, your dog barked."),
    ("#Summary", ""),
    ("#summary C was with lady X; Car C is red", "You were with lady X; Car you are red."),
])
def test_summaries_in_the_second_person(raw, cleaned):
    assert summary.clean_summary(raw) == cleaned


def test_answers_are_unwrapped(tmp_path):
    """Narrations are asked about in their order; without any, there is nothing to ask."""
    assert "(0.5, You enter the room.), (2.5, You empty" in summary.question_about(
        [Sentence(row["time"], row["text"]) for row in SECOND])
    kept = kept_answers(
        tmp_path / "answers.jsonl",
        (FIRST, "Here it is:\n[You were in a kitchen\nand washed a cup.]\n[You left.]"),
        (SECOND, " []"))
    pred = write(tmp_path / "pred.json", {"a": FIRST[::-1], "b": SECOND, "silent": []})
    printed = run_summary("--pred", pred, "--llm", "any", "--answers", kept)
    assert printed == "a: You were in a kitchen and washed a cup. You left.\nb: \nsilent: \n"


@pytest.mark.parametrize("answer, text", [
    ("You [ran] off", "ran"), ("[You ran.", "You ran."), ("You\nran.", "You ran."), ("[ ]", "")])
def test_unwrapped(answer, text):
    assert summary.unwrap(answer) == text


def test_without_references_nothing_is_scored():
    with pytest.raises(evaluate.BadData, match="no video has a reference"):
        summary.score_summaries({"a": []}, {"a": "You left."})
