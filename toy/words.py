"""What the toy measures of narrations beside the paper's scores: whole sentences, and the words that
only visual memory can give."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from support.common.disk import read_json
from support.common.errors import BadData
from support.files.narrations import is_list_of, rows_of_video
from support.files.own_videos import read_sentences
from support.files.tracks import NarratedVideo, Notes, Sentence


@dataclass(slots=True)
class ToySentence(Sentence):
    """A true sentence, with the words in it that only visual memory can give."""
    memory_words: tuple[str, ...] = ()
    # of what its place had shown before; () if that was nothing else, None if it is not known
    before: tuple[str, ...] | None = None


def true_sentences(path: Path) -> list[ToySentence]:
    """Those of a toy video's .json file, sorted by time. BadData if it is damaged."""
    sentences = read_sentences(path, Notes())
    rows = sorted(rows_of_video(read_json(path)), key=lambda row: row["time"])
    if len(rows) != len(sentences):                 # some have no words
        rows = [{}] * len(sentences)
    of_toy = []
    for sentence, row in zip(sentences, rows):
        words = row.get("memory", [])
        if not is_list_of(words, str):
            raise BadData(f'{path}: expected "memory": [words], not {str(words)[:60]}')
        of_toy.append(ToySentence(sentence.time, sentence.text, tuple(words)))
    return of_toy


def words_asked_for(video: NarratedVideo) -> list[tuple[str, ...]]:
    """The memory words of each true sentence; () of sentences that are not the toy's."""
    return [getattr(sentence, "memory_words", ())
            for sentences in video.annotators for sentence in sentences]


def memory_share(videos: Iterable[NarratedVideo]) -> float:
    """The share of sentences that need visual memory."""
    needed = [bool(words) for video in videos for words in words_asked_for(video)]
    return sum(needed) / max(1, len(needed))


def recall_of_words(pairs: list[tuple[ToySentence, str]]) -> dict[str, float | None]:
    """Measures of pairs (true sentence, predicted text); None where there is nothing to measure.

    exact                   share of sentences that equal their match
    memory_words            share of the words that need memory that the match contains
    exact_without_memory    as exact, of sentences without such words
    words_once              as memory_words, where the place has shown nothing else
    words_replaced          as memory_words, where the place had shown another thing before
    words_before            share of that other thing's words that the match contains
    """
    exact = []
    exact_without_memory = []
    memory_words = []
    once = []
    replaced = []
    before = []
    for sentence, text in pairs:
        exact.append(sentence.text == text)
        if not sentence.memory_words:
            exact_without_memory.append(sentence.text == text)
        words = text.rstrip(".").split()
        right = [word in words for word in sentence.memory_words]
        memory_words += right
        if sentence.before is None:
            continue
        if sentence.before:
            replaced += right
        else:
            once += right
        before += [word in words for word in sentence.before if word not in sentence.memory_words]
    return {
        "exact": share(exact),
        "memory_words": share(memory_words),
        "exact_without_memory": share(exact_without_memory),
        "words_once": share(once),
        "words_replaced": share(replaced),
        "words_before": share(before),
    }


def share(rights: list[bool]) -> float | None:
    return sum(rights) / len(rights) if rights else None
