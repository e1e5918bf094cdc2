"""What a stream does, frame by frame, in words (stream.py --explain)."""
from itertools import groupby

LEGEND = """\
legend: fed: prompt, x a token of the frame, m of the memory, n of the narrations' memory, $ end of text
        (x x 10: ten of them); [SKIP] says that the frame before had no narration
        p([SKIP]) <= theta: the segment ends here, and its narration follows (Eq. 1)
        l: the position counter; cache after the frame: text (prompt, narrations) + visual (memory, frames) tokens"""


def explain(decision, layout, config, static: bool = False) -> str:
    """One frame in words: what was fed, p([SKIP]) and its threshold, what was pruned, the counter, the cache."""
    runs = [(name, len(list(run))) for name, run in groupby(layout.spell(decision.fed, prompt="prompt"))]
    fed = " ".join(name + (f" x {n}" if n > 1 else "") for name, n in runs) or "nothing more"
    line = f"frame {decision.frame}: {'the segment is restarted; ' * decision.restart}fed {fed}"
    if decision.p_skip is None:
        line += "; the first frame always narrates"
    else:
        which = "theta" if static or decision.theta == config.theta else f"theta_low, within {config.refractory:g} s"
        sign = "<=" if decision.p_skip <= decision.theta else ">"
        line += f"; p([SKIP]) = {decision.p_skip:.4f} {sign} {decision.theta:g} ({which})"
        line += "; the last frame always narrates" if decision.forced else ""
    if decision.narration:
        line += f"; narration {decision.narration.n}, {decision.pruned} tokens removed"
    return line + f"; l = {decision.position}, cache {decision.text_tokens} text + {decision.visual_tokens} visual"
