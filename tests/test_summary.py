"""experiments/summary.py (App. C.4): summaries by rule and by a language model, their references and scores."""
import json
from functools import partial

import pytest

import data
from experiments import summary
from helpers import ROOT
from support import annotations, captions
from support.narrations import Sentence
from test_evaluate import command, write
from toy import world

summed = partial(command, main=summary.main)
EGO4D = ROOT / "tests" / "golden" / "data" / "ego4d"


@pytest.fixture(autouse=True)
def without_java(monkeypatch):
    monkeypatch.setattr(captions, "java_problem", lambda: "needs Java")


def rows(*texts):
    return [{"time": 2.0 * n + 0.5, "text": text} for n, text in enumerate(texts)]


ONE = rows("You look around the kitchen.", "You wash the red cup.", "You tap the drawer hiding the pan.")
TWO = rows("You enter the room.", "You empty the sink.", "You swing the lime knife.")


class Fake:
    """Stands for Answers: given answers in turn, and what was asked."""

    def __init__(self, *answers):
        self.answers, self.asked = iter(answers), []

    def __call__(self, *_):
        return self

    def ask(self, question, tokens=128):
        self.asked.append(question)
        return next(self.answers)


# ---------------------------------------------------------------------- by rule

def test_past_tense():
    assert [summary.past(verb) for verb in ("wash", "wipe", "tap", "fill", "empty", "shake", "put", "load", "fix",
                                            "open", "play", "scrub")] == [
        "washed", "wiped", "tapped", "filled", "emptied", "shook", "put", "loaded", "fixed", "opened", "played",
        "scrubbed"]


def test_condensed_by_hand():
    condense = lambda *texts: summary.condense(list(texts))
    assert condense() == condense("C opens the door.", "You.") == ""
    assert condense("You look around the kitchen.") == "You were in a kitchen."
    assert condense("You sit.") == "You sat."
    assert condense("You wash the cup.", "You open it.", "You wash the pan.", "You wash the pan.") == \
        "You washed the pan and opened it."
    assert condense("You enter the room.", *(y["text"] for y in TWO)) == \
        "You were in a room, emptied the sink and swung the lime knife."
    six = [f"You {verb} it." for verb in ("wash", "heat", "fill", "check", "clear", "wipe")]
    assert condense(*six) == "You washed it, heated it, filled it, checked it and cleared it."
    assert condense(*six, "You wipe it.") == "You washed it, heated it, filled it, checked it and wiped it."


def test_every_sentence_of_the_toy_is_condensed():
    for kind in ("plain", "second"):
        for text in world.WORLDS[kind].sentences.values():
            said = summary.condense([text.format(thing="red cup", place="sink")])
            assert said.startswith("You ") and (said.startswith("You were in a ") or said.split()[1].endswith("ed")
                                                or said.split()[1] in ("shook", "swung"))


# ---------------------------------------------------------------------- references and scores

def test_perfect_and_worse(tmp_path):
    """The toy's .json in a folder as truth; its narrations as predictions are perfect, without one they are not."""
    for name, said in (("a", ONE), ("b", TWO)):
        write(tmp_path / f"{name}.json", {"video": f"{name}.mp4", "fps": 2, "duration": 9.0, "narrations": said})
    pred = write(tmp_path.parent / "pred.json", {"a": ONE[::-1], "b": TWO})
    result = summed("--pred", pred, "--gt", tmp_path, "--llm", "none", "--json")
    assert result == {"videos": 2, "without_truth": 0, "references": 2, "empty": 0, "cider": pytest.approx(10),
                      "meteor": None, "rouge_l": 1}
    write(pred, {"a": ONE[:-1], "b": []})
    result = summed("--pred", pred, "--gt", tmp_path, "--json")
    assert result["empty"] == 1 and result["cider"] < 10 and 0 < result["rouge_l"] < 0.5
    assert "a: You were in a kitchen and washed the red cup.\nb: \n" in summed("--pred", pred, "--gt", tmp_path)


def test_rendered_toy_by_seed(tmp_path):
    """--data: the references of videos that have no file."""
    truth = {f"toy-{seed}": [{"time": y.frame, "text": y.text} for y in kitchen.narrations]
             for seed, kitchen in world.kitchens("test", 2, world=world.WORLDS["second"])}
    pred = write(tmp_path / "pred.json", truth)
    result = summed("--pred", pred, "--data", "toy", "--world", "second", "--limit", 2, "--json")
    assert result["cider"] == pytest.approx(10) and result["videos"] == 2
    assert summed("--pred", pred, "--data", "toy", "--limit", 2, "--json")["cider"] < 5


def test_several_references(monkeypatch):
    """CIDEr: the mean; ROUGE-L and METEOR: the best of a video's references. A video without any is left out."""
    truth = {"a": ["a b c d", "e f"], "b": ["x y", "x z"], "c": []}
    summaries = {"a": "a b c d", "b": "x z", "c": "q"}
    taken = []
    monkeypatch.setattr(captions, "java_problem", lambda: None)
    monkeypatch.setattr(captions, "meteor", lambda pairs: taken.append(pairs) or (
        [float(true == said) for true, said in pairs], len(pairs)))
    result = summary.score_summaries(truth, summaries)
    each = captions.cider([("a b c d", "a b c d"), ("e f", "a b c d"), ("x y", "x z"), ("x z", "x z")])
    assert result["cider"] == pytest.approx(sum(each) / 4) and result["rouge_l"] == 1
    assert taken[-1] == [("a b c d", "a b c d"), ("x z", "x z")] and result["meteor"] == 2
    assert (result["videos"], result["without_truth"], result["references"]) == (2, 1, 4)


def test_ego4d_summaries_have_the_names_of_streamed_intervals(tmp_path):
    names = [sample.name for sample in data.load_dataset("ego4d", EGO4D, "val", streaming=True)]
    pred = write(tmp_path / "pred.json", {name: rows("You pick up a cup.") for name in names})
    file = EGO4D / "annotations" / "segment_summaries.json"
    for source in (("--gt", file), ("--data", "ego4d", "--root", EGO4D)):
        result = summed("--pred", pred, *source, "--json")
        assert result["videos"] == len(names) and result["references"] == 3
    content = json.loads(file.read_text())
    first = content[next(iter(content))]["1.77, 8.81"]
    first["anno-1"]["summary"], first["anno-2"]["summary"] = "#Summary C was in a kitchen", None
    found = summary.references(write(tmp_path / "moved.json", content))
    assert found[names[0]] == ["You were in a kitchen."]
    first["anno-2"]["summary"] = 3
    assert '"summary" must be text' in summed("--pred", pred, "--gt", write(tmp_path / "bad.json", content), ok=False)


@pytest.mark.parametrize("raw, cleaned", [
    ("#Summary C was in a room, C's dog barked. ", "You were in a room, your dog barked."), ("#Summary", ""),
    ("#summary C was with lady X; Car C is red", "You were with lady X; Car you are red."), ("", ""),
    ("C cleaned Cups", "You cleaned Cups.")])
def test_summaries_in_the_second_person(raw, cleaned):
    assert annotations.clean_summary(raw) == cleaned


def test_written_summaries_can_be_references(tmp_path):
    pred, out = write(tmp_path / "pred.json", {"a": ONE, "b": TWO}), tmp_path / "out.json"
    assert summed("--pred", pred, "--output", out, "--json") == {"videos": 2, "empty": 0}
    assert json.loads(out.read_text())["b"] == "You were in a room, emptied the sink and swung the lime knife."
    assert summed("--pred", pred, "--gt", out, "--json")["cider"] == pytest.approx(10)


# ---------------------------------------------------------------------- by a language model

def test_answers_are_unwrapped_and_empty_ones_counted(tmp_path, monkeypatch):
    fake = Fake("Here it is:\n[You were in a kitchen\nand washed a cup.]\n[You left.]", " []\n")
    monkeypatch.setattr(summary, "Answers", fake)
    pred = write(tmp_path / "pred.json", {"a": ONE[::-1], "b": TWO, "silent": []})
    printed = summed("--pred", pred, "--llm", "any")
    assert printed.startswith("a: You were in a kitchen and washed a cup. You left.\nb: \nsilent: \n")
    assert len(fake.asked) == 2 and "(0.5, You look around the kitchen.), (2.5, You wash the red cup.)" in fake.asked[0]
    monkeypatch.setattr(summary, "Answers", Fake("", "You swung {it}"))
    result = summed("--pred", pred, "--gt", pred, "--llm", "any", "--json")
    assert result["empty"] == result["without_truth"] == 1 and result["rouge_l"] > 0


def test_unwrapped():
    assert [summary.unwrap(y) for y in ("You [ran] off", "[You ran.", "You\nran.", "[ ]", "")] == [
        "ran", "You ran.", "You ran.", "", ""]


# ---------------------------------------------------------------------- bad input

@pytest.mark.parametrize("options, says", [
    ("--data egoexo4d", "no summaries"), ("--data ego4d --root nowhere", "error"), ("--data x", "has no summaries"),
    ("--gt pred.json --ptb", "Java"), ("--gt empty.json", "are not in"), ("--gt other.json", "are not in"),
    ("--gt pred.json --output pred.json", "given twice"), ("--gt silent.json", "no video has a reference"),
    ("--gt pred.json --llm x --answers pred.json", "given twice"), ("--data toy --world x", "unknown world")])
def test_bad_input_of_summaries(tmp_path, monkeypatch, options, says):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "pred.json", {"a": ONE, "b": TWO})
    write(tmp_path / "empty.json", {})
    write(tmp_path / "other.json", {"z": ONE, "y": ONE})
    write(tmp_path / "silent.json", {"a": [], "b": [{"time": 1, "text": "A bell rings."}]})
    assert says in summed("--pred", "pred.json", *options.split(), ok=False)


@pytest.mark.parametrize("options", ["--gt pred.json --data toy", "--gt pred.json --world dark", "--limit 3"])
def test_usage_of_sources(tmp_path, monkeypatch, options, capsys):
    monkeypatch.setattr("sys.argv", ["summary", "--pred", "pred.json", *options.split()])
    with pytest.raises(SystemExit) as end:
        summary.main()
    assert end.value.code == 2


def test_partial_summaries(tmp_path):
    pred, gt = write(tmp_path / "p.json", {"a": ONE, "b": TWO}), write(tmp_path / "g.json", dict.fromkeys("abc", ONE))
    assert "--partial" in summed("--pred", pred, "--gt", gt, ok=False)
    assert summed("--pred", pred, "--gt", gt, "--partial", "--json")["videos"] == 2


def test_question_keeps_braces_and_lines():
    text = summary.question_about([Sentence(1.0, "You {wave}\nnow.")])
    assert "(1, You {wave} now.)" in text
