"""What a narrator has learned of videos: it streams them, and its sentences are told beside the true
ones (not in the paper).
"""
from __future__ import annotations

from data import Sample
from evaluate import measure_video, of_each, rouge_l, self_conditioned, to_predictions
from narrator import Narrator
from streams.bounds import open_stream
from support.common.progress import say_as_one
from support.files.tracks import Sentence

VIDEOS = 8              # that are streamed when a training has ended
WORST = 3


def tell_learned(narrator: Narrator, samples: list[Sample], kind: str) -> None:
    """Say of how many true sentences the time is found, and the text, as evaluate.py does, and which
    sentences are worst (ROUGE-L).
    """
    def learned_of(sample: Sample) -> tuple[float, list[tuple[Sentence, str]]]:
        context = open_stream(narrator, lookahead=4)
        predicted = to_predictions(self_conditioned(narrator, sample, context=context))
        alignment, pairs = measure_video(sample, predicted)
        return alignment["recall"] * len(pairs), pairs

    made, _ = of_each(samples[:VIDEOS], learned_of, kind)
    in_time = 0.0
    sentences = 0
    wrong = []
    for name, (found, pairs) in made.items():
        in_time += found
        sentences += len(pairs)
        for sentence, text in pairs:
            if text != sentence.text:
                likeness, = rouge_l([(sentence.text, text)])
                wrong.append((likeness, name, sentence.time, sentence.text, text))
    say_as_one(f"{kind}, {len(made)} of {len(samples)} streamed: of {sentences} sentences "
               f"{in_time:.0f} are in time, {sentences - len(wrong)} exact")
    for _, name, time, true, text in sorted(wrong)[:WORST]:
        say_as_one(f"    {name}, {time:.1f} s: {true!r}, written: {text!r}")
