"""What is told of each Decision of a stream: a row of --trace, a line of --explain."""
from itertools import groupby
from textwrap import fill

from beyond.commands.drawing import spell
from narrator import NARRATION, VISUAL, Config, Layout
from stream import Cache, Decision

LEGEND = """\
legend: what is fed: prompt, x a token of the frame, m of the memory, n of the
        narrations' memory (x*10: ten of them), $ end of text; [SKIP] says that
        the frame before had no narration
        p is p([SKIP]). p <= theta: the segment ends here, and its narration
        follows (Eq. 1); low: theta_low, soon after a narration
        l: the position counter; cache, after the frame: text (prompt,
        narrations) + visual (memory, frames) tokens"""
LEGEND_OF_MEMORY = """
        memory: which place showed what last (how sure, how long ago), the
        surest first, as a linear probe reads it from the memory tokens that
        open the next segment. Below 0.5 most are guesses; a place that has
        shown nothing yet gets a guess, too. The narrator never uses it"""
WIDTH = 80                                      # of a terminal, in characters


def restarted(decision: Decision, layout: Layout) -> bool:
    """Whether the segment was restarted before the frame, that is, opened without a narration."""
    fed = decision.fed
    return len(fed) > 0 and fed.kind[0] == VISUAL and fed.ids[0] != layout.skip


def sizes_of(layout: Layout) -> dict[str, int]:
    """Tokens of the prompt, of the memory with its brackets, and of a frame with its [SKIP]."""
    return {
        "prompt": len(layout.prompt + layout.user + layout.newline),
        "memory": layout.M + len(layout.open + layout.close) if layout.M else 0,
        "frame": layout.J + 1,
    }


def trace_row(decision: Decision, layout: Layout, cache: Cache) -> dict:
    """A line of --trace. The first one says also how long the parts of a sequence are.

    kept: the first and the last narration in the cache; [] if there are none
    """
    tokens = cache.tokens
    kept = [number for kind, number in zip(tokens.kind, tokens.number) if kind == NARRATION]
    row = {
        "frame": decision.frame,
        "p_skip": decision.p_skip,
        "theta": decision.theta,
        "narrate": decision.narration is not None,
        "position": decision.position,
        "text_tokens": decision.text_tokens,
        "visual_tokens": decision.visual_tokens,
        "forced": decision.forced,
        "kept": [min(kept), max(kept)] if kept else [],
    }
    if restarted(decision, layout):
        row["restart"] = True
    if decision.frame == 0:
        row["sizes"] = sizes_of(layout)
    return row


def explain(decision: Decision, layout: Layout, config: Config) -> str:
    """A line of --explain: one frame in words. A second one where it narrates.

    It says what was fed, p([SKIP]) and its threshold, the counter and the cache; and what was pruned.
    """
    fed = []
    for name, group in groupby(spell(layout, decision.fed, prompt="prompt")):
        count = len(list(group))
        fed.append(f"{name}*{count}" if count > 1 else name)

    line = f"frame {decision.frame}: "
    if restarted(decision, layout):
        line += "restarted; "
    line += " ".join(fed) or "nothing more"
    if decision.p_skip is not None:
        sign = "<=" if decision.p_skip <= decision.theta else ">"
        low = "" if decision.theta == config.theta else " low"
        line += f"; p {decision.p_skip:.3f} {sign} {decision.theta:g}{low}"
    line += f"; l {decision.position}; cache {decision.text_tokens} + {decision.visual_tokens}"
    if decision.narration:
        line += f"\n  narration {decision.narration.n}: {decision.pruned} tokens removed"
    if decision.forced:
        which = "first" if decision.p_skip is None else "last"
        line += f" (the {which} frame always narrates)"
    return line


def explain_memory(places: list[str]) -> str:
    """A line of --explain on what the memory holds, each place "place: thing (how sure, how long
    ago)", broken between places where it is wider than a terminal.
    """
    unbroken = [place.replace(" ", "\u00a0") for place in places]
    line = "memory: " + ("; ".join(unbroken) or "nothing")
    return fill(line, WIDTH, subsequent_indent=" " * 8).replace("\u00a0", " ")
