"""experiments/objects.py (App. C.1): objects of sentences, and which are right."""
import json
from functools import partial

import pytest

from experiments import objects
from test_evaluate import command, write
from toy import world

run_objects = partial(command, main=objects.main)


def narration_rows(*texts):
    """Rows of a file of narrations, one every two seconds."""
    return [{"time": 2.0 * n + 1, "text": text} for n, text in enumerate(texts)]


def answering(*answers):
    """Something to ask that gives these answers in turn; and the questions that it was asked."""
    asked = []
    left = iter(answers)

    def ask(question, tokens):
        asked.append(question)
        return next(left)

    return ask, asked


@pytest.mark.parametrize("name, singular", [
    ("The Red Cups", "red cup"), ("glasses", "glass"), ("glass", "glass"), ("a bus", "bus"),
    ("berries", "berry"), ("boxes", "box"), ("knife", "knife"), (" dishes ", "dish"),
    ("vases", "vase"), ("the", "the")])
def test_one_word_but_for_article_and_plural(name, singular):
    assert objects.singular(name) == singular


@pytest.mark.parametrize("answer, names, unread", [
    ('["cup", "sink"]', ["cup", "sink"], 0),
    ('Sure: [1] then ["cup"] ["pan"]', ["cup"], 0),
    ("[]", [], 0),
    ("cup, sink", [], 1),
    ('["cup"', [], 1),
    ("[[[[" * 1000, [], 1),
])
def test_lists_in_answers(answer, names, unread):
    ask, asked = answering(answer)
    reader = objects.Reader(ask)
    assert reader.objects("You {wash} the\ncup.") == names
    assert len(reader.unread) == unread
    assert asked[0].endswith("Sentence: You {wash} the cup.\nObjects:")


@pytest.mark.parametrize("answer, same, unread", [
    ("Yes.", True, 0), (" **no**, they", False, 0), ("Nope", False, 1), ("", False, 1)])
def test_yes_or_no(answer, same, unread):
    ask, _ = answering(answer)
    reader = objects.Reader(ask)
    assert reader.same("mug", "cup") is same
    assert len(reader.unread) == unread


def test_judged_by_hand():
    """Equal objects are not asked about; others are compared with every true one."""
    ask, asked = answering('["The cups", "Sink", "cup"]', '["cup", "basin", "dog"]', "no", "no",
                           "yes", "no")
    row = objects.judge(objects.Reader(ask), "a", "b")
    assert row.found == {"cup": True, "sink": True}
    assert row.right == {"cup": True, "basin": True, "dog": False}
    assert [question.splitlines()[-2] for question in asked[2:]] == [
        "Words: cup, basin", "Words: cup, dog", "Words: sink, basin", "Words: sink, dog"]
    ask, _ = answering('["cup"]')
    nothing = objects.judge(objects.Reader(ask), "a", "")
    assert nothing == objects.Judged({"cup": False}, {})


def test_command_by_model(tmp_path):
    """One whose answers are kept: it is not loaded. The last answer makes no sense."""
    pred = write(tmp_path / "p.json", {"a": narration_rows("You run.")})
    gt = write(tmp_path / "g.json", {"a": narration_rows("You cook.")})
    answers = {objects.OBJECTS.format(sentence="You cook."): '["egg"]',
               objects.OBJECTS.format(sentence="You run."): '["mug"]',
               objects.SAME.format(one="egg", other="mug"): "I think so"}
    kept = tmp_path / "answers.jsonl"
    kept.write_text("".join(json.dumps([f"any: {question}", answer]) + "\n"
                            for question, answer in answers.items()))
    result = run_objects("--pred", pred, "--gt", gt, "--llm", "any", "--answers", kept, "--json")
    assert result["not_understood"] == result["pairs"] == 1
    assert result["object_accuracy"] == 0


def test_the_videos_of_a_data_set(tmp_path):
    kitchen = next(world.kitchens("val", 1))
    rows = [{"time": (narration.frame + 1) / world.FPS, "text": narration.text}
            for narration in kitchen.narrations]
    pred = write(tmp_path / "p.json", {f"toy-{kitchen.seed}": rows})
    kept = tmp_path / "answers.jsonl"
    questions = {objects.OBJECTS.format(sentence=row["text"]) for row in rows}
    kept.write_text("".join(json.dumps([f"any: {question}", '["cup"]']) + "\n"
                            for question in questions))
    result = run_objects("--pred", pred, "--data", "toy", "--split", "val", "--limit", 1,
                         "--llm", "any", "--answers", kept, "--json")
    assert result["pairs"] == len(rows)
    assert result["object_accuracy"] == result["objects_found"] == 1


def test_the_file_of_answers_is_no_other(tmp_path):
    gt = write(tmp_path / "g.json", {"a": narration_rows("You cook.")})
    line = ["--pred", gt, "--gt", gt, "--llm", "any", "--answers", gt]
    assert "given twice" in run_objects(*line, ok=False)
