"""Caption scores (paper §4.1, App. B.5): how close a predicted sentence is to a true one.

CIDEr-D (Vedantam et al., 2015), ROUGE-L (Lin, 2004) and BLEU (Papineni et al., 2002) are written here and equal
pycocoevalcap's; METEOR 1.5 (Denkowski and Lavie, 2014) is pycocoevalcap's own Java program, or is not computed.

As in the published evaluator, and unlike common practice, sentences are split at blanks only (no PTB tokeniser), and
CIDEr's document frequencies come from the evaluated pairs themselves.

Glossary:
    pair        (true sentence, predicted sentence)
"""
from collections import Counter, defaultdict
from importlib.util import find_spec
from math import exp, log
from shutil import which

import numpy as np

N_GRAMS = range(1, 5)
Pair = tuple[str, str]


def ngrams(words: list[str], n: int) -> Counter:
    return Counter(zip(*(words[i:] for i in range(n))))


def cider(pairs: list[Pair]) -> list[float]:
    """CIDEr-D of each pair: cosine of tf-idf vectors of n-grams, clipped, with a penalty on length; 10 is perfect.

    A single pair scores 0: every n-gram is in every document.
    """
    counts = [[[ngrams(text.split(), n) for n in N_GRAMS] for text in pair] for pair in pairs]
    frequency = Counter(gram for true, _ in counts for grams in true for gram in grams)
    idf = defaultdict(lambda: log(len(pairs)), {gram: log(len(pairs)) - log(df) for gram, df in frequency.items()})
    scores = []
    for true, predicted in counts:
        cosines = []
        for r, s in zip(true, predicted):
            r, s = ({gram: count * idf[gram] for gram, count in grams.items()} for grams in (r, s))
            product = sum(min(weight, r[gram]) * r[gram] for gram, weight in s.items() if gram in r)
            norm = (sum(w * w for w in r.values()) * sum(w * w for w in s.values())) ** 0.5
            cosines.append(product / norm if norm else 0.0)
        longer = predicted[1].total() - true[1].total()                                    # in bigrams, as published
        scores.append(10 * float(np.mean(cosines)) * exp(-longer ** 2 / (2 * 6 ** 2)))
    return scores


def rouge_l(pairs: list[Pair], beta: float = 1.2) -> list[float]:
    """ROUGE-L of each pair: F-measure of the longest common subsequence (words split at single blanks)."""
    scores = []
    for true, predicted in pairs:
        r, s = true.split(" "), predicted.split(" ")
        lengths = [0] * (len(s) + 1)                                                  # one row of the table
        for word in r:
            diagonal = 0
            for j, other in enumerate(s, 1):
                diagonal, lengths[j] = lengths[j], diagonal + 1 if word == other else max(lengths[j], lengths[j - 1])
        precision, recall = lengths[-1] / len(s), lengths[-1] / len(r)
        scores.append((1 + beta ** 2) * precision * recall / (recall + beta ** 2 * precision) if lengths[-1] else 0.0)
    return scores


def bleu(pairs: list[Pair]) -> tuple[np.ndarray, np.ndarray]:
    """BLEU-1..4 of each pair [pairs, 4] and of the corpus [4], which adds up the counts first."""
    counts = np.zeros((len(pairs), 10))                                               # correct, possible, lengths
    for row, (true, predicted) in zip(counts, pairs):
        r, s = true.split(), predicted.split()
        row[:4] = [(ngrams(s, n) & ngrams(r, n)).total() for n in N_GRAMS]
        row[4:8] = [max(0, len(s) - n + 1) for n in N_GRAMS]
        row[8:] = len(s), len(r)

    def score(counts: np.ndarray) -> np.ndarray:
        tiny, small = 1e-15, 1e-9                                                     # as in pycocoevalcap
        precisions = np.cumprod((counts[:, :4] + tiny) / (counts[:, 4:8] + small), axis=1) ** (1 / np.arange(1, 5))
        ratio = (counts[:, 8:9] + tiny) / (counts[:, 9:] + small)
        return precisions * np.exp(np.minimum(0, 1 - 1 / ratio))                      # brevity penalty

    return score(counts), score(counts.sum(0, keepdims=True))[0]


def java_problem() -> str | None:
    """Why pycocoevalcap's Java programs cannot run here; None if they can."""
    if which("java") is None:
        return "needs Java (apt install default-jre-headless)"
    if find_spec("pycocoevalcap") is None:
        return "needs pycocoevalcap (pip install pycocoevalcap)"
    return None


def meteor(pairs: list[Pair]) -> tuple[list[float], float]:
    """METEOR 1.5 of each pair and of the corpus, by the authors' program (see java_problem)."""
    from pycocoevalcap.meteor.meteor import Meteor
    clean = lambda text: " ".join(text.split())                                       # it takes one line a sentence
    corpus, scores = Meteor().compute_score({i: [clean(t)] for i, (t, _) in enumerate(pairs)},
                                            {i: [clean(s)] for i, (_, s) in enumerate(pairs)})
    return [float(score) for score in scores], float(corpus)


def ptb(pairs: list[Pair]) -> list[Pair]:
    """Sentences as the Penn Treebank tokeniser leaves them: lower case, no punctuation (see java_problem)."""
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer
    true, predicted = (PTBTokenizer().tokenize({i: [{"caption": text}] for i, text in enumerate(column)})
                       for column in zip(*pairs))
    return [(true[i][0], predicted[i][0]) for i in range(len(pairs))]


def captions(pairs: list[Pair], with_meteor: bool) -> tuple[dict[str, float], dict[str, list[float]]]:
    """All scores of the corpus, and all scores of each pair."""
    if not pairs:
        return {}, {}
    each = {"cider": cider(pairs), "rouge_l": rouge_l(pairs)}
    corpus = {name: float(np.mean(scores)) for name, scores in each.items()}
    every, whole = bleu(pairs)
    for n in N_GRAMS:
        each[f"bleu_{n}"], corpus[f"bleu_{n}"] = every[:, n - 1].tolist(), float(whole[n - 1])
    if with_meteor:
        each["meteor"], corpus["meteor"] = meteor(pairs)
    return corpus, each
