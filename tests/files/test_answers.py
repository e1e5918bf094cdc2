"""support/files/answers.py: questions to a language model, with and without a chat template, each
asked once.
"""
import json

import pytest

from helpers import TOY, grouped
from support.common.errors import BadData
from support.engine.checkpoint import load_tokenizer
from support.files import answers

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
    assert len(kept.read_text().splitlines()) == 2
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


@pytest.mark.parametrize("content, message", [
    (b'{"a": 1}', "line 1: must be"),
    (b'["a"]\n', "line 1: must be"),
    (b'["a", 3]\n', "[question, answer]"),
])
def test_another_file_is_left_alone(tmp_path, content, message):
    kept = tmp_path / "a.jsonl"
    kept.write_bytes(content)
    with pytest.raises(BadData) as error:
        answers.Answers("llm", kept, "cpu")
    assert message in str(error.value)
    assert kept.read_bytes() == content


def test_a_line_is_question_and_answer(llm, tmp_path):
    kept = tmp_path / "a.jsonl"
    answer = answers.Answers(llm, kept, "cpu").ask("One?")
    assert json.loads(kept.read_text()) == [f"{llm}: One?", answer]


@pytest.mark.parametrize("line", [b"{}", b"[1, 2]", b'["a"]', b"x", b"\xff", b"[" * 100_000])
def test_damaged_lines_are_named(tmp_path, line):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'["a", "b"]\n' + line + b"\n")
    message = r"x.jsonl, line 2: must be \[question, answer\]; delete the line"
    with pytest.raises(BadData, match=message):
        answers.Answers("llm", path, "cpu")
