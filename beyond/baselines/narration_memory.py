"""A narration memory (Table 15): past narrations as tokens of a second CLAM, in place of their
words.

The paper compares two ways to keep narrations: the last k narrations as they are (FlowNar-C), or a
CLAM that absorbs the embeddings of all narrations and is read out as N tokens. Here past narrations
are not kept (`last_k` 0), and each segment opens with the N tokens, [ n*N ]\\n, before its visual
memory.

    piece       opening
    segment n   EOT \\n  [ n*N ]\\n  [ m*M ]\\n  [ x*J
    kind        narration  visual      visual     visual

Glossary
    history     tokens of the narration memory, in the language model's space   [.., N, D_lm]
"""
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clam import CLAM
from narrator import NARRATION, VISUAL, Config, Layout, Narrations, Narrator, Tokens
from stream import Context
from support.common.errors import BadData
from support.common.options import setting
from support.engine.first_weights import start_memory

HISTORY = -3                # placeholder id, where the tokens of the narration memory go


@dataclass
class HistoryConfig(Config):
    """Settings with that of Table 15."""
    narration_memory: int = setting(20,
        "Table 15 where given: tokens N of a second CLAM, on narrations, which are then not kept",
        needs="a new narrator")

    def __post_init__(self):
        super().__post_init__()
        if self.last_k != 0:
            raise BadData(f"last_k = {self.last_k}: narration_memory stands for past narrations, "
                          f"so it must be 0")


class HistoryLayout(Layout):
    """The narrator's layout, with N tokens of the narration memory at the start of each segment."""

    def __init__(self, N: int, *options):
        super().__init__(*options)
        self.history_tokens = N

    def opening(self, n: int) -> Tokens:
        whole = super().opening(n)
        is_visual = [kind == VISUAL for kind in whole.kind]
        tokens = whole.select([not visual for visual in is_visual])
        history = self.open + [HISTORY] * self.history_tokens + self.close
        tokens.add(history, VISUAL, segment=n)
        tokens += whole.select(is_visual)
        return tokens


class HistoryNarrator(Narrator):
    """A narrator with a narration memory.

    What `embed` takes as memory, and what `read_outs` returns, is a pair: the tokens of the
    narration memory, and of the visual one. So is the state of `state_after` and `read_outs`, in
    the other order.
    """

    def __init__(self, llm: nn.Module, tokenizer, config: HistoryConfig):
        hidden = llm.config.hidden_size
        if hidden % (2 * config.memory_heads):
            raise BadData(f"narration_memory: width {hidden} is not a multiple of "
                          f"twice {config.memory_heads} heads")
        super().__init__(llm, tokenizer, config)
        self.layout = HistoryLayout(config.narration_memory, tokenizer, config.J, self.memory.M,
                                    config.keep_newline)
        self.narration_memory = CLAM(
            hidden,
            config.narration_memory,
            heads=config.memory_heads,
            target=config.memory_target,
            dropout=config.memory_dropout,
        )
        # from the statistics of words, whatever the others start from
        words = llm.get_input_embeddings().weight[:4096, None]
        start_memory(self.narration_memory, words)

    def embed(self, ids: list[int], x: Tensor | None = None,
              memory: tuple[Tensor, Tensor | None] | None = None) -> Tensor:
        """memory: the tokens of both memories, history [.., N, D_lm] and visual [.., M, D]"""
        history, visual = memory or (None, None)
        e = super().embed(ids, x, visual)
        if HISTORY in ids:
            places = torch.tensor(ids, device=e.device) == HISTORY
            e = e.masked_scatter(places[:, None], history.to(e.dtype))
        return e

    def embed_narrations(self, narrations: Narrations) -> tuple[Tensor, Tensor]:
        """What the narration memory absorbs, from narrations (frame, ids).

        Returns the embeddings [1, L, D_lm] of `Assistant:`, words and EOT of all narrations, and
        where each narration ends in them [1, n].
        """
        ids = []
        ends = []
        for _, words in narrations:
            ids += self.layout.assistant + words + [self.layout.eot]
            ends.append(len(ids))
        return self.embed_words(ids), torch.tensor([ends]).long()

    def embed_words(self, ids: list[int]) -> Tensor:
        """What the narration memory absorbs of tokens with these ids [1, L, D_lm]."""
        ids = torch.tensor([ids], dtype=torch.long, device=self.llm.device)
        return self.llm.get_input_embeddings()(ids).to(self.connector[0].weight.dtype)

    def read_outs(self, x: Tensor, narrations: Narrations, state=None) -> tuple[Tensor, Tensor]:
        visual_state, history_state = state or (None, None)
        e, ends = self.embed_narrations(narrations[:-1])
        history, _ = self.narration_memory(e, ends, history_state)                 # [1, n, N, D_lm]
        return history, super().read_outs(x, narrations, visual_state)

    def state_after(self, x: Tensor, narrations: Narrations) -> tuple[Tensor, Tensor]:
        e, ends = self.embed_narrations(narrations)
        _, history_state = self.narration_memory(e, ends[:, :0])            # read nowhere
        return super().state_after(x, narrations), history_state


def with_history(Base: type[Context]) -> type[Context]:
    """A Context of this kind with the state of the narration memory."""

    class HistoryContext(Base):
        FURTHER_TENSORS = ("history_state",)            # beyond/streams/suspend.py saves it, too

        def __init__(self, narrator: HistoryNarrator, **options):
            super().__init__(narrator, **options)
            memory = narrator.narration_memory
            self.history_state = memory.initial_state().to(narrator.llm.device)
            self.history_queries = memory.queries()

        def read_memory(self) -> None:
            """Also absorb the narration of the present segment. After a restart there is none."""
            super().read_memory()
            tokens = self.cache.tokens
            words = [i for i, kind, number in zip(tokens.ids, tokens.kind, tokens.number)
                     if kind == NARRATION and number == self.segment]
            memory = self.narrator.narration_memory
            if words:
                e = self.narrator.embed_words(words + [self.layout.eot])
                self.history_state = memory.step(e, self.history_state)
            history = memory.read(self.history_state, self.history_queries)     # [1, N, D_lm]
            self.memory = (history, self.memory)

    return HistoryContext
