"""experiments/answers.py: questions to a language model, with and without a chat template, each
asked once.
"""
import json

import pytest

from experiments import answers
from helpers import TOY, grouped
from support.common.errors import BadData
from support.engine.checkpoint import load_tokenizer

TEMPLATE = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}"
            "{% if enable_thinking is defined and not enable_thinking %}<quick>{% endif %}")


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """A small Llama with random weights, in a folder."""
    folder = tmp_path_factory.mktemp("llm")
    grouped().save_pretrained(folder)
    load_tokenizer(str(TOY / "llm")).save_pretrained(folder)
    return str(folder)


def test_each_question_is_answered_once(llm, tmp_path):
    kept = tmp_path / "a.jsonl"
    reader = answers.Answers(llm, kept, "cpu")
    answer = reader.ask("What is it?")
    assert reader.ask("What is it?") == answer
    reader.ask("And this?", 3)
    lines = kept.read_text().splitlines()
    assert len(lines) == 2 and json.loads(lines[0]) == [f"{llm}: What is it?", answer]
    # the same in another file
    assert answers.Answers(llm, tmp_path / "b.jsonl", "cpu").ask("What is it?") == answer
    # at most so many tokens
    start = reader.generate("What is it?", 3)
    assert answer.startswith(start) and len(start) < len(answer)


def test_kept_answers_need_no_model(llm, tmp_path, monkeypatch):
    """Answers of another model are not used."""
    kept = tmp_path / "a.jsonl"
    answer = answers.Answers(llm, kept, "cpu").ask("What is it?")
    monkeypatch.setattr(answers, "load_llm", lambda *_: pytest.fail("a model is loaded"))
    assert answers.Answers(llm, kept, "cpu").ask("What is it?") == answer
    with pytest.raises(pytest.fail.Exception, match="is loaded"):
        answers.Answers("another", kept, "cpu").ask("What is it?")


def test_chat_template_without_thinking(llm, tmp_path):
    reader = answers.Answers(llm, tmp_path / "a.jsonl", "cpu")
    _, tokenizer = reader.model
    plain = tokenizer("Name it.", return_tensors="pt")["input_ids"]
    assert reader.as_fed("Name it.").tolist() == plain.tolist()
    tokenizer.chat_template = TEMPLATE
    chat = tokenizer("<user>Name it.<assistant><quick>", add_special_tokens=False)
    assert reader.as_fed("Name it.").tolist() == [chat["input_ids"]]


@pytest.mark.parametrize("line", ["{}", "[1, 2]", '["a"]', '["a", 3]', "x", "[" * 100_000],
                         ids=["object", "numbers", "one", "a number", "no JSON", "deep"])
def test_damaged_lines_are_named(tmp_path, line):
    """And left alone: the file may be another one."""
    path = tmp_path / "x.jsonl"
    content = f'["a", "b"]\n{line}\n'
    path.write_text(content)
    with pytest.raises(BadData, match=r"x.jsonl, line 2: expected \[question, answer\]; delete"):
        answers.Answers("llm", path, "cpu")
    assert path.read_text() == content
