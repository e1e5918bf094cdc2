"""Questions to a language model (paper App. C.1, C.4): greedy answers, each made once and kept in a .jsonl.

Every line of the file is [question, answer], the question with the model's name before it: several models, and several
commands, can share a file. After a kill, repeat the command; what is answered is not asked again.
"""
import json
from functools import cached_property
from pathlib import Path

import torch

from support.common.devices import device_and_dtype
from support.common.disk import naming
from support.common.errors import BadData
from support.engine.checkpoint import load_llm
from support.files.rewrite import resume


class Answers:
    """Answers of the language model `llm` (folder or hub id), which is loaded at the first question that is new.

    Raises BadData if `kept` is another kind of file or has damaged lines; OSError if it cannot be read or written.
    """

    def __init__(self, llm: str, kept: str | Path, device: str = "auto", dtype: str = "auto"):
        self.llm, self.kept, self.wanted = llm, Path(kept), device_and_dtype(device, dtype)
        if self.kept.exists() and self.kept.read_bytes()[:2] not in (b"", b'["'):      # `resume` cuts off what is torn
            raise BadData(f"{kept}: does not hold answers; choose another file (--answers)")
        self.known = resume(self.kept, "[question, answer]")
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        self.kept.touch()

    @cached_property
    def model(self):
        """(causal LM, tokenizer)"""
        model, tokenizer = load_llm(self.llm, self.wanted[1])
        return model.to(self.wanted[0]).eval(), tokenizer

    def ask(self, question: str, tokens: int = 128) -> str:
        """The answer, of at most so many tokens; "" is an answer, too."""
        key = f"{self.llm}: {question}"
        if key not in self.known:
            self.known[key] = self.generate(question, tokens)
            with naming(self.kept), self.kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps([key, self.known[key]]) + "\n")
        return self.known[key]

    def as_fed(self, question: str) -> torch.Tensor:
        """Ids [1, L]: in the model's chat template if it has one, without thinking if the template knows the switch."""
        tokenizer, chat = self.model[1], bool(self.model[1].chat_template)
        if chat:
            question = tokenizer.apply_chat_template([{"role": "user", "content": question}], tokenize=False,
                                                     add_generation_prompt=True, enable_thinking=False)
        return tokenizer(question, add_special_tokens=not chat, return_tensors="pt")["input_ids"]

    @torch.no_grad()
    def generate(self, question: str, tokens: int) -> str:
        llm, tokenizer = self.model
        ids = self.as_fed(question).to(llm.device)
        written = llm.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
                               num_beams=1, pad_token_id=tokenizer.eos_token_id)[0, ids.shape[1]:]
        return tokenizer.decode(written, skip_special_tokens=True).strip()
