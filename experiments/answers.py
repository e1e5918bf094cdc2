"""Questions to a language model (paper §4.1, App. C.4): greedy answers, each made once and kept
in a .jsonl.

A line of the file is [question, answer]; the name of the model stands before the question, so
several models and several commands can share a file. After a kill, repeat the command: questions
that are answered are not asked again.
"""
import argparse
import json
from functools import cached_property
from pathlib import Path

import torch

from support.common.devices import device_and_dtype
from support.common.disk import check_distinct, check_writable, expecting, read_text
from support.common.options import json_option
from support.engine.checkpoint import load_llm
from support.files.narrations import is_list_of


class Answers:
    """Answers of the language model `llm` (folder or hub id). The model is loaded at the first new
    question.

    kept        the .jsonl file

    Raises BadData if `kept` is another kind of file or has damaged lines.
    """

    def __init__(self, llm: str, kept: str | Path, device: str = "auto"):
        self.llm = llm
        self.kept = Path(kept)
        self.device, self.dtype = device_and_dtype(device, "auto")
        self.known: dict[str, str] = {}                # {"MODEL: question": answer}
        lines = read_text(self.kept).split("\n") if self.kept.exists() else []
        for number, line in enumerate(lines, 1):
            if line:
                with expecting(f"{kept}, line {number}", "[question, answer]; delete the line, or "
                                                         "choose another file (--answers)"):
                    question, answer = json.loads(line)
                    if not is_list_of([question, answer], str):
                        raise TypeError("no text")
                    self.known[question] = answer

    @cached_property
    def model(self):
        """(causal LM, tokenizer)"""
        model, tokenizer = load_llm(self.llm, self.dtype)
        return model.to(self.device).eval(), tokenizer

    def ask(self, question: str, tokens: int = 128) -> str:
        """The answer, of at most so many tokens. It can be empty."""
        key = f"{self.llm}: {question}"
        if key not in self.known:
            self.known[key] = self.generate(question, tokens)
            self.kept.parent.mkdir(parents=True, exist_ok=True)
            with self.kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps([key, self.known[key]]) + "\n")
        return self.known[key]

    def as_fed(self, question: str) -> torch.Tensor:
        """Ids [1, L] of a question, in the chat template of the model if it has one, without
        thinking if the template has the switch.
        """
        _, tokenizer = self.model
        has_template = bool(tokenizer.chat_template)
        if has_template:
            question = tokenizer.apply_chat_template([{"role": "user", "content": question}],
                                                     tokenize=False, add_generation_prompt=True,
                                                     enable_thinking=False)
        # a template has written the special tokens
        return tokenizer(question, add_special_tokens=not has_template,
                         return_tensors="pt")["input_ids"]

    @torch.no_grad()
    def generate(self, question: str, tokens: int) -> str:
        llm, tokenizer = self.model
        ids = self.as_fed(question).to(llm.device)
        output = llm.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens,
                              do_sample=False, num_beams=1, pad_token_id=tokenizer.eos_token_id)
        return tokenizer.decode(output[0, ids.shape[1]:], skip_special_tokens=True).strip()


# ------------------------------------------------------------- what summaries and objects share

def question_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pred", required=True, help="predictions, as for evaluate.py score")
    parser.add_argument("--llm", required=True, help="language model: folder or hub id")
    parser.add_argument("--answers", default="answers.jsonl", metavar="FILE",
                        help="the language model's answers; none is asked for twice "
                             "(default %(default)s)")
    json_option(parser)


def answers_for(args: argparse.Namespace) -> Answers:
    """BadData if the file of answers is read as something else, too, or cannot be written."""
    for given in (args.pred, args.gt or ""):
        check_distinct(args.answers, given)
    check_writable(args.answers)
    return Answers(args.llm, args.answers)
