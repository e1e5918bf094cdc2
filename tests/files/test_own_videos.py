"""Your own videos (--data FOLDER): narrations as people write them, splits, features made once, and
the whole way from videos to a narrator.
"""
import json
import os
import random
import re
import shutil
import unicodedata
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import data
import narrator as nar
import train
from narrator import load
from commands import data_command, evaluate_command, train_command
from helpers import TOY, tiny, video
from streams import starts
from streams.starts import draw_start, sample_from
from streams.subtitles import srt_cue
from support.common.disk import read_jsonl
from support.common.errors import BadData
from support.files import own_videos
from support.files.cues import read_cues
from support.files.features import read_header
from support.files.narrations import read_predictions, read_truth
from support.files.tracks import Notes
from toy.files import toy_samples
from test_evaluate import command

GOLDEN = Path(__file__).parents[1] / "golden"


pytestmark = pytest.mark.usefixtures("no_java")


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    """Two folders of the same three toy videos: one with their .json, and one with .srt files
    alone, encoded.
    """
    toy = tmp_path_factory.mktemp("toy")
    own = tmp_path_factory.mktemp("own")
    data_command.run(["toy", "--seed", "4", "--minutes", "0.15", "--count", "3",
                      "--output", str(toy)])
    for path in toy.glob("*.json"):
        start = 0.0
        cues = []
        for number, narration in enumerate(json.loads(path.read_text())["narrations"]):
            cues.append(srt_cue(number, start, narration["time"], narration["text"]))
            start = narration["time"]
        (own / f"{path.stem}.srt").write_text("".join(cues))
        shutil.copy(path.with_suffix(".mp4"), own)
    encode(own)
    return toy, own


def encode(folder, *options):
    data_command.run(["encode", "--data", str(folder), "--model", str(TOY), "--device", "cpu",
                      *options])


def make_folder(folder, frames, text="0.5,You look.\n4,You sit.\n", width=4, **settings):
    """A folder of videos {name: number of frames} with .csv files and features, as if the videos
    had been encoded.
    """
    (folder / "features").mkdir(parents=True, exist_ok=True)
    for name, count in frames.items():
        (folder / f"{name}.mp4").write_bytes(b"a video")       # 7 bytes
        (folder / f"{name}.csv").write_text(text)
        x = torch.arange(float(count))[:, None, None].expand(count, 10, width).contiguous()
        header = {"vision": "v", "fps": "2.0", "grid": "3", "duration": str(count / 2),
                  "size": "7"} | settings
        save_file({"features": x}, folder / "features" / f"{name}.safetensors", header)
    return folder


def samples(folder, split="all", **options):
    return list(data.load_dataset(str(folder), split=split, **options))


# ---------------------------------------------------------------------- the whole way


def test_subtitles_alone_give_what_the_toy_loader_gives(toys):
    """The same narrations on the same frames, the same tokens (up to bf16), the same figures."""
    toy, own = toys
    vision = nar.VisionEncoder(str(TOY / "vision"))
    for ours, theirs in zip(samples(own), toy_samples(toy), strict=True):
        for name in ("name", "narrations", "fps", "num_frames", "duration", "start", "origin"):
            assert getattr(ours, name) == getattr(theirs, name), name
        our_tokens = torch.stack(list(ours.tokens(vision, 8)))
        their_tokens = torch.stack(list(theirs.tokens(vision, 8)))
        assert our_tokens.shape == their_tokens.shape
        assert torch.allclose(our_tokens, their_tokens, atol=0.02, rtol=0.02)

    ours = command("stream", "--data", own, "--split", "all", "--json")
    theirs = command("stream", "--data", "toy", "--root", toy, "--json")
    assert ours == {name: value for name, value in theirs.items() if name in ours}
    assert ours["videos"] == 3 and ours["f1"] > 0.8
    ours = command("teacher", "--data", own, "--split", "all", "--json")
    theirs = command("teacher", "--data", "toy", "--root", toy, "--json")
    assert ours == pytest.approx(theirs, rel=0.01)


def test_training_begins_anywhere(toys):
    """From any frame of a file: a sentence at once, and all that come after it at their own frames.
    Frames before the first sentence are used, too. The paper's sample is the one that begins there."""
    _, own = toys
    whole = list(data.load_dataset(str(own), split="all"))[0]
    first, _ = whole.narrations[1]
    sample = sample_from(whole, first)                   # a file that has no sentence before this
    true = {first + frame: text for frame, text in sample.narrations}
    assert sample_from(sample, first) == sample
    for start in range(0, max(true) + 1, 3):
        part = sample_from(sample, start)
        (frame, text), *others = [(start + frame, text) for frame, text in part.narrations]
        assert frame == start
        assert text == true[min(frame for frame in true if frame >= start)]
        assert dict(others) == {frame: text for frame, text in true.items() if frame > start}
        assert part.num_frames == first + sample.num_frames - start
        x = part.read(0, 2)
        assert torch.equal(x, sample.read.features.read(start, start + 2))
    chance = random.Random(0)
    drawn = Counter(draw_start(sample, chance) for _ in range(400))
    assert drawn[first] > 70 and drawn[0] > 70
    assert drawn.keys() == set(range(max(true) + 1))


@pytest.mark.parametrize("losses, said", [((0.001, 0.2), True), ((0.17, 0.22), False)])
def test_what_is_learned_by_heart_is_said(monkeypatch, losses, said):
    """Where the trigger's loss on held-out videos is far above that on training videos."""
    model = tiny()
    examples = [train.Example(*video(model))]
    losses = iter(losses)
    monkeypatch.setattr(starts, "loss_of_trigger", lambda narrator, videos: next(losses))
    monkeypatch.setattr(starts, "streamed_f1", lambda narrator, samples: 0.5)
    held_out = type("HeldOut", (list,), {"samples": []})(examples)
    first, *lines = starts.what_is_learned(model, examples, held_out)
    assert "F1 0.500" in first
    assert bool(lines) == said
    assert not said or "learned by heart: the trigger's loss is 0.001" in lines[0]


def test_the_loss_of_the_trigger_is_of_the_trigger():
    """The loss of a video is that of its words and of its trigger."""
    model = tiny().eval()
    x, narrations = video(model)
    trigger = starts.loss_of_trigger(model, [train.Example(x, narrations)])
    hidden, labels, tokens = model(x, narrations)
    log_p = model.logits(hidden).log_softmax(-1)
    of_trigger = [-log_p[i, labels[i]].item() for i in range(len(labels) - 1)
                  if labels[i] in (model.layout.skip, model.layout.close[0])
                  and tokens.kind[i + 1] == nar.VISUAL]
    assert trigger == pytest.approx(sum(of_trigger) / len(of_trigger), rel=1e-4)
    assert len(of_trigger) == narrations[-1][0]          # of each frame but the first


def test_four_commands(toys, tmp_path, capsys):
    """From the folder to a narrator fine-tuned on it, with the features, the rate and the models of
    the folder.
    """
    _, own = toys
    out = tmp_path / "out"
    data_command.run(["stats", "--data", str(own), "--json"])
    printed = capsys.readouterr().out
    stats = json.loads(printed.splitlines()[-1])
    assert stats["videos"] == 3 and stats["split"] == "all"
    assert "longest segment" in printed

    train_command.check_and_train(train_command.options_from(data=str(own), init=str(TOY),
                                      output=str(out), device="cpu",
                                      epochs=4.0, batch=2))
    log = read_jsonl(out / "narrator-log.jsonl")
    assert [0 < row["val_loss"] < 1 for row in log] == [True] * 4
    said = capsys.readouterr().err
    f1 = re.search(r"from the start of the files, the held-out videos have F1 ([01]\.\d{3})", said)
    assert float(f1[1]) > 0.5
    assert Path(load(str(out)).config.vision) == TOY / "vision"
    encode(own, "--model", str(out))           # nothing to do: the same vision model

    result = command("stream", "--data", own, "--model", out, "--json",
                     "--output", tmp_path / "kept")
    assert result["videos"] == 1 and result["f1"] > 0.5
    predictions = tmp_path / "kept" / "predictions"
    name, = read_predictions(predictions)
    assert name in {path.stem for path in own.glob("*.srt")}
    scored = command("score", "--pred", predictions, "--gt", own, "--partial", "--json")
    assert scored["cider"] == pytest.approx(result["cider"])
    assert scored["f1"] == result["f1"]


def test_published_weights_are_fine_tuned(tmp_path):
    """--init with a folder of the published format."""
    x = load_file(GOLDEN / "video.safetensors")["video_101"]
    folder = make_folder(tmp_path / "own", {"a": len(x), "b": len(x)},
                         "1,You put the pot.\n5,You talk to a woman.\n", x.shape[2])
    train_command.check_and_train(train_command.options_from(data=str(folder), init=str(GOLDEN / "flownar"),
                                      output=str(tmp_path / "out"), device="cpu", epochs=1.0))
    config = load(str(tmp_path / "out")).config
    assert config.readout == "cls" and config.width == x.shape[2]


def test_a_new_narrator_takes_vision_model_and_rate_of_the_features(tmp_path):
    slow = make_folder(tmp_path / "slow", {"a": 20, "b": 20}, width=16, fps="1.0",
                       vision="some/model")
    with pytest.raises(BadData, match="1 frames a second, the narrator needs 2"):
        train_command.check_and_train(train_command.options_from(data=str(slow), init=str(TOY),
                                          output=str(tmp_path / "no"), device="cpu"))
    out = tmp_path / "out"
    train_command.check_and_train(train_command.options_from(data=str(slow), llm=str(TOY / "llm"),
                                      output=str(out),
                                      device="cpu", epochs=1.0, memory_heads=2, memory_tokens=4,
                                      lora_rank=4))
    config = load(str(out)).config
    assert (config.fps, config.vision) == (1.0, "some/model")
    fast = make_folder(tmp_path / "fast", {"a": 20, "b": 20}, width=16)
    message = command("stream", "--data", fast, "--model", out, ok=False)
    assert "2 frames a second, the narrator needs 1" in message


@pytest.mark.parametrize("loss, videos, width, epochs, rate", [
    (0.4, 9, 128, 10, 2e-4),                   # known words
    (6.5, 9, 128, 100 / 3, 8e-4),              # new ones, a small language model
    (6.5, 9, 2048, 100 / 3, 2e-4),             # a large one
    (6.5, 500, 4096, 10, 2e-4),
])
def test_length_of_training(loss, videos, width, epochs, rate):
    chosen = train_command.length_of_training(loss, videos, 2, width)
    assert chosen == pytest.approx({"epochs": epochs, "lr": rate})


def test_new_words_are_learned_longer(capsys):
    """In small batches. Options that are given stay."""
    model = tiny()
    examples = [train.Example(*video(model))]
    options = train_command.options_from(data=".", lr=1e-3)
    assert options.batch == 2
    train_command.choose_length(model, examples, options)
    assert (options.epochs, options.lr) == (300, 1e-3)
    assert "300 epochs, peak learning rate 0.001" in capsys.readouterr().err


# ---------------------------------------------------------------------- narrations

SRT = """\ufeff1
00:00:00,000 --> 00:00:01,500
<i>You look</i>
around the {\\an8}room.

00:00:02.000 --> 0:03.5 X1:0
42 cups &amp; a pan

3
00:00:03,000 --> 00:00:09,000

4
00:00:05,000 --> 00:00:06,000
- ... -
5
00:00:04,000 --> 00:00:08,000
Is it done?
"""
VTT = """WEBVTT - my video
Kind: captions

STYLE
::cue { color: red }

NOTE no cue

first
00:01.000 --> 00:02.000 align:start
<v Ann><c.loud>You</c> <00:01.500>sit,

1:00:03.000 --> 1:00:04.000
You cut a &lt;3 shaped cake!
"""
# file: (content, sentences, counts of corrections)
SENTENCES = {
    "a.srt": (
        SRT,
        [(1.5, "You look around the room."), (3.5, "42 cups & a pan."), (8, "Is it done?")],
        {"sentences without a full stop given one": 1,
         "narrations without words left out": 2}),
    "a.vtt": (
        VTT,
        [(2, "You sit."), (3604, "You cut a <3 shaped cake!")],
        {"sentences without a full stop given one": 1}),
    "b.vtt": (
        "WEBVTT\n\n00:01.000 --> 00:02.000\n \nYou\u2028sit.\n\n"
        "00:02.000 --> 00:03.000\nYou go.\n \n",
        [(2, "You sit."), (3, "You go.")],
        {}),
    # captions that roll show each line twice or more; other cues may repeat a sentence
    "c.vtt": (
        "WEBVTT\n\n00:01.000 --> 00:03.000\n \nYou<00:01.300><c> sit</c>\n\n"
        "00:03.000 --> 00:03.010\nYou sit\n \n\n"
        "00:03.010 --> 00:05.000\nYou sit\nYou go.\n\n00:05.000 --> 00:06.000\nYou go.\n\n"
        "00:06.000 --> 00:07.000\nYou go.\n\n00:07.000 --> 00:08.000\nYou eat.\nYou nod.\n\n"
        "00:08.000 --> 00:09.000\nYou eat.\nYou nod.\nYou say.\n",
        [(3, "You sit."), (5, "You go."), (7, "You go."), (8, "You eat. You nod."),
         (9, "You say.")],
        {"sentences without a full stop given one": 1,
         "narrations without words left out": 2,
         "lines that the cue before has shown left out": 5}),
    # a line ends twice; other arrows, and one in a text; before time 0; markup of other programs
    "b.srt": (
        "1\n00:00:01,000 -> 00:00:02,000\nYou turn A --> B.\n\n"
        "2\n-00:00:01,000 → 00:00:03,000\n{y:i}You\\Nsit.\n\n"
        "3\n00:00:03,000 --> 00:00:04,000\n{\\p1}m 0 0 l 1 0{\\p0}\n".replace("\n", "\n\n"),
        [(2, "You turn A --> B."), (3, "You sit.")],
        {"narrations without words left out": 1}),
    "c.srt": (VTT, [(2, "You sit."), (3604, "You cut a <3 shaped cake!")],
              {"sentences without a full stop given one": 1}),
    "a.csv": (
        "62.5,You sit.\n0:01,\"You cut, then stir.\"\n\n00:00:03.5,\n",
        [(1, "You cut, then stir."), (62.5, "You sit.")],
        {"narrations without words left out": 1}),
    "b.csv": (
        "Start,End,Text,by\n0,1.5,You sit,x\n1.5,1:02,You « go »,y\n",
        [(1.5, "You sit."), (62, "You « go ».")],
        {"sentences without a full stop given one": 2}),
    "c.csv": (
        "0,5;You cut, then stir.\n2;You sit.\n",
        [(0.5, "You cut, then stir."), (2, "You sit.")],
        {}),
    "d.csv": (
        "time\ttext\n1\tYou sit…\n2\tYou say \"go!\"\n",
        [(1, "You sit…"), (2, 'You say "go!"')],
        {}),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_sentences_of_subtitles_and_tables(tmp_path, name):
    content, sentences, counts = SENTENCES[name]
    (tmp_path / name).write_text(content)
    notes = Notes()
    read = [(sentence.time, sentence.text) for sentence in read_cues(tmp_path / name, notes)]
    assert read == sentences
    assert {message: count for message, count in notes.counts.items() if count} == counts


@pytest.mark.parametrize("name, content, message", [
    ("a.srt", "1\n00: 00: 01 --> 00: 00: 02\nYou sit.\n", "line 2: expected times"),
    ("a.srt", "1\n00:00:01,000 --> 2,x\nYou sit.\n", "line 2: expected times"),
    ("a.srt", "1\n00:61:00,000 --> 00:62:00,000\nYou sit.\n", "line 2: expected times"),
    ("a.srt", "1\n00:00:03,000 --> 00:00:02,000\nYou sit.\n", "line 2: the cue ends before"),
    ("a.srt", "1\n00:00:01,000 --> 00:00:02,000\nYou sit.\n\nYou stand.\n",
     "line 5: .*empty line inside"),
    ("a.srt", "1\n00:00:01,000 --> 00:00:02,000\n\n", "has no narrations"),
    ("a.srt", "", "has no narrations"),
    ("a.vtt", "1\n00:01.000 --> 00:02.000\nYou sit.\n", "line 1: .*WEBVTT"),
    ("a.vtt", "", "WEBVTT"),
    ("a.csv", "0.5,You sit.\n1,You cut, then stir.\n", "line 2: expected time,text"),
    ("a.csv", "0.5,You sit.\nsoon,You stir.\n", "line 2: expected time,text"),
    ("a.csv", "when,what\n0.5,You sit.\n", "line 1: expected time,text"),
    ("a.csv", "You sit.\n", "line 1: expected"),
    ("a.csv", "-1,You sit.\n", "line 1"),
    ("a.csv", "", "has no narrations"),
    ("a.csv", f"1,\"{'x' * 200_000}\"\n", "is not CSV"),
    ("a.csv", '1,"You sit.\n2,You stir.\n', "is not CSV"),
    ("a.csv", "1,Öffne.".encode("latin-1"), "is not UTF-8"),
    ("a.json", "{", "is not JSON"),
    ("a.json", '{"narrations": 3}', "expected a list"),
    ("a.json", "3", "a list"),
    ("a.json", '[{"time": "1", "text": "x"}]', "narration 0"),
    ("a.json", '[{"time": -1, "text": "x"}]', "-1 s is before the start"),
])
def test_bad_narrations_are_refused_by_name(tmp_path, name, content, message):
    make_folder(tmp_path, {"a": 20})
    (tmp_path / "a.csv").unlink()
    if isinstance(content, str):
        content = content.encode()
    (tmp_path / name).write_bytes(content)
    for read in (samples, encode):
        with pytest.raises(BadData, match=message) as error:
            read(tmp_path)
        assert name in str(error.value) and "\n" not in str(error.value)


def test_placed_on_frames(tmp_path, capsys):
    """Each narration on a frame of its own, none beyond the end. A sample begins with its first
    narration.
    """
    text = ("2.2,You look.\n4,You sit.\n4,You stand.\n3.8,You cut.\n9.9,You stir.\n"
            "11,You eat.\n12,You go.\n")
    folder = make_folder(tmp_path, {"a": 20}, text)
    sample, = samples(folder)
    assert sample.narrations == [(0, "You look."), (3, "You cut."), (4, "You sit."),
                                 (5, "You stand."), (14, "You stir."), (15, "You eat.")]
    assert (sample.num_frames, sample.duration) == (16, 10.0)
    assert (sample.start, sample.origin) == (2.0, 2.0)
    assert sample.read(0, 16)[:, 0, 0].tolist() == list(range(4, 20))
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "1 narrations beyond the end of their video moved to its last frame" in err
    assert "3 narrations moved by a frame or more" in err
    assert "1 narrations beyond the end of their video left" in err

    short = data.shorten(sample, 7)
    assert (short.num_frames, len(short.narrations), short.duration) == (6, 4, 10.0)
    times = [sentence.time for sentence in sample.annotators[0]]
    assert times == [2.5, 4.0, 4.5, 5.0, 9.5, 10.0]


def test_narrations_of_another_video_are_refused(tmp_path):
    make_folder(tmp_path, {"a": 20}, "1,You sit.\n11,You cut.\n12,You stir.\n")
    message = r"a\.csv: 2 of 3 narrations are beyond the end of the video \(10 s\)"
    with pytest.raises(BadData, match=message):
        samples(tmp_path)


def test_milliseconds_of_a_single_narration_are_refused(tmp_path):
    make_folder(tmp_path, {"a": 20}, "2500,You sit.\n")
    with pytest.raises(BadData, match=r"a\.csv: 1 of 1 .* or in milliseconds"):
        samples(tmp_path)


@pytest.mark.parametrize("unit, fits", [(1, True), (60, False), (3600, False), (86400, False)])
def test_times_in_a_larger_unit_are_refused(tmp_path, unit, fits):
    """Minutes, hours, or what Excel makes of a time: parts of a day."""
    text = "time,text\n" + "".join(f"{time / unit:.9f},You cut.\n" for time in range(3, 99, 4))
    make_folder(tmp_path, {"a": 200}, text)
    if fits:
        assert len(samples(tmp_path)[0].narrations) == 24
        return
    with pytest.raises(BadData, match=r"a\.csv: its 24 narrations begin within \d frames"):
        samples(tmp_path)


def test_own_json(tmp_path):
    """The toy's form, or a plain list."""
    folder = make_folder(tmp_path, {"a": 20, "b": 20})
    for path in folder.glob("*.csv"):
        path.unlink()
    rows = [{"time": 0.5, "text": "You look."},
            {"time": 3, "text": "You tap the red cup", "memory": ["red"]}]
    as_toy = {"video": "a.mp4", "fps": 30, "duration": 3, "narrations": rows}
    (folder / "a.json").write_text(json.dumps(as_toy))
    (folder / "b.json").write_text(json.dumps(rows))
    for sample in samples(folder):
        assert sample.narrations == [(0, "You look."), (5, "You tap the red cup.")]


def test_scores_of_subtitles(tmp_path):
    """evaluate.py score reads them on both sides. A .jsonl beside its own .srt counts once."""
    for name, text in (("a", "You sit."), ("b", "You stand.")):
        cues = srt_cue(0, 0, 1, "You look.") + srt_cue(1, 1, 3, text)
        (tmp_path / f"{name}.srt").write_text(cues)
    predictions = tmp_path / "pred"
    predictions.mkdir()
    (predictions / "a.jsonl").write_text('{"end": 1.0, "text": "You look."}\n'
                                         '{"end": 3.0, "text": "You sit."}\n')
    (predictions / "a.srt").write_text("not read")
    (predictions / "b.vtt").write_text("WEBVTT\n\n00:00.000 --> 00:03.000\nYou sit.\n")
    truths = read_truth(tmp_path)
    assert {name: len(truth.annotators[0]) for name, truth in truths.items()} == {"a": 2, "b": 2}
    scored = command("score", "--pred", predictions, "--gt", tmp_path, "--json")
    assert (scored["videos"], scored["predicted"], scored["recall"]) == (2, 3, 0.75)
    by_lines = read_truth(predictions / "a.jsonl")
    assert [sentence.time for sentence in by_lines["a"].annotators[0]] == [1.0, 3.0]
    alone = command("score", "--pred", predictions / "b.vtt", "--gt", tmp_path / "b.srt", "--json")
    assert (alone["predicted"], alone["precision"], alone["recall"]) == (1, 1.0, 0.5)


def test_lists_of_narrations_as_people_have_them(tmp_path):
    """In any order of time; in a folder that macOS has copied; in milliseconds, which is refused.
    """
    rows = [{"time": time, "text": text} for time, text in
            ((4, "You open it."), (9.5, "You pour it."), (14, "You sit."), (20, "You go."))]
    mixed = [rows[n] for n in (2, 0, 3, 1)]
    (tmp_path / "a.json").write_text(json.dumps({"narrations": rows}))
    (tmp_path / "._a.json").write_bytes(b"\x00\x05\x16\x07Mac OS X")
    pred = tmp_path / "pred"
    pred.mkdir()
    (pred / "a.json").write_text(json.dumps({"a": mixed}))
    assert command("score", "--pred", pred, "--gt", tmp_path, "--json")["f1"] == 1
    late = [row | {"time": 1000 * row["time"]} for row in rows]
    (pred / "a.json").write_text(json.dumps(late))
    assert "milliseconds" in command("score", "--pred", pred, "--gt", tmp_path, ok=False)
    assert "milliseconds" in command("score", "--pred", tmp_path, "--gt", pred, ok=False)


# ---------------------------------------------------------------------- files and splits


def names(folder, split):
    return [sample.name for sample in samples(folder, split)]


@pytest.mark.parametrize("forms", [("NFC", "NFD", "NFC"), ("NFD", "NFC", "NFC"), ("NFC", "NFC", "NFD")])
def test_names_with_accents_are_one_name_in_both_forms(tmp_path, forms):
    """Of video, narrations and features; in val.txt and in scores, too."""
    make_folder(tmp_path, {"a": 20, "b": 20})
    video, text, encoded = (unicodedata.normalize(form, "caf\u00e9") for form in forms)
    (tmp_path / "a.mp4").rename(tmp_path / f"{video}.mp4")
    (tmp_path / "a.csv").rename(tmp_path / f"{text}.csv")
    (tmp_path / "features/a.safetensors").rename(tmp_path / f"features/{encoded}.safetensors")
    (tmp_path / "val.txt").write_text(f"{text}\n")
    assert names(tmp_path, "val") == [video] and len(names(tmp_path, "all")) == 2
    (tmp_path / "pred").mkdir()
    shutil.copy(tmp_path / f"{text}.csv", tmp_path / "pred" / f"{video}.csv")
    shutil.copy(tmp_path / "b.csv", tmp_path / "pred")
    assert read_predictions(tmp_path / "pred").keys() == read_truth(tmp_path).keys()


@pytest.mark.parametrize("files", [
    ["a.csv", "a.json", "a.srt"][1:], ["a.srt", "a.en.srt"], ["a.en.srt", "a.en-US.srt", "a.de.srt"],
    ["a.en.vtt", "a.en.forced.srt"], ["a.de.srt", "a.en.forced.srt"], ["a.mp4.csv", "a.mp4.en.csv"],
])
def test_which_narrations_of_a_video_are_taken(tmp_path, files):
    """The first of each list, in whatever order they are found."""
    for file in files:
        (tmp_path / file).write_text("")
    (tmp_path / "a.mp4").write_text("")
    for other in ("a.info.json", "a.scores.csv"):
        (tmp_path / other).write_text("{}")
    (tmp_path / "gone.mp4").symlink_to(tmp_path / "nowhere.mp4")
    notes = Notes()
    assert own_videos.list_videos(tmp_path, notes)["a"][0].name == files[0]
    assert f"{len(files) - 1} files of narrations left out" in str(notes)
    assert "links to what is not there left out (gone.mp4)" in str(notes)


def test_split_by_share(tmp_path):
    """A fifth for validation, by name, and the same when others come."""
    folder = make_folder(tmp_path, {f"v{n}": 20 for n in range(40)})
    for_training = names(folder, "train")
    for_validation = names(folder, "val")
    assert sorted(for_training + for_validation) == names(folder, "all")
    assert 3 <= len(for_validation) <= 13
    make_folder(folder, {f"w{n}": 20 for n in range(40)})
    assert set(names(folder, "val")) >= set(for_validation)

    pair = make_folder(tmp_path / "pair", {"a": 20, "b": 20})
    assert len(names(pair, "val")) == 1
    assert {*names(pair, "train"), *names(pair, "val")} == {"a", "b"}
    single = make_folder(tmp_path / "single", {"a": 20})
    assert names(single, "train") == ["a"]


@pytest.mark.parametrize("files, split, expected", [
    ({"val": "b.mp4\n\ne.f\n"}, "train", ["a", "c", "d"]),
    ({"val": "b.mp4\n\ne.f\n"}, "val", ["b", "e.f"]),
    ({"val": "b", "test": "c"}, "train", ["a", "d", "e.f"]),
    ({"val": "b", "test": "c"}, "test", ["c"]),
    ({"test": "a\nb\nc\nd"}, "train", ["e.f"]),
])
def test_split_by_file(tmp_path, files, split, expected):
    folder = make_folder(tmp_path, dict.fromkeys(["a", "b", "c", "d", "e.f"], 20))
    for name, content in files.items():
        (folder / f"{name}.txt").write_text(content)
    assert names(folder, split) == expected
    assert [sample.name for sample in samples(folder, split, limit=1)] == expected[:1]


@pytest.mark.parametrize("files, split, message", [
    ({}, "test", r"none of its 3 videos is for test; write names .*test\.txt"),
    ({"test": "b\nc"}, "val", r"for val; .*val\.txt .*\(train.py --val-limit 0 needs none\)"),
    ({}, "dev", "unknown split 'dev'; choose one of train, val, test, all"),
    ({"val": "a\nc\n", "test": "c"}, "all", r"test\.txt: 'c' is .* listed twice"),
    ({"test": "x.mp4\n"}, "all", r"test\.txt: 'x' is no video of"),
    ({"test": "a.2\n"}, "all", r"test\.txt: 'a\.2' is no video of"),
])
def test_bad_splits_are_refused(tmp_path, files, split, message):
    folder = make_folder(tmp_path, dict.fromkeys("abc", 20))
    for name, content in files.items():
        (folder / f"{name}.txt").write_text(content)
    with pytest.raises(BadData, match=message):
        samples(folder, split)


def test_what_lies_in_the_folder(tmp_path, capsys):
    """Other files do not matter. Features stand for a video that is gone. Two videos of one name
    are refused.
    """
    folder = make_folder(tmp_path, {"a": 20, "b": 20})
    (folder / "b.mp4").unlink()
    (folder / "c.MP4").write_bytes(b"x")
    for name in ("notes.csv", "readme.txt", ".a.srt", "settings.json", "c.en.ass"):
        (folder / name).write_text("x")
    (folder / "orphan.srt").write_text("x")
    assert names(folder, "all") == ["a", "b"]
    notes = capsys.readouterr().err
    assert "1 videos without narrations left out (c.MP4, beside it c.en.ass)" in notes
    assert "1 subtitles without a video left out (orphan.srt)" in notes
    other = folder / os.fsdecode(b"caf\xe9.mp4")
    other.touch()
    with pytest.raises(BadData, match="the name is not UTF-8"):
        samples(folder)
    other.unlink()
    (folder / "a.mov").touch()
    with pytest.raises(BadData, match=r"a\.mp4: a\.mov has the same name"):
        samples(folder)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "b.mp4").touch()
    with pytest.raises(BadData, match=r"has no video with narrations beside it, .*\(b\.mp4\)"):
        samples(bare)


@pytest.mark.parametrize("files, taken", [
    (["a.srt", "a.vtt", "a.json", "a.tsv", "a.txt"], "a.json"),        # whisper's five
    (["a.vtt", "a.srt", "a.txt"], "a.srt"),
    (["a.de.srt", "a.en.srt", "a.en-orig.vtt"], "a.en.srt"),
    (["a.fr.vtt", "a.de.srt"], "a.de.srt"),
    (["a.en.srt", "a.vtt"], "a.vtt"),
    (["a.b.srt", "a.srt"], "a.srt"),                                   # another video's
])
def test_one_file_of_several_is_taken_and_named(tmp_path, capsys, files, taken):
    folder = make_folder(tmp_path, {"a": 20, "a.b": 20})
    (folder / "a.csv").unlink()
    for name in files:
        said = f"You take {name.replace('.', ' ')}."
        cue = srt_cue(0, 0, 1, said).replace(",", ".")
        content = {".srt": cue, ".vtt": f"WEBVTT\n\n{cue}",
                   ".json": json.dumps({"text": said, "language": "en", "segments": [
                       {"id": 0, "start": 0.0, "end": 1.0, "text": f" {said}"}]})}
        (folder / name).write_text(content.get(Path(name).suffix, "start\tend"))
    sample, _ = samples(folder)
    assert sample.narrations == [(0, f"You take {taken.replace('.', ' ')}.")]
    notes = capsys.readouterr().err
    for name in files:
        if name.endswith((".srt", ".vtt", ".json")) and name not in (taken, "a.b.srt"):
            assert f"{name}: {taken} is taken" in notes


# ---------------------------------------------------------------------- features


def test_only_new_and_changed_videos_are_encoded(toys, tmp_path):
    """The settings are those of the narrator, unless others are given."""
    _, own = toys
    folder = tmp_path / "own"
    shutil.copytree(own, folder)
    first, second, third = sorted(folder.glob("*.mp4"))
    files = [own_videos.feature_file(folder, video.stem) for video in (first, second, third)]

    def encoded(*options):
        """Which files `data.py encode` writes."""
        before = [file.stat().st_mtime_ns if file.exists() else 0 for file in files]
        encode(folder, *options)
        return [file.stat().st_mtime_ns != time for file, time in zip(files, before)]

    assert encoded() == [False, False, False]
    shutil.copy(first, second)
    files[2].unlink()
    assert encoded() == [False, True, True]
    first_x, second_x, _ = (load_file(file)["features"] for file in files)
    assert torch.equal(first_x, second_x)
    header = read_header(files[0]).header
    assert (header["vision"], header["fps"], header["grid"]) == (str(TOY / "vision"), "2.0", "3")
    assert encoded("--fps", "4") == [True, True, True]
    assert samples(folder)[0].fps == 4.0


def test_features_of_other_settings_or_videos_are_refused(tmp_path):
    """Each time with the command that encodes them."""
    folder = make_folder(tmp_path, {"a": 20, "b": 20})
    make_folder(folder, {"b": 20}, fps="4.0")
    with pytest.raises(BadData, match="b.safetensors was made with fps = 4.0, here 2.0; "
                                      "encode again: python data.py encode --data"):
        samples(folder)
    (folder / "a.mp4").write_bytes(b"another video")
    with pytest.raises(BadData, match=r"a.safetensors was made with size = .*, here 13"):
        samples(folder)
    own_videos.feature_file(folder, "a").unlink()
    with pytest.raises(BadData, match="a.safetensors: is missing: python data.py encode"):
        samples(folder)


def test_a_folder_is_no_name_and_has_no_root(tmp_path):
    folder = make_folder(tmp_path, {"a": 20, "b": 20})
    missing = tmp_path / "gone"
    with pytest.raises(BadData, match="--root x is for the data sets with names"):
        samples(folder, root="x")
    for read in (samples, encode):
        with pytest.raises(BadData, match="gone: no such folder; choose one of toy, .*, "
                                          "or a folder of videos"):
            read(missing)
    assert "no such folder" in command("stream", "--data", missing, ok=False)
