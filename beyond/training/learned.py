"""What a narrator has learned of videos: it streams them, and its sentences are told beside the true
ones (not in the paper).
"""
from functools import partial

from data import Sample
from evaluate import measure_video, of_each, rouge_l, self_conditioned, to_predictions
from narrator import Narrator
from beyond.streams.bounds import open_stream
from support.common.progress import say_as_one
from support.files.sentences import Sentence

VIDEOS = 8              # that are streamed when a training has ended
WORST = 3


def stream_beside_truth(
    narrator: Narrator,
    sample: Sample,
) -> tuple[float, list[tuple[Sentence, str]]]:
    """Stream a video -> of how many true sentences the time is found, and each of them beside the text
    that was written, as evaluate.py pairs them.
    """
    context = open_stream(narrator, lookahead=4)
    predicted = to_predictions(self_conditioned(narrator, sample, context=context))
    measures, pairs = measure_video(sample, predicted)
    return measures["recall"] * len(pairs), pairs


def tell_learned(narrator: Narrator, samples: list[Sample], kind: str) -> None:
    """Say of how many true sentences the time is found, and the text, and which sentences are worst
    (ROUGE-L).
    """
    made, _ = of_each(samples[:VIDEOS], partial(stream_beside_truth, narrator), kind)
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
