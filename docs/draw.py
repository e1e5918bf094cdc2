"""Draws the sequence of tokens for the README, for a light and a dark page:

    python docs/draw.py             assets/sequence.svg and assets/sequence-dark.svg

What a segment feeds, sees and has lost is what the code says: `Layout` and `visible` (narrator.py).
"""
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from commands.drawing import COLOURS, parts, spell, three_segments
from narrator import visible

# pixels
LEFT = 128                              # where the tokens begin, right of the rows' names
HEIGHT = 28                             # of a token
ROW = 46                                # from row to row
WORDS = {"p": "system", "u": "user", "[SKIP]": ","}
LOOKS = {"fed": "fed in this segment", "kept": "kept from before, and seen",
         "removed": "removed when the sentence was done (Alg. 2, line 18)"}
ROWS = [(["segment 0"], 0, None), (["segment 1"], 1, None), (["segment 2"], 2, None),
        (["segment 2 with", "FlowNar-C, k = 1"], 2, 1)]     # name, segment, last_k
INK = {"light": "#1f2328", "dark": "#e6edf3"}       # of words, as GitHub's


def text(x: float, y: float, words: str, ink: str, anchor: str = "start") -> str:
    """Words in the middle of a row whose top is y."""
    return f'<text x="{x:g}" y="{y + 19:g}" fill="{ink}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, words: str, colour: str, ink: str, look: str) -> str:
    """A token; look: one of LOOKS."""
    paint = {
        "fed": f'fill="{colour}" fill-opacity=".5"',
        "kept": f'fill="{colour}" fill-opacity=".16"',
        "removed": 'fill="none" stroke-dasharray="3 3"',
    }[look]
    svg = (f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{HEIGHT}" rx="4" '
           f'stroke="{colour}" {paint}/>')
    if look != "removed":
        svg += text(x + width / 2, y, words, ink, "middle")
    return svg


def row_of_tokens(y: float, now: int, last_k: int | None, ink: str) -> tuple[list[str], float]:
    """What segment `now` feeds, sees and has lost, and where the row ends [pixels]."""
    layout, tokens = three_segments()
    segment = tokens.segment
    seen = visible(tokens, now, last_k)
    svg = []
    x = LEFT
    frame = -1                                              # the latest one
    for i, (name, part) in enumerate(zip(spell(layout, tokens), parts(tokens))):
        if name == "\\n" or segment[i] > now:              # newlines are left out
            continue
        if name == "x":
            frame += 1
            name = f"x{frame}"
        elif name == "m":
            name = f"m{segment[i]}"                         # what opens segment 1, 2
        if segment[i] == now:
            look = "fed"
        elif seen[i]:
            look = "kept"
        else:
            look = "removed"
        words = WORDS.get(name, name)
        width = 11 + 7.5 * len(words)
        svg.append(box(x, y, width, words, COLOURS[part], ink, look))
        x += width + 3
    return svg, x


def legend(y: float, entries: list[tuple[str, str, str]], ink: str) -> list[str]:
    """Boxes (meaning, colour, look) with their meanings."""
    svg = []
    x = 1                                                   # half a stroke is left of it
    for meaning, colour, look in entries:
        svg.append(box(x, y, 20, "", colour, ink, look))
        svg.append(text(x + 27, y, meaning, ink))
        x += 50 + 7 * len(meaning)
    return svg


def draw(ink: str) -> str:
    """The drawing, as SVG."""
    svg = []
    for number, (name, now, last_k) in enumerate(ROWS):
        y = 6 + ROW * number
        boxes, right = row_of_tokens(y, now, last_k, ink)
        svg += boxes
        first = y - 9 * (len(name) - 1)                     # lines of a name: 18 apart
        svg += [text(0, first + 18 * i, line, ink) for i, line in enumerate(name)]
    y = 12 + ROW * len(ROWS)
    svg += legend(y, [(meaning, ink, look) for look, meaning in LOOKS.items()], ink)
    y += HEIGHT + 8
    svg += legend(y, [(part, colour, "fed") for part, colour in COLOURS.items()], ink)
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right:g} {y + HEIGHT + 6:g}" '
            'font-family="system-ui, sans-serif" font-size="14">')
    return "\n".join([head, *svg, "</svg>"]) + "\n"


def main():
    for name, ink in (("sequence.svg", INK["light"]), ("sequence-dark.svg", INK["dark"])):
        (ROOT / "assets" / name).write_text(draw(ink), encoding="utf-8")


if __name__ == "__main__":
    main()
