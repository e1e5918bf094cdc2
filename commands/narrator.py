"""python narrator.py: draw the training mask of a short sequence (Fig. 4), or list its tokens."""
from __future__ import annotations

from torch import Tensor

from baselines.narration_memory import HISTORY
from narrator import (
    FRAME, INSTRUCTION, MEMORY, PROMPT, SYSTEM, Layout, Tokens, attention_mask, visible,
)
from support.common.errors import command_line
from support.common.options import Parser, non_negative_int

LEGEND = "p prompt, u instruction, x frame, m memory, A: Assistant:, y narration, $ end of text"


class TextPerToken:
    """A tokenizer for drawing: each text that it is given is one token.

    short: {text: the name by which `decode` returns it}
    """
    bos_token_id = None
    eos_token_id = 1
    FIRST = 2                                  # the id of the first text

    def __init__(self, short: dict[str, str]):
        self.short = short
        self.texts: list[str] = []

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict:
        if text not in self.texts:
            self.texts.append(text)
        return {"input_ids": [self.texts.index(text) + self.FIRST]}

    def decode(self, ids: list[int]) -> str:
        texts = [self.texts[i - self.FIRST] for i in ids]
        return "".join(self.short.get(text, text) for text in texts)

    def get_vocab(self) -> list[str]:
        return self.texts


def print_matrix(mask: Tensor, labels: list[str], segments: list[int]) -> None:
    """Print mask [L, L], one line a row, with the label and the segment of each token."""
    print("segment     " + " ".join(f"{label:>2}" for label in labels))
    for row, label, segment in zip(mask, labels, segments):
        cells = " ".join(" ■" if seen else " ·" for seen in row.tolist())
        print(f"{segment:>7}  {label:>2} {cells}")


def spell(layout: Layout, tokens: Tokens, prompt: str = "") -> list[str]:
    """A short name for each token: x frame, m and n memories, $ end of text, [SKIP], or its text.

    prompt: if given, the name of all tokens of the prompt.
    """
    short = {FRAME: "x", MEMORY: "m", HISTORY: "n", layout.eot: "$", layout.skip: "[SKIP]"}
    names = []
    for token, kind in zip(tokens.ids, tokens.kind):
        if prompt and kind == PROMPT:
            names.append(prompt)
        elif token in short:
            names.append(short[token])
        else:
            names.append(layout.tokenizer.decode([token]).replace("\n", "\\n"))
    return names


def three_segments() -> tuple[Layout, Tokens]:
    """Three segments of 1, 2 and 2 frames with J = 1 and M = 1, each narrated by one word."""
    short = {SYSTEM + "\n\n": "p", "User: " + INSTRUCTION: "u", "]\n": "]", "Assistant:": "A:"}
    layout = Layout(TextPerToken(short), J=1, M=1)
    narrations = []
    for n in range(3):
        last_frame = 2 * n
        narrations.append((last_frame, layout.encode(f"y{n}")))
    return layout, layout.sequence(narrations)


def draw_mask(last_k: int | None):
    """Print the mask of a short sequence: rows are queries, columns keys."""
    layout, tokens = three_segments()
    labels = [name.replace("[SKIP]", ",") for name in spell(layout, tokens)]
    mask = attention_mask(tokens, last_k)
    kept = "all narrations" if last_k is None else f"the last {last_k} narrations"
    print(f"Training mask (Fig. 4), {kept} in context: rows attend to columns.")
    print(f'{LEGEND}; "," is [SKIP]\n')
    print_matrix(mask, labels, tokens.segment)


def list_tokens(last_k: int | None):
    """List the same sequence token by token, before and after segment 2 is pruned (Fig. 7)."""
    layout, tokens = three_segments()
    kind, segment, number = tokens.for_rule()
    stays = visible(kind, segment, number, 3, last_k).tolist()      # what segment 3 sees
    print(f"{LEGEND}\n")
    print("position  token   segment  kind       narration  learned  position after pruning")
    for position, name in enumerate(spell(layout, tokens)):
        kind_name = ("prompt", "visual", "narration")[kind[position]]
        narration = "-" if number[position] < 0 else int(number[position])
        learned = "yes" if tokens.learn[position] else "no"
        after = "removed"
        if stays[position]:
            renumbered = sum(stays[:position])
            after = f"{position} (renumbered, it would be {renumbered})"
        print(f"{position:>8}  {name:6}  {segment[position]:>7}  {kind_name:9}  {narration:>9}  "
              f"{learned:>7}  {after}")


def main():
    parser = Parser(description="Draw the training mask (Fig. 4) of a short sequence.")
    parser.add_argument("--last-k", type=non_negative_int,
                        help="keep only the last k narrations (FlowNar-C)")
    parser.add_argument("--tokens", action="store_true",
                        help="list the tokens of the sequence instead")
    args = parser.parse_args()
    draw = list_tokens if args.tokens else draw_mask
    command_line(lambda: draw(args.last_k))
