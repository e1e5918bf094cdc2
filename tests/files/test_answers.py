"""support/files/answers.py: questions to a language model, with and without a chat template, each asked once."""
import json

import pytest

from helpers import TOY, grouped
from support.common.errors import BadData
from support.engine.checkpoint import load_tokenizer
from support.files import answers

TEMPLATE = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>"
            "{% endif %}{% if enable_thinking is defined and not enable_thinking %}<quick>{% endif %}")


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """A small Llama with random weights, in a folder."""
    folder = tmp_path_factory.mktemp("llm")
    grouped().save_pretrained(folder)
    load_tokenizer(str(TOY / "llm")).save_pretrained(folder)
    return str(folder)


def test_answered_once(llm, tmp_path, monkeypatch):
    """Greedy, at most so many tokens; later runs take what is kept and load no model; not so another's."""
    kept = tmp_path / "a.jsonl"
    first = answers.Answers(llm, kept, "cpu")
    said = [first.ask("What is it?"), first.ask("What is it?"), first.ask("And this?", 3)]
    assert said[0] == said[1] and len(kept.read_text().splitlines()) == 2
    assert said[0] == answers.Answers(llm, tmp_path / "b.jsonl", "cpu").ask("What is it?")
    start = first.generate("What is it?", 3)
    assert said[0].startswith(start) and len(start) < len(said[0])
    with kept.open("a") as file:
        file.write('["torn by a k')
    monkeypatch.setattr(answers, "load_llm", lambda *_: pytest.fail("a model is loaded"))
    again = answers.Answers(llm, kept, "cpu")
    assert again.ask("What is it?") == said[0] and len(kept.read_text().splitlines()) == 2
    with pytest.raises(pytest.fail.Exception, match="is loaded"):
        answers.Answers("another", kept, "cpu").ask("What is it?")


def test_chat_template_without_thinking(llm, tmp_path):
    model = answers.Answers(llm, tmp_path / "a.jsonl", "cpu")
    tokenizer = model.model[1]
    assert model.as_fed("Name it.").tolist() == tokenizer("Name it.", return_tensors="pt")["input_ids"].tolist()
    tokenizer.chat_template = TEMPLATE
    text = "<user>Name it.<assistant><quick>"
    assert model.as_fed("Name it.").tolist() == [tokenizer(text, add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize("content, says", [(b'{"a": 1}', "does not hold answers"), (b'["a"]\n', "line 1: must be"),
                                           (b'["a", 3]\n', "[question, answer]")])
def test_another_file_is_left_alone(tmp_path, content, says):
    kept = tmp_path / "a.jsonl"
    kept.write_bytes(content)
    with pytest.raises(BadData) as error:
        answers.Answers("llm", kept, "cpu")
    assert says in str(error.value) and kept.read_bytes() == content


def test_a_line_is_question_and_answer(llm, tmp_path):
    model = answers.Answers(llm, tmp_path / "a.jsonl", "cpu")
    said = model.ask("One?")
    assert json.loads((tmp_path / "a.jsonl").read_text()) == [f"{llm}: One?", said]


@pytest.mark.parametrize("line", [b"{}", b"[1, 2]", b'["a"]', b"x", b"\xff", b"[" * 100_000])
def test_damaged_lines_are_named(tmp_path, line):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'["a", "b"]\n' + line + b"\n")
    with pytest.raises(BadData, match="x.jsonl, line 2: must be .narration, sentence.; delete the line"):
        answers.read_answers(path, "[narration, sentence]")
