"""What the toy measures of narrations beside the paper's scores: whole sentences, and the words that
only visual memory can give."""
from support.files.narrations import Sentence


def recall_of_words(pairs: list[tuple[Sentence, str]]) -> dict[str, float | None]:
    """Measures of pairs (true sentence, predicted text); None where there is nothing to measure.

    exact                   share of sentences that equal their match
    memory_words            share of the words that need memory that the match contains
    exact_without_memory    as exact, of sentences without such words
    """
    exact = []
    exact_without_memory = []
    memory_words = []
    for sentence, text in pairs:
        exact.append(sentence.text == text)
        if not sentence.memory_words:
            exact_without_memory.append(sentence.text == text)
        words = text.rstrip(".").split()
        memory_words += [word in words for word in sentence.memory_words]
    return {
        "exact": share(exact),
        "memory_words": share(memory_words),
        "exact_without_memory": share(exact_without_memory),
    }


def share(rights: list[bool]) -> float | None:
    return sum(rights) / len(rights) if rights else None
