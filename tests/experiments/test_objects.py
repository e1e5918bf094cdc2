"""experiments/objects.py (App. C.1): objects of sentences, which are right, what pictures show."""
from functools import partial
from itertools import product

import pytest

from experiments import objects
from support.files.narrations import Sentence, Truth
from test_evaluate import command, write
from test_summary import Fake
from toy import world

run_objects = partial(command, main=objects.main)


def narration_rows(*texts):
    """Rows of a file of narrations, one every two seconds."""
    return [{"time": 2.0 * n + 1, "text": text} for n, text in enumerate(texts)]


def narrated_by(kitchen):
    """The true sentences of a toy video."""
    sentences = []
    for narration in kitchen.narrations:
        sentences.append(Sentence((narration.frame + 1) / world.FPS, narration.text))
    return sentences


def as_rows(sentences):
    return [{"time": sentence.time, "text": sentence.text} for sentence in sentences]


# ------------------------------------------------------------- which objects a sentence names

@pytest.mark.parametrize("name", ["plain", "second"])
def test_templates_read_every_sentence_of_the_toy(name):
    reader = objects.ByTemplate()
    variant = world.WORLDS[name]
    words = {"place": variant.places[2], "thing": f"{variant.colours[0]} cup"}
    for template in variant.sentences.values():
        expected = {word for field, word in words.items() if f"{{{field}}}" in template}
        assert set(reader.objects(template.format(**words))) == expected
    assert not reader.unread


@pytest.mark.parametrize("sentence", [
    "You wash the red red cup.", "You wash the red cup", "You wash the sink.", "C runs.",
    "You cup."])
def test_templates_read_no_other_sentence(sentence):
    reader = objects.ByTemplate()
    assert reader.objects(sentence) == []
    assert reader.unread == {sentence}


def test_templates_do_not_mix_worlds():
    reader = objects.ByTemplate()
    assert reader.objects("You wash the lime cup.") == []
    assert reader.objects("You rinse the lime cup.") == ["lime cup"]


@pytest.mark.parametrize("name, singular", [
    ("The Red Cups", "red cup"), ("glasses", "glass"), ("glass", "glass"), ("a bus", "bus"),
    ("berries", "berry"), ("boxes", "box"), ("knife", "knife"), (" dishes ", "dish"),
    ("vases", "vase"), ("the", "the")])
def test_one_word_but_for_article_and_plural(name, singular):
    assert objects.singular(name) == singular


@pytest.mark.parametrize("answer, names, unread", [
    ('["cup", "sink"]', ["cup", "sink"], 0),
    ('Sure: [1] then ["cup"] ["pan"]', ["cup"], 0),
    ("[]", [], 0),
    ("cup, sink", [], 1),
    ("", [], 1),
    ('["cup"', [], 1),
    ('[["cup"], 3]', ["cup"], 0),
    ('{"a": 1}', [], 1),
    ("[cup]", [], 1),
    ("[[[[" * 1000, [], 1),
])
def test_lists_in_answers(answer, names, unread):
    fake = Fake(answer)
    reader = objects.ByModel(fake.ask)
    assert reader.objects("You {wash} the\ncup.") == names
    assert len(reader.unread) == unread
    assert fake.asked[0].endswith("Sentence: You {wash} the cup.\nObjects:")


@pytest.mark.parametrize("answer, same, unread", [
    ("Yes.", True, 0),
    (" **no**, they", False, 0),
    ("Nope", False, 1),
    ("", False, 1),
    ("maybe yes", False, 1),
])
def test_yes_or_no(answer, same, unread):
    reader = objects.ByModel(Fake(answer).ask)
    assert reader.same("mug", "cup") is same
    assert len(reader.unread) == unread


# ------------------------------------------------------------- which of them are right

def test_judged_by_hand():
    """Equal objects are not asked about; others are compared with every true one."""
    fake = Fake('["The cups", "Sink", "cup"]', '["cup", "basin", "dog"]', "no", "no", "yes", "no")
    row = objects.judge(objects.ByModel(fake.ask), "a", "b")
    assert row.found == {"cup": True, "sink": True}
    assert row.right == {"cup": True, "basin": True, "dog": False}
    assert [question.splitlines()[-2] for question in fake.asked[2:]] == [
        "Words: cup, basin", "Words: cup, dog", "Words: sink, basin", "Words: sink, dog"]
    nothing = objects.judge(objects.ByModel(Fake('["cup"]').ask), "a", "")
    assert nothing == objects.Judged({"cup": False}, {})


def test_measures_by_hand():
    rows = [
        objects.Judged({"a": True, "b": False}, {"a": True}),
        objects.Judged({}, {"z": False}),
        objects.Judged({"a": True}, {"a": True, "c": False, "d": False}),
        objects.Judged({"a": False}, {}),
    ]
    assert objects.object_measures(rows) == pytest.approx({
        "pairs": 3,
        "without_objects": 1,
        "true_objects": 4,
        "predicted_objects": 4,
        "object_accuracy": 2 / 4,
        "objects_found": 2 / 4,
        "object_accuracy_of_pairs": (1 + 1 / 3) / 2,
        "objects_found_of_pairs": (0.5 + 1 + 0) / 3,
    })
    assert objects.object_measures([])["object_accuracy"] is None


def test_command_by_template(tmp_path):
    """One of three things is wrong, and one sentence is not the toy's."""
    (tmp_path / "gt").mkdir()
    true = narration_rows("You look around the kitchen.", "You wash the red cup.",
                          "You tap the fridge hiding the blue pan.")
    toy_file = {"fps": 2, "duration": 9.0}
    write(tmp_path / "gt" / "a.json", toy_file | {"video": "a.mp4", "narrations": true})
    write(tmp_path / "gt" / "b.json", toy_file | {"video": "b.mp4", "narrations": true[:2]})
    predicted = narration_rows("You look around the kitchen.", "You heat the red cup.",
                               "You tap the fridge hiding the blue cup.")
    pred = write(tmp_path / "p.json", {"a": predicted, "b": narration_rows("You x.", "You x.")})
    result = run_objects("--pred", pred, "--gt", tmp_path / "gt", "--json")
    assert result == pytest.approx({
        "videos": 2,
        "not_understood": 1,
        "pairs": 3,
        "without_objects": 2,
        "true_objects": 4,
        "predicted_objects": 3,
        "object_accuracy": 2 / 3,
        "objects_found": 2 / 4,
        "object_accuracy_of_pairs": (1 + 0.5) / 2,
        "objects_found_of_pairs": (1 + 0.5 + 0) / 3,
    })


@pytest.mark.parametrize("answers, pairs, accuracy", [
    (("???", '["egg"]'), 0, None),
    (('["egg"]', '["mug"]', "I think so"), 1, 0),
])
def test_rubbish_is_counted(tmp_path, monkeypatch, answers, pairs, accuracy):
    pred = write(tmp_path / "p.json", {"a": narration_rows("You run.")})
    gt = write(tmp_path / "g.json", {"a": narration_rows("You cook.")})
    monkeypatch.setattr(objects, "Answers", Fake(*answers))
    result = run_objects("--pred", pred, "--gt", gt, "--llm", "any", "--json")
    assert result["not_understood"] == 1
    assert result["pairs"] == pairs
    assert result["without_objects"] == 1 - pairs
    assert result["object_accuracy"] == accuracy


# ------------------------------------------------------------- what the picture has to do with it

@pytest.mark.parametrize("which", ["clutter", "nowhere"])
def test_clutter_is_in_sight_though_not_in_use(which):
    """Sentences that name clutter, or what is nowhere to be seen."""
    kind = world.WORLDS["clutter"]
    kitchen = world.Kitchen(4, 10, kind)
    truth = Truth([narrated_by(kitchen)])
    clutter = [(thing.type, thing.colour) for thing in kitchen.clutter if thing]
    if which == "clutter":
        look = clutter[0]
    else:
        looks = kitchen.labels()[..., [world.TYPE, world.COLOUR]].reshape(-1, 2)
        seen = {*clutter, *map(tuple, looks.tolist())}
        look = next(look for look in product(range(1, 7), range(1, 7)) if look not in seen)
    lie = f"You wash the {' '.join(kind.words(*look))}."

    predicted = [Sentence(sentence.time, lie) for sentence in truth.annotators[0]]
    reader = objects.ByTemplate()
    rows = [objects.judge(reader, sentence.text, lie) for sentence in truth.annotators[0]]
    shown = objects.shown(kitchen, truth, predicted, rows)
    result = objects.failures(shown, kind)
    wrong = 0
    for row in rows:
        if row.found:
            wrong += list(row.right.values()).count(False)
    assert result["wrong_things"] == wrong > 5
    assert result["wrong_in_sight"] == result["wrong_clutter"] == (which == "clutter")
    assert 0 < result["by_chance"] < 0.5
    assert all(segment.hit for segment in shown)


def test_what_is_seen_in_a_segment():
    """The frames of a segment are those after the end of the one before, up to its own."""
    kitchen = world.Kitchen(3, 6)
    truth = Truth([narrated_by(kitchen)])
    labels = kitchen.labels()
    shown = objects.shown(kitchen, truth, [], [objects.Judged({}, {})] * 7)
    begin = 0
    for segment, narration in zip(shown, kitchen.narrations):
        frames = range(begin, narration.frame + 1)
        looks = labels[frames][..., [world.TYPE, world.COLOUR]].reshape(-1, 2)
        assert segment.sight == {(kind, colour) for kind, colour in looks.tolist() if kind}
        light = sum(kitchen.light(frame) for frame in frames) / len(frames)
        assert segment.light == pytest.approx(light)
        assert not segment.hit
        begin = narration.frame + 1


def test_recall_by_light(tmp_path, monkeypatch):
    """Predictions in daylight only, for videos by seed, of which nothing is rendered."""
    monkeypatch.setattr(world.Kitchen, "render", lambda *_: pytest.fail("a picture is rendered"))
    kept = {}
    for seed, kitchen in world.kitchens("test", 4, world=world.WORLDS["dark"]):
        true = narrated_by(kitchen)
        shown = objects.shown(kitchen, Truth([true]), [], [objects.Judged({}, {})] * len(true))
        daylight = [segment.light >= 0.6 for segment in shown]
        daylight.append(False)
        # The sentence before a segment in daylight is kept, too: the segment begins at its time.
        sentences = [sentence for n, sentence in enumerate(true)
                     if n == 0 or daylight[n] or daylight[n + 1]]
        kept[f"toy-{seed}"] = as_rows(sentences)
    pred = write(tmp_path / "p.json", kept)
    options = ("--pred", pred, "--data", "toy", "--world", "dark", "--limit", 4)
    groups = run_objects(*options, "--json")["by_light"]
    assert list(groups) == ["light 0 - 0.1", "light 0.1 - 0.3", "light 0.3 - 0.6", "light >= 0.6"]
    assert groups["light >= 0.6"]["recall"] == 1
    assert groups["light >= 0.6"]["objects_found"] == 1
    assert groups["light 0 - 0.1"]["recall"] < 0.3
    assert groups["light 0 - 0.1"]["objects_found"] < 0.5
    table = run_objects(*options)
    assert "light >= 0.6" in table
    assert "objects found" in table


def test_files_have_no_kitchen(tmp_path):
    """Only videos by seed are known to the world."""
    pred = write(tmp_path / "a.json", {"a": narration_rows("You look around the kitchen.",
                                                           "You wash the red cup.")})
    assert "by_light" not in run_objects("--pred", pred, "--gt", pred, "--json")

    seed, kitchen = next(world.kitchens("val", 1))
    pred = write(tmp_path / "b.json", {f"toy-{seed}": as_rows(narrated_by(kitchen))})
    result = run_objects("--pred", pred, "--data", "toy", "--split", "val", "--limit", 1, "--json")
    assert result["object_accuracy"] == 1
    assert result["wrong_things"] == 0
    assert result["wrong_in_sight"] is None
    counts = [group["segments"] for group in result["by_light"].values()]
    assert sum(counts) == len(kitchen.narrations)


# ------------------------------------------------------------- bad input

@pytest.mark.parametrize("options, says", [
    ("--gt p.json", "only the toy's sentences"),
    ("--gt other.json", "are not in"),
    ("--gt nowhere.json", "nowhere"),
    ("--gt p.json --llm nowhere", "nowhere"),
    ("--gt g.json --llm x --answers g.json", "given twice"),
    ("--gt g.json --llm x --answers p.txt", "does not hold answers"),
    ("--data ek100 --root nowhere", "error"),
])
def test_bad_input_of_objects(tmp_path, monkeypatch, options, says):
    monkeypatch.chdir(tmp_path)
    for name in ("p.json", "g.json", "p.txt"):
        write(tmp_path / name, {"a": narration_rows("C runs."), "b": []})
    write(tmp_path / "other.json", {"z": narration_rows("C runs."), "y": []})
    assert says in run_objects("--pred", "p.json", *options.split(), ok=False)


def test_objects_need_a_truth(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["objects", "--pred", "p.json"])
    with pytest.raises(SystemExit) as end:
        objects.main()
    assert end.value.code == 2
    assert "--gt" in capsys.readouterr().err
