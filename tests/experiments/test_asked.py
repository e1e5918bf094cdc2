"""beyond/experiments/asked.py: what a language model is asked about narrations (Table 17, App. C.1)."""
import json

import pytest

import data
import evaluate
from beyond.experiments import asked
from helpers import ROOT, TOY, golden_data, grouped
from support.common.errors import BadData
from support.engine.frozen import load_tokenizer
from support.files.narrations import Sentence
from test_evaluate import command, write
from toy import world

SUMMARIES = ROOT / "tests/golden/data/ego4d/annotations/segment_summaries.json"
TEMPLATE = ("{% for m in messages %}[{{ m.content }}]{% endfor %}"
            "{% if add_generation_prompt %}Assistant:{% endif %}"
            "{% if not enable_thinking %} You{% endif %}")

pytestmark = pytest.mark.usefixtures("no_java")


def test_a_language_model_is_asked_by_its_chat_template(tmp_path):
    llm, tokenizer = grouped(), load_tokenizer(str(TOY / "llm"))
    llm.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(BadData, match="has no chat template"):
        asked.new_asker(str(tmp_path))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    ask = asked.new_asker(str(tmp_path))
    ids = tokenizer("[What is it?]Assistant: You", add_special_tokens=False, return_tensors="pt")
    output = llm.generate(**ids, max_new_tokens=20, do_sample=False)[0, ids["input_ids"].shape[1]:]
    for count in (20, 3):
        answer = tokenizer.decode(output[:count], skip_special_tokens=True).strip()
        assert ask("What is it?", count) == answer


@pytest.fixture
def answers(monkeypatch):
    """{part of a question: answer} of a model in place of the command's."""
    known = {}

    def ask(question, tokens):
        return next(answer for part, answer in known.items() if part in question)

    monkeypatch.setattr(asked, "new_asker", lambda llm: ask)
    return known


def test_ego4d_summaries_have_the_names_of_streamed_intervals(tmp_path, answers):
    root = golden_data("ego4d", tmp_path / "ego4d")
    names = [sample.name for sample in data.load_dataset("ego4d", root, "val", streaming=True)]
    rows = {name: [{"time": 0.5, "text": "You pick up a cup."}] for name in names}
    rows[names[0]] = []
    answers["(0.5, You pick up a cup.)"] = "[You picked up a cup.]"
    pred = write(tmp_path / "pred.json", rows)
    line = ["summaries", "--pred", pred, "--llm", "any", "--gt"]
    printed = command(*line, SUMMARIES, main=asked.main)
    assert f"{names[0]}: \n" in printed and f"{names[1]}: You picked up a cup.\n" in printed
    result = command(*line, SUMMARIES, "--json", main=asked.main)
    assert (result["videos"], result["references"]) == (len(names), 3)
    content = json.loads(SUMMARIES.read_text())
    content[next(iter(content))]["1.77, 8.81"]["anno-2"]["summary"] = 3
    changed = write(tmp_path / "summaries.json", content)
    assert "summaries.json: expected" in command(*line, changed, main=asked.main, ok=False)
    line[2] = write(tmp_path / "other.json", {"z": [], "y": []})
    assert "videos are in one of" in command(*line, SUMMARIES, main=asked.main, ok=False)


def test_several_references(monkeypatch):
    """CIDEr: the mean; ROUGE-L and METEOR: the best. A video without one is left out."""
    truth = {"a": ["a b c d", "e f"], "b": ["x y", "x z"], "c": []}
    monkeypatch.setattr("support.common.java.java_problem", lambda: None)
    monkeypatch.setattr(evaluate, "meteor", lambda pairs: ([0.5, 0.25, 0, 1], 0.3))
    result = asked.score_summaries(truth, {"a": "a b c d", "b": "x z", "c": "q"})
    pairs = [("a b c d", "a b c d"), ("e f", "a b c d"), ("x y", "x z"), ("x z", "x z")]
    assert result["cider"] == pytest.approx(sum(evaluate.cider(pairs)) / 4)
    assert (result["rouge_l"], result["meteor"]) == (1, 0.75)
    assert (result["videos"], result["references"]) == (2, 4)
    with pytest.raises(BadData, match="no video has a reference"):
        asked.score_summaries({"a": []}, {"a": "You left."})


def test_summaries_in_the_second_person():
    raw = "#Summary C was in a room, C's dog barked. "
    assert asked.clean_summary(raw) == "You were in a room, your dog barked."
    assert asked.clean_summary("#Summary") == ""


@pytest.mark.parametrize("answer, text", [
    ("[You were in a kitchen\nand left.]", "You were in a kitchen and left."),
    ("You ran.", "You ran."), ("[ ]", "")])
def test_the_summary_in_an_answer(answer, text):
    assert asked.summarise(lambda question, tokens: answer, [Sentence(1, "You run.")]) == text


@pytest.mark.parametrize("answer, names", [
    ('["Cup", "sink", "cup"]', ["cup", "sink"]),
    ('Sure: ["cup"]', []), ("[1]", []), ("[" * 10_000, [])])           # not understood
def test_lists_in_answers(answer, names):
    reader = asked.Reader(lambda question, tokens: answer)
    assert reader.objects("You {wash} the\ncup.") == names
    assert len(reader.unread) == (names == [])
    assert reader.objects(" ") == []


@pytest.mark.parametrize("answer, same, unread", [
    ("Yes.", True, 0), ("no", False, 0), ("Nope", False, 1), ("", False, 1)])
def test_yes_or_no(answer, same, unread):
    reader = asked.Reader(lambda question, tokens: answer)
    assert reader.same("mug", "cup") is same
    assert len(reader.unread) == unread


def test_the_objects_of_a_data_set(tmp_path, answers):
    kitchen = next(world.kitchens("val", 1))
    times = [(narration.frame + 1) / world.FPS for narration in kitchen.narrations]
    rows = [{"time": time, "text": f"Sentence {n}"} for n, time in enumerate(times)]
    pred = write(tmp_path / "p.json", {f"toy-{kitchen.seed}": rows})
    answers |= {"Sentence: Sentence 0\n": '["cup", "basin", "dog"]',
                "Sentence: Sentence 1\n": "none that I know", "Sentence: Sentence": "[]",
                "Sentence: ": '["cup", "sink"]', "sink, basin": "yes", ", ": "no"}
    result = command("objects", "--pred", pred, "--data", "toy", "--split", "val", "--limit", 1,
                     "--llm", "any", "--json", main=asked.main)
    assert result == {"predicted_objects": 3, "object_accuracy": pytest.approx(2 / 3), "not_understood": 1}
