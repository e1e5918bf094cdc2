"""python narrator.py: draw the training mask of a short sequence (Fig. 4), or list its tokens."""
from beyond.baselines.narration_memory import HISTORY
from narrator import (
    FRAME, INSTRUCTION, MEMORY, PROMPT, SYSTEM, Layout, Tokens, attention_mask, visible,
)
from support.common.errors import command_line
from support.common.options import Parser, non_negative_int

LEGEND = "p prompt, u instruction, x frame, m memory, A: Assistant:, y narration, $ end of text"
LEGEND_OF_MASK = """\
p prompt, u instruction, x frame, m memory, A Assistant:, y0 narration 0,
$ end of text, n newline, "," [SKIP]. On the left, the segment of each row.
"""


class TextPerToken:
    """A tokenizer for drawing: each text that it is given is one token.

    short: {text: the name by which `decode` returns it}
    """
    bos_token_id = None
    unk_token_id = None
    eos_token_id = 0

    def __init__(self, short: dict[str, str]):
        self.short = short
        self.names = ["$"]                     # of the ids 0, 1, ...

    def __call__(self, text: str, **options) -> dict:
        name = self.short.get(text, text)
        if name not in self.names:
            self.names.append(name)
        return {"input_ids": [self.names.index(name)]}

    def decode(self, ids: list[int]) -> str:
        return "".join(self.names[i] for i in ids)

    def get_vocab(self) -> list[str]:
        return self.names


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
    narrations = [(frame, layout.encode(word)) for frame, word in ((0, "y0"), (2, "y1"), (4, "y2"))]
    return layout, layout.sequence(narrations)


def draw_mask(last_k: int | None):
    """Print the mask of a short sequence: rows are queries, columns keys."""
    layout, tokens = three_segments()
    kept = "all narrations" if last_k is None else f"the last {last_k} narrations"
    print(f"Training mask (Fig. 4), {kept} in context: rows see columns.")
    print(LEGEND_OF_MASK)
    # in 80 columns: two for each token
    short = {"[SKIP]": ",", "\\n": "n", "A:": "A"}
    names = [short.get(name, name) for name in spell(layout, tokens)]
    print("     " + "".join(f"{name:2}" for name in names).rstrip())
    mask = attention_mask(tokens, last_k)
    for row, name, segment in zip(mask.tolist(), names, tokens.segment):
        cells = "".join("■ " if seen else "· " for seen in row)
        print(f"{segment} {name:2} {cells}".rstrip())


def list_tokens(last_k: int | None):
    """List the same sequence token by token, before and after segment 2 is pruned (Fig. 7)."""
    layout, tokens = three_segments()
    stays = visible(tokens, 3, last_k).tolist()                     # what segment 3 sees
    print(f"{LEGEND}\n")
    print("position  token   segment  kind       narration  learned  after pruning")
    for position, name in enumerate(spell(layout, tokens)):
        kind_name = ("prompt", "visual", "narration")[tokens.kind[position]]
        learned = "yes" if tokens.learn[position] else "no"
        after = f"at {position}, still" if stays[position] else "removed"
        print(f"{position:>8}  {name:6}  {tokens.segment[position]:>7}  {kind_name:9}  "
              f"{tokens.number[position]:>9}  {learned:>7}  {after}")


def main():
    parser = Parser(description="Draw the training mask (Fig. 4) of a short sequence.")
    parser.add_argument("--last-k", type=non_negative_int,
                        help="keep only the last k narrations (FlowNar-C)")
    parser.add_argument("--tokens", action="store_true",
                        help="list the tokens of the sequence instead")
    args = parser.parse_args()
    show = list_tokens if args.tokens else draw_mask
    command_line(lambda: show(args.last_k))
