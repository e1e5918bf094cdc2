"""METEOR, pycocoevalcap's program that needs Java."""
from importlib.util import find_spec
from shutil import which

from support.common.text import one_line


def java_problem() -> str | None:
    """Why pycocoevalcap's Java programs cannot run here; None if they can."""
    if which("java") is None:
        return "needs Java (apt install default-jre-headless)"
    if find_spec("pycocoevalcap") is None:
        return "needs pycocoevalcap (pip install pycocoevalcap)"
    return None


def run_meteor(pairs: list[tuple[str, str]]) -> tuple[list[float], float]:
    """METEOR of each pair (true sentence, predicted one), and of the corpus."""
    from pycocoevalcap.meteor.meteor import Meteor
    true = {}
    predicted = {}
    for i, (true_text, predicted_text) in enumerate(pairs):
        true[i] = [java_line(true_text)]
        predicted[i] = [java_line(predicted_text)]
    corpus, scores = Meteor().compute_score(true, predicted)
    return [float(score) for score in scores], float(corpus)


def java_line(text: str) -> str:
    """A sentence as these programs read it: one line, without the mark ||| that separates sentences
    there."""
    return one_line(text.replace("|||", " "))
