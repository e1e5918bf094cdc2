"""METEOR, a program in Java that pycocoevalcap brings along."""
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from tempfile import TemporaryFile

from support.common.progress import say_as_one
from support.common.text import one_line

# of any user: numbers with a decimal point, text in UTF-8
JAVA = ("java", "-Duser.language=en", "-Duser.country=US", "-Dfile.encoding=UTF-8", "-Xmx2G", "-jar")
METEOR = ("meteor-1.5.jar", "-", "-", "-stdio", "-l", "en", "-norm")

say_problem = cache(say_as_one)     # groups of videos are measured one by one, and have one problem


def java_problem() -> str | None:
    """Why Java's METEOR cannot run here; None if nothing is missing."""
    if which("java") is None:
        return "needs Java (apt install default-jre-headless)"
    if find_spec("pycocoevalcap") is None:
        return "needs pycocoevalcap (pip install pycocoevalcap)"
    return None


def meteor(pairs: list[tuple[str, str]]) -> tuple[list[float], float] | None:
    """METEOR 1.5 (Denkowski and Lavie, 2014) of each pair (true sentence, predicted one), and of the
    corpus. None, and a line that says why, where Java fails.

    The words of the two sentences are aligned: equal words, stems, synonyms and paraphrases. The
    score is the weighted harmonic mean of precision and recall of the aligned words, times a
    penalty on their breaks in order.
    """
    with TemporaryFile("w+", encoding="utf-8", errors="replace") as messages:
        try:
            return ask_meteor(pairs, messages)
        except (OSError, ValueError) as error:         # Java has ended, or no number came
            messages.seek(0)
            problem = messages.readline().strip() or str(error)
            say_problem(f"METEOR is not computed: {problem}")
            return None


def ask_meteor(pairs: list[tuple[str, str]], messages) -> tuple[list[float], float]:
    """OSError or ValueError where Java does not answer as it should."""
    folder = Path(find_spec("pycocoevalcap.meteor.meteor").origin).parent
    with subprocess.Popen([*JAVA, *METEOR], cwd=folder, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=messages, text=True,
                          encoding="utf-8") as java:
        try:
            statistics = []
            for pair in pairs:
                # in one line, without the mark that separates sentences there
                words = [one_line(text.replace("|||", " ")) for text in pair]
                print("SCORE", *words, sep=" ||| ", file=java.stdin, flush=True)
                statistics.append(java.stdout.readline().strip())
            print("EVAL", *statistics, sep=" ||| ", file=java.stdin, flush=True)
            scores = [float(java.stdout.readline()) for _ in pairs]
            return scores, float(java.stdout.readline())
        finally:
            java.kill()
