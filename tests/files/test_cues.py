"""Each form of narrations is read, what is near it is refused, what was written is read again."""
import json
import random
from unicodedata import normalize

import av
import pytest

from beyond.streams.inputs import Input
from beyond.streams.subtitles import Writers
from support.common.errors import BadData
from support.common.text import one_line
from support.files.cues import read_cues, srt_text
from support.files.narrations import read_predictions, read_truth
from support.files.own_videos import read_sentences
from support.files.sentences import Notes
from support.files.sources import source_of

SRT = """\ufeff1
00:00:00,000 --> 00:00:01,500
<i>You look</i>
around the {\\an8}room

7
00:00:01,500 --> 1000:00:02,000 X1:40 X2:600 Y1:20 Y2:50
42 cups &amp; a <pan>


8
00:00:05,000 --> 00:00:05,000
"""
VTT = """WEBVTT - my video
Kind: captions

STYLE
::cue { color: red }

NOTE no cue
of two lines

first
00:01.000 --> 00:02.000 align:start position:10%,line-left
<v Ann><c.loud>You</c> <00:01.500>sit,

00:01.000\t-->\t1000:00:04.000
You cut a &lt;3 & &amp;amp; shaped
\u200fcake -> here > there
"""
CSV = 'start,end,text\n0,1.5,You sit\n\n1.5,1:01:02.25,"You ""cut"",\nthen stir"\n0, 1,"3"\n'
# file: (content, sentences)
READ = {
    "a.srt": (SRT, [(1.5, "You look around the room"), (5, ""), (3600002, "42 cups &amp; a <pan>")]),
    "c.srt": ("", []),
    "a.vtt": (VTT, [(2, "You sit,"), (3600004, "You cut a <3 & &amp; shaped \u200fcake -> here > there")]),
    "b.vtt": ("WEBVTT\n\n", []),
    "a.csv": (CSV, [(1, "3"), (1.5, "You sit"), (3662.25, 'You "cut", then stir')]),
    "b.csv": ("\ufefftime,text\n2,You sit\n", [(2, "You sit")]),
}
SAID = "You sit."
RANGE = "00:00:01,000 --> 00:00:02,500"
OF_TOOLS = {                                   # file: content, as the tool writes it
    "boris.srt": f"1\n{RANGE}\nNo focal subject: You sit.\n\n",
    "elan.srt": f"1\n{RANGE}\nYou sit.\n\n2\n00:00:01,200 --> 00:00:01,900\nA tier that overlaps\n\n",
    "premiere.srt": f"\ufeff1\r\n{RANGE}\r\nYou sit.\r\n\r\n",
    "capcut.srt": f"1\n{RANGE}\nYou sit.\n\n\n",
    "whisper.vtt": "WEBVTT\n\n00:01.000 --> 00:02.500\nYou sit.\n\n",
    "youtube.vtt": "WEBVTT\nKind: captions\nLanguage: en\n\n" + RANGE.replace(",", ".")
                   + " align:start position:0%\nYou<00:00:01.500><c> sit.</c>\n",
    # what is not read
    "whisper.tsv": "start\tend\ttext\n1000\t2500\tYou sit.\n",
    "whisper.json": json.dumps({"text": SAID, "segments": [{"start": 1, "end": 2.5, "text": SAID}]}),
    "youtube.sbv": "0:00:01.000,0:00:02.500\nYou sit.\n",
    "elan.eaf": '<?xml version="1.0"?><ANNOTATION_DOCUMENT/>', "elan.txt": "1.0\t2.5\tYou sit.\n",
    "aegisub.ass": "[Script Info]\n", "label_studio.csv": "id,label,video\n1,You sit.,a.mp4\n",
    "via.csv": "# CSV_HEADER = metadata_id,file_list,temporal_coordinates,metadata\n",
}
S1 = "1\n00:00:01,000 --> 00:00:02,000\n{}\n"
V1 = "WEBVTT\n\n00:01.000 --> 00:02.000\n{}\n"
# (file, content, the line that is named: with which a cue or a row begins)
REFUSED = [
    ("a.srt", S1.format("You\n\nsit."), 5),                        # an empty line in a text
    ("a.srt", S1.format("You sit.\n2\n00:00:03,000 --> 00:00:04,000\nYou go."), 1),
    ("a.srt", S1.format("A --> B"), 1),
    ("a.srt", S1.format("A") + "\n2\n00:00:00,900 --> 00:00:04,000\nB\n", 5),          # times
    ("a.srt", S1.format("A")[2:], 1),                              # no number
    ("a.srt", S1.format("A").replace(",", "."), 1),
    ("a.srt", S1.format("A").replace("02,000", "00,500"), 1),      # it ends before it begins
    ("a.srt", S1.format("A").replace("02,000", "61,000"), 1),
    ("a.vtt", S1.format("A"), 1),
    ("a.vtt", V1.format("A").replace(".", ","), 3),
    ("a.vtt", V1.format("A\n00:03.000 --> 00:04.000\nB"), 3),
    ("a.vtt", V1.format("a < b"), 3),                              # a tag up to the next >
    ("a.vtt", V1.format("A\n") + V1.format("B"), 6),               # two files in one
    ("a.csv", "video,time,text\na,1,You sit.\n", 1),
    ("a.csv", "time,text\n1,You cut, then stir.\n", 2),
    ("a.csv", "time,text\n1,You sit.\n1:02,You go.\n", 3),         # minutes, or hours
    ("a.csv", "time,text\n00:00:05:12,You sit.\n", 2),             # frames
    ("a.csv", "start,end,text\n5,2,You sit.\n", 2),
    ("a.csv", 'time,text\n1,"You sit.\n2,You say "go".\n', 3),     # a quote without its end
    ("a.csv", "time,text\n-1,You sit.\n", 2),
    *((f"a.{form}", content.format("A").replace("01", 5000 * "9"), line)
      for form, content, line in (("srt", S1, 1), ("vtt", V1, 3), ("csv", "time,text\n01,{}\n", 2))),
]


def read(path, content: str):
    path.write_bytes(content.encode())
    return [(sentence.time, sentence.text) for sentence in read_cues(path, Notes())]


@pytest.mark.parametrize("name", READ)
def test_each_form_is_read(tmp_path, name):
    content, sentences = READ[name]
    for end in ("\n", "\r\n"):
        assert read(tmp_path / name, content.replace("\n", end)) == sentences


@pytest.mark.parametrize("name, content, line", REFUSED)
def test_what_is_near_a_form_is_refused(tmp_path, name, content, line):
    with pytest.raises(BadData, match=f"{name}, line {line}: expected ") as error:
        read(tmp_path / name, content)
    assert "\n" not in str(error.value)


def test_captions_that_roll_are_told(tmp_path):
    notes = Notes()
    lines = ["You sit.", "You go.", "You go. ", "You eat."]
    cues = [f"00:0{n}.000 --> 00:0{n + 1}.000\n{a}\n{b}\n" for n, (a, b) in enumerate(zip(lines, lines[1:]))]
    (tmp_path / "a.vtt").write_text("\n".join(["WEBVTT\n", *cues]))
    read_cues(tmp_path / "a.vtt", notes)
    assert str(notes) == "cues that repeat a line of the cue before (do captions roll?): 2 (a.vtt)"


JSON = {"a list": [{"end": 5, "text": "B", "start": 4}, {"time": 2, "text": "A\n a", "by": None}]}
JSON |= {"narrations": {"narrations": JSON["a list"], "fps": 3}, "by video": {"a": JSON["a list"]}}


@pytest.mark.parametrize("name", JSON)
def test_json_is_read(tmp_path, name):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(JSON[name]))
    readers = [lambda: read_predictions(path)["a"], lambda: read_truth(path, Notes())["a"].annotators[0]]
    if name != "by video":
        readers.append(lambda: read_sentences(path, Notes()))
    for reader in readers:
        assert [(sentence.time, sentence.text) for sentence in reader()] == [(2, "A a"), (5, "B")]


@pytest.mark.parametrize("content", [
    {"text": "A", "segments": [{"start": 1, "end": 2, "text": "A"}]}, {"transcription": []}, "A", None, {},
    [[1, "A"]], [{"timestamp": 1, "text": "A"}], [{"time": 1, "end": 2, "text": "A"}], [{"time": 1}],
    [{"time": "1", "text": "A"}], [{"time": True, "text": "A"}], [{"time": 1e300, "text": "A"}], [1],
])
def test_json_of_another_kind_is_refused(tmp_path, content):
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(BadData, match=r'a\.json.* expected .*\{"time" or "end": seconds') as error:
        read_sentences(tmp_path / "a.json", Notes())
    assert "\n" not in str(error.value)


def test_two_streams_in_one_file_are_refused(tmp_path):
    live = Input(source_of("camera"), "", {form: str(tmp_path / f"b.{form}")
                                           for form in ("jsonl", "srt", "vtt")})
    for _ in range(2):
        with Writers(live) as writers:
            for n in range(2):
                writers.write({}, {"n": n, "start": n, "end": n + 1.0, "text": "A"})
    for form, path in live.files.items():
        with pytest.raises(BadData, match=f"b.{form}"):
            read_predictions(tmp_path / f"b.{form}")


@pytest.mark.parametrize("name", OF_TOOLS)
def test_files_of_tools(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(OF_TOOLS[name].encode())
    if path.suffix in (".srt", ".vtt"):
        assert (2.5, SAID) in [(sentence.time, sentence.text.removeprefix("No focal subject: "))
                               for sentence in read_sentences(path, Notes())]
        return
    message = "expected" if path.suffix in (".json", ".csv") else ".json, .jsonl, .csv, .srt, .vtt"
    with pytest.raises(BadData, match=message):
        read_predictions(path)


PIECES = ["-->", "--->", "-", ">", "<", "<i>", "</i>", "<font x>", "{\\an8}", "{", "\\", "&amp;", "&", "&lt;",
          "00:00:01,000 --> 00:00:02,000", "42", "1", "NOTE", "WEBVTT", "\n", "\n\n", "\r", " ", "  ", "\t",
          "\u2028", "\x85", "\u202e", "\x1b", "\ufeff", "\u200d", "\u00ad", "\u00a0", "You", "sit.", "厨",
          "\U0001f44d\U0001f3fd", "دست را می\u200cشویید", '"', ",", "a:b"]


def random_rows(seed: int) -> list[dict]:
    rng = random.Random(seed)
    end = 0.0
    rows = []
    for n in range(40):
        start, end = end, end + rng.choice([0.001, 0.5, 60, 90_000]) * rng.random()
        text = rng.choice(["", " "]).join(rng.choices(PIECES, k=rng.randint(0, 6)))
        rows.append({"n": n, "start": start, "end": end, "text": text})
    assert end < 3600 * 1000
    return rows


def written(folder, rows) -> dict:
    files = {form: str(folder / f"a.{form}") for form in ("jsonl", "srt", "vtt")}
    with Writers(Input(source_of("a.mp4"), "", files)) as writers:
        for row in rows:
            writers.write({}, row)
    return {form: folder / f"a.{form}" for form in files}


def as_it_is(text: str) -> str:
    return text if text.isprintable() else one_line(text)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_written_is_read_again(tmp_path, seed):
    """Any text, times up to 1,000 hours: one line in .jsonl, with its blanks, and in .vtt, and in
    .srt what `srt_text` says, whose characters are those of the text but for their width."""
    rows = random_rows(seed)
    forms = {"jsonl": (as_it_is, 99), "vtt": (one_line, 3), "srt": (srt_text, 3)}
    for form, path in written(tmp_path, rows).items():
        held, digits = forms[form]
        expected = [(round(row["end"], digits), held(row["text"])) for row in rows]
        got = [(sentence.time, sentence.text) for sentence in read_predictions(path)["a"]]
        assert got == expected, form
    texts = [srt_text(row["text"]) for row in rows]
    assert [normalize("NFKC", text) for text in texts] == [
        normalize("NFKC", one_line(row["text"])) for row in rows]
    with av.open(str(tmp_path / "a.srt")) as file:
        shown = [cue.dialogue.decode() for packet in file.demux() for cue in packet.decode()]
    assert shown == list(filter(None, texts))              # FFmpeg takes nothing for markup
