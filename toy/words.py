"""What the toy measures of narrations beside the paper's scores: the words that only visual memory can
give, and the sentences without them."""
from dataclasses import dataclass
from pathlib import Path

from evaluate import average
from support.common.disk import expecting, is_number, read_json
from support.files.narrations import is_list_of
from support.files.sentences import Sentence, frame_at
from toy.world import FPS

TRUTH = '{"narrations": [{"time": seconds, "text": "...", "memory": ["..."]}, ...]}'


@dataclass(slots=True)
class ToySentence(Sentence):
    """A true sentence, with the words in it that only visual memory can give."""
    memory_words: tuple[str, ...] = ()


def true_sentences(path: Path) -> list[ToySentence]:
    """Those of a toy video's .json file. BadData if it is no such file, or if two are of one frame."""
    sentences = []
    with expecting(path, TRUTH):
        for row in read_json(path)["narrations"]:
            words = row.get("memory", [])
            right = is_number(row["time"]) and isinstance(row["text"], str) and is_list_of(words, str)
            if not right or row["time"] <= 0:
                raise ValueError(row)
            sentences.append(ToySentence(row["time"], row["text"], tuple(words)))
        frames = [frame_at(sentence.time, FPS) for sentence in sentences]
        if frames != sorted(set(frames)):
            raise ValueError("two are of one frame, or not in order")
    return sentences


def recall_of_words(pairs: list[tuple[Sentence, str]]) -> dict[str, float | None]:
    """Measures of pairs (true sentence, predicted text); None where there is nothing to measure.

    memory_words            share of the words that need memory that the match contains
    exact_without_memory    share of the sentences without such words that equal their match
    """
    exact_without_memory = []
    memory_words = []
    for sentence, text in pairs:
        # a file without such words is read as any other (evaluate_command.py)
        needed = getattr(sentence, "memory_words", ())
        if not needed:
            exact_without_memory.append(sentence.text == text)
        words = text.rstrip(".").split()
        memory_words += [word in words for word in needed]
    return {
        "memory_words": average(memory_words),
        "exact_without_memory": average(exact_without_memory),
    }
