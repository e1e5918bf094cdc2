"""Caption scores (§4.1, App. B.5): how close a predicted sentence is to a true one.

CIDEr-D, ROUGE-L and BLEU are written here; their values equal those of pycocoevalcap. METEOR is the
authors' Java program, which comes with pycocoevalcap; without Java it is not computed.

As in the published evaluator, and unlike common practice, sentences are split at blanks only (no
PTB tokeniser), and CIDEr's document frequencies come from the evaluated pairs themselves.

Glossary
pair        (true sentence, predicted sentence)
r, s        the words or n-grams of the true and of the predicted sentence
"""
from collections import Counter
from importlib.util import find_spec
from math import exp, log
from shutil import which

import numpy as np

N_GRAMS = range(1, 5)
Pair = tuple[str, str]


def captions(pairs: list[Pair],
             with_meteor: bool) -> tuple[dict[str, float], dict[str, list[float]]]:
    """All scores of the corpus, and all scores of each pair; both by name."""
    if not pairs:
        return {}, {}
    each = {"cider": cider(pairs), "rouge_l": rouge_l(pairs)}
    corpus = {name: float(np.mean(scores)) for name, scores in each.items()}
    bleu_per_pair, bleu_corpus = bleu(pairs)
    for n in N_GRAMS:
        each[f"bleu_{n}"] = bleu_per_pair[:, n - 1].tolist()
        corpus[f"bleu_{n}"] = float(bleu_corpus[n - 1])
    if with_meteor:
        each["meteor"], corpus["meteor"] = meteor(pairs)
    return corpus, each


def ngrams(words: list[str], n: int) -> Counter:
    """How often each n-gram occurs."""
    return Counter(tuple(words[i:i + n]) for i in range(len(words) - n + 1))


def cider(pairs: list[Pair]) -> list[float]:
    """CIDEr-D of each pair (Vedantam et al., 2015); 10 is perfect.

    For n = 1 to 4, a sentence is a vector g of tf-idf weights, one for each n-gram w in it:

        g(w)    = count(w) * (log(number of pairs) - log(number of true sentences with w))
        cos_n   = sum_w min(g_s(w), g_r(w)) * g_r(w) / (|g_r| * |g_s|)
        CIDEr-D = 10 * mean_n(cos_n) * exp(-(length of s - length of r)^2 / (2 * 6^2))

    Lengths are numbers of bigrams, as published. A single pair scores 0, because all weights are 0.
    """
    counts = [[[ngrams(text.split(), n) for n in N_GRAMS] for text in pair] for pair in pairs]
    true_sentences_with = Counter()
    for true_counts, _ in counts:
        for grams in true_counts:
            true_sentences_with.update(grams.keys())

    def weights(grams: Counter) -> dict[tuple, float]:
        # an n-gram that no true sentence has is weighted as if one had it
        return {gram: count * (log(len(pairs)) - log(max(1, true_sentences_with[gram])))
                for gram, count in grams.items()}

    scores = []
    for true_counts, predicted_counts in counts:
        cosines = []
        for r, s in zip(map(weights, true_counts), map(weights, predicted_counts)):
            product = sum(min(weight, r[gram]) * r[gram] for gram, weight in s.items() if gram in r)
            r_squared = sum(weight * weight for weight in r.values())
            s_squared = sum(weight * weight for weight in s.values())
            norms = (r_squared * s_squared) ** 0.5
            cosines.append(product / norms if norms else 0.0)
        true_length = true_counts[1].total()           # index 1: n = 2
        predicted_length = predicted_counts[1].total()
        penalty = exp(-(predicted_length - true_length) ** 2 / (2 * 6 ** 2))
        scores.append(10 * float(np.mean(cosines)) * penalty)
    return scores


def rouge_l(pairs: list[Pair], beta: float = 1.2) -> list[float]:
    """ROUGE-L of each pair (Lin, 2004): the F-measure of the longest common subsequence (LCS).

        precision = LCS / words of s
        recall    = LCS / words of r
        ROUGE-L   = (1 + beta^2) * precision * recall / (recall + beta^2 * precision)

    Here, words are split at single blanks: two blanks have an empty word between them.
    """
    scores = []
    for true, predicted in pairs:
        r = true.split(" ")
        s = predicted.split(" ")
        common = longest_common_subsequence(r, s)
        if common == 0:
            scores.append(0.0)
            continue
        precision = common / len(s)
        recall = common / len(r)
        scores.append((1 + beta ** 2) * precision * recall / (recall + beta ** 2 * precision))
    return scores


def longest_common_subsequence(r: list[str], s: list[str]) -> int:
    """The largest number of words that occur in both sentences in the same order."""
    above = [0] * (len(s) + 1)                 # above[j]: of the words of r so far, and s[:j]
    for word in r:
        row = [0]
        for j, other in enumerate(s):
            if word == other:
                row.append(above[j] + 1)
            else:
                row.append(max(above[j + 1], row[j]))
        above = row
    return above[-1]


def bleu(pairs: list[Pair]) -> tuple[np.ndarray, np.ndarray]:
    """BLEU-1 to 4 (Papineni et al., 2002) of each pair [pairs, 4], and of the corpus [4].

        p_m     = n-grams of length m that s shares with r / n-grams of length m in s
        brevity = exp(min(0, 1 - length of r / length of s))
        BLEU-n  = (p_1 * ... * p_n)^(1 / n) * brevity

    For the corpus, numerators, denominators and lengths are first summed over all pairs.
    """
    shared = np.zeros((len(pairs), len(N_GRAMS)))
    possible = np.zeros((len(pairs), len(N_GRAMS)))
    true_length = np.zeros((len(pairs), 1))
    predicted_length = np.zeros((len(pairs), 1))
    for i, (true, predicted) in enumerate(pairs):
        r = true.split()
        s = predicted.split()
        for n in N_GRAMS:
            shared[i, n - 1] = (ngrams(s, n) & ngrams(r, n)).total()
            possible[i, n - 1] = max(0, len(s) - n + 1)
        true_length[i] = len(r)
        predicted_length[i] = len(s)

    def score(shared, possible, true_length, predicted_length) -> np.ndarray:
        tiny = 1e-15                           # both as in pycocoevalcap
        small = 1e-9
        precisions = (shared + tiny) / (possible + small)
        means = np.cumprod(precisions, axis=1) ** (1 / np.array(N_GRAMS))
        length_ratio = (predicted_length + tiny) / (true_length + small)
        return means * np.exp(np.minimum(0, 1 - 1 / length_ratio))

    per_pair = score(shared, possible, true_length, predicted_length)
    corpus = score(*(counts.sum(0, keepdims=True)
                     for counts in (shared, possible, true_length, predicted_length)))
    return per_pair, corpus[0]


# -------------------------------------------------------- pycocoevalcap's programs, which need Java

def java_problem() -> str | None:
    """Why pycocoevalcap's Java programs cannot run here; None if they can."""
    if which("java") is None:
        return "needs Java (apt install default-jre-headless)"
    if find_spec("pycocoevalcap") is None:
        return "needs pycocoevalcap (pip install pycocoevalcap)"
    return None


def meteor(pairs: list[Pair]) -> tuple[list[float], float]:
    """METEOR 1.5 (Denkowski and Lavie, 2014) of each pair, and of the corpus.

    The words of the two sentences are aligned: equal words, stems, synonyms and paraphrases. The
    score is the weighted harmonic mean of precision and recall of the aligned words, times a
    penalty on their breaks in order. Computed by the authors' program (see java_problem).
    """
    from pycocoevalcap.meteor.meteor import Meteor
    true = {}
    predicted = {}
    for i, (true_text, predicted_text) in enumerate(pairs):
        # the program expects each sentence on one line
        true[i] = [" ".join(true_text.split())]
        predicted[i] = [" ".join(predicted_text.split())]
    corpus, scores = Meteor().compute_score(true, predicted)
    return [float(score) for score in scores], float(corpus)


def ptb(pairs: list[Pair]) -> list[Pair]:
    """The sentences as the Penn Treebank tokeniser leaves them: lower case, no punctuation (see
    java_problem)."""
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    def tokenised(texts: list[str]) -> dict[int, list[str]]:
        return PTBTokenizer().tokenize({i: [{"caption": text}] for i, text in enumerate(texts)})

    true = tokenised([true_text for true_text, _ in pairs])
    predicted = tokenised([predicted_text for _, predicted_text in pairs])
    return [(true[i][0], predicted[i][0]) for i in range(len(pairs))]
