"""The measures of streamed narrations (paper §4.1, App. B.5), each in a screen: first align, then evaluate.

Every narration closes a segment that began at the one before it. Segments give precision, recall and F1; the sentence of
every true segment is compared with that of the predicted segment that fits it best (GIoU), by the usual caption
scores. Numbers are those of the paper's evaluator, which differs from common practice in two ways: sentences are split at
blanks, nothing else (no PTB tokeniser), and CIDEr's document frequencies come from the evaluated pairs themselves.

Glossary (P predicted, N true segments):
    segments    (start, end) in seconds                                   [P or N, 2]
    iou, giou   of every true with every predicted segment                [N, P]
    pair        (true sentence, predicted sentence)

CIDEr-D (Vedantam et al., 2015), ROUGE-L (Lin, 2004) and BLEU (Papineni et al., 2002) are written here and equal
pycocoevalcap's; METEOR 1.5 (Denkowski and Lavie, 2014) is pycocoevalcap's own Java program, or is not computed.
"""
from collections import Counter, defaultdict
from dataclasses import dataclass
from importlib.util import find_spec
from math import exp, log
from shutil import which

import numpy as np

TAU = 0.5                    # IoU from which two segments match
N_GRAMS = range(1, 5)
Pair = tuple[str, str]


@dataclass
class Told:
    """One narration: seconds, sentence, and for the toy the words in it that only visual memory can give."""
    time: float
    text: str
    memory: tuple[str, ...] = ()


@dataclass
class Truth:
    """The ground truth of one video: one list of narrations per annotator; the first segment begins at `start` (s)."""
    annotators: list[list[Told]]
    start: float = 0.0


# ---------------------------------------------------------------------- temporal alignment

def segments(times: list[float], start: float = 0.0) -> np.ndarray:
    """Narration times chained to segments (previous time, time), the first from `start`; reversed ones are turned."""
    bounds = np.array([start, *times], dtype=float)
    return np.sort(np.stack([bounds[:-1], bounds[1:]], axis=1), axis=1)


def overlaps(truth: np.ndarray, predicted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """IoU and generalised IoU of true [N, 2] with predicted [P, 2] segments -> [N, P] each."""
    latest, earliest = (f(truth[:, None], predicted[None]) for f in (np.maximum, np.minimum))      # [N, P, 2]
    intersection = np.clip(earliest[..., 1] - latest[..., 0], 0, None)
    union = np.clip(np.diff(truth) + np.diff(predicted).T - intersection, 1e-8, None)
    enclosing = np.clip(latest[..., 1] - earliest[..., 0], 1e-8, None)
    iou = intersection / union
    return iou, iou - (enclosing - union) / enclosing


def alignment(iou: np.ndarray) -> dict[str, float]:
    """Precision, recall and F1 at TAU of one video (App. B.5) from iou [N, P]."""
    if iou.size == 0:
        return {"precision": 0.0, "recall": 0.0, "f1": 0.0}
    precision, recall = float((iou >= TAU).any(0).mean()), float((iou >= TAU).any(1).mean())
    return {"precision": precision, "recall": recall, "f1": 2 * precision * recall / max(precision + recall, 1e-8)}


def match(truth: Truth, predicted: list[Told]) -> tuple[dict[str, float], list[tuple[Told, str]]]:
    """Alignment of one video, and each true narration with the sentence that fits its segment best ("" if there is
    none), whatever the overlap. Each annotator's list is chained on its own."""
    told = [narration for annotator in truth.annotators for narration in annotator]
    true = [segments([y.time for y in annotator], truth.start) for annotator in truth.annotators]
    iou, giou = overlaps(np.concatenate([*true, np.empty((0, 2))]), segments([y.time for y in predicted], truth.start))
    best = giou.argmax(1) if giou.shape[1] else []
    said = [predicted[i].text for i in best] if len(best) else [""] * len(told)
    return alignment(iou), list(zip(told, said))


# ---------------------------------------------------------------------- caption scores

def ngrams(words: list[str], n: int) -> Counter:
    return Counter(zip(*(words[i:] for i in range(n))))


def cider(pairs: list[Pair]) -> list[float]:
    """CIDEr-D of each pair: cosine of tf-idf vectors of n-grams, clipped, with a penalty on length; 10 is perfect.

    A single pair has no document frequencies to speak of and scores 0.
    """
    counts = [[[ngrams(text.split(), n) for n in N_GRAMS] for text in pair] for pair in pairs]
    frequency = Counter(gram for true, _ in counts for grams in true for gram in grams)
    idf = defaultdict(lambda: log(len(pairs)), {gram: log(len(pairs)) - log(df) for gram, df in frequency.items()})
    scores = []
    for true, said in counts:
        cosines = []
        for r, s in zip(true, said):
            r, s = ({gram: count * idf[gram] for gram, count in grams.items()} for grams in (r, s))
            product = sum(min(weight, r[gram]) * r[gram] for gram, weight in s.items() if gram in r)
            norm = (sum(w * w for w in r.values()) * sum(w * w for w in s.values())) ** 0.5
            cosines.append(product / norm if norm else 0.0)
        longer = said[1].total() - true[1].total()                                    # in bigrams, as published
        scores.append(10 * float(np.mean(cosines)) * exp(-longer ** 2 / (2 * 6 ** 2)))
    return scores


def rouge_l(pairs: list[Pair], beta: float = 1.2) -> list[float]:
    """ROUGE-L of each pair: F-measure of the longest common subsequence (words split at single blanks)."""
    scores = []
    for true, said in pairs:
        r, s = true.split(" "), said.split(" ")
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
    for row, (true, said) in zip(counts, pairs):
        r, s = true.split(), said.split()
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
    clean = lambda text: " ".join(text.split())                                       # its protocol is a line of text
    corpus, scores = Meteor().compute_score({i: [clean(t)] for i, (t, _) in enumerate(pairs)},
                                            {i: [clean(s)] for i, (_, s) in enumerate(pairs)})
    return [float(score) for score in scores], float(corpus)


def ptb(pairs: list[Pair]) -> list[Pair]:
    """Sentences as the Penn Treebank tokeniser leaves them: lower case, no punctuation (see java_problem)."""
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer
    columns = [PTBTokenizer().tokenize({i: [{"caption": text}] for i, text in enumerate(column)}) for column in zip(*pairs)]
    return [(columns[0][i][0], columns[1][i][0]) for i in range(len(pairs))]


def captions(pairs: list[Pair], with_meteor: bool) -> tuple[dict[str, float], dict[str, list[float]]]:
    """All scores: of the corpus, and of each pair."""
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


# ---------------------------------------------------------------------- a whole evaluation

def evaluate(truths: dict[str, Truth], predictions: dict[str, list[Told]], tokenise: bool = False) -> tuple[dict, dict]:
    """All measures of a set of videos, and of each video: temporal alignment is a mean over videos, captions are scored
    over the pairs of all videos. METEOR is None where it cannot be computed.

    Where the truth says which words need visual memory (the toy): `exact`, the share of sentences whose match says the
    very same; the same without those that need memory; and the share of those words that the match contains.
    """
    rows, matches = {}, {}
    for name, truth in truths.items():
        rows[name], matches[name] = match(truth, predictions[name])
    pairs = [(told.text, said) for matched in matches.values() for told, said in matched]
    problem = java_problem()
    corpus, each = captions(ptb(pairs) if tokenise and pairs else pairs, problem is None)
    result = {"videos": len(rows), "narrations": len(pairs), "predicted": sum(map(len, predictions.values()))}
    result |= {name: float(np.mean([row[name] for row in rows.values()])) for name in ("precision", "recall", "f1")}
    result |= {"meteor": None} | corpus
    begin = 0
    for name, matched in matches.items():
        end = begin + len(matched)
        rows[name] |= {"narrations": len(matched)} | {
            score: float(np.mean(values[begin:end])) for score, values in each.items() if matched}
        begin = end
    every = [pair for matched in matches.values() for pair in matched]
    if any(told.memory for told, _ in every):
        result |= recall_of_words(every)
        for name, matched in matches.items():
            rows[name] |= recall_of_words(matched)
    return result, rows


def recall_of_words(matched: list[tuple[Told, str]]) -> dict[str, float | None]:
    """The toy's own measures; None where there is nothing to measure."""
    exact = [(told.text == said, bool(told.memory)) for told, said in matched]
    plain = [right for right, needs in exact if not needs]
    words = [word in said.rstrip(".").split() for told, said in matched for word in told.memory]
    share = lambda right: float(np.mean(right)) if right else None
    return {"exact": share([right for right, _ in exact]), "exact_without_memory": share(plain), "memory_words": share(words)}
