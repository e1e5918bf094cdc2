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


def java_line(text: str) -> str:
    """A sentence as these programs read it: one line, without the mark ||| that separates sentences
    there."""
    return one_line(text.replace("|||", " "))
