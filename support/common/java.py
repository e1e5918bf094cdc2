"""pycocoevalcap's programs, which need Java: METEOR and the Penn Treebank tokeniser."""
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


def ptb(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The sentences as the Penn Treebank tokeniser leaves them: lower case, no punctuation (see
    java_problem)."""
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    def tokenised(texts: list[str]) -> dict[int, list[str]]:
        captions = {i: [{"caption": java_line(text)}] for i, text in enumerate(texts)}
        return PTBTokenizer().tokenize(captions)

    true = tokenised([true_text for true_text, _ in pairs])
    predicted = tokenised([predicted_text for _, predicted_text in pairs])
    return [(true[i][0], predicted[i][0]) for i in range(len(pairs))]
