"""support/files/cues.py and narrations.py: tables of every form, texts of every script, and subtitles and
transcripts of other programs."""
import csv
import io
import json
import random
import re

import pytest

from streams.inputs import Input
from streams.subtitles import Writers
from support.common.errors import BadData
from support.files.cues import read_cues
from support.files.narrations import read_predictions, read_truth
from support.files.own_videos import read_sentences
from support.files.tracks import Notes, frame_at, time_of

TEXTS = ["You fill the rack.", "You cut, then stir; or not.", 'You say "go!"', "You wash 3 cups|pans.",
         "Вы режете лук."]
ROWS = [(1.5 * n, 1.5 * n + 1, text) for n, text in enumerate(TEXTS)]


def clock(seconds: float, comma: bool) -> str:
    text = f"{int(seconds) // 3600:02}:{int(seconds) // 60 % 60:02}:{seconds % 60:06.3f}"
    return text.replace(".", ",") if comma else text


TIMES = {"seconds": str, "six digits": "{:.6f}".format, "clock": lambda x: clock(x, False),
         "decimal comma": lambda x: str(x).replace(".", ","), "clock, comma": lambda x: clock(x, True)}


def table(rows, separator: str, quoting=csv.QUOTE_MINIMAL) -> str:
    file = io.StringIO()
    csv.writer(file, delimiter=separator, quoting=quoting, lineterminator="\n").writerows(rows)
    return file.getvalue()


def read(path, content: str):
    path.write_text(content, encoding="utf-8")
    return [(sentence.time, sentence.text) for sentence in read_cues(path, Notes())]


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("time", TIMES)
def test_tables_without_a_head(tmp_path, separator, time):
    """Two columns, or three of which the second is a time; with blanks behind separators, in quotes."""
    form = TIMES[time]
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL):
        for cells in (lambda a, b, text: [form(b), text], lambda a, b, text: [form(a), form(b), text],
                      lambda a, b, text: [int(a), form(b), text]):
            content = table([cells(*row) for row in ROWS], separator, quoting)
            expected = [(end, text) for _, end, text in ROWS]
            assert read(tmp_path / "a.csv", content) == expected
            if quoting == csv.QUOTE_ALL:
                spaced = content.replace(f'"{separator}"', f'"{separator} "')
                assert read(tmp_path / "a.csv", spaced) == expected


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_columns_that_nobody_can_know_are_asked_for(tmp_path, separator):
    """More columns, or three of another kind: refused, with a head to add; with it, all is read."""
    for cells in (lambda n, a, b, text: [n, a, b, text], lambda n, a, b, text: [b, text, "left"],
                  lambda n, a, b, text: [b, "me", text], lambda n, a, b, text: ["me", b, text],
                  lambda n, a, b, text: [n, a, b, "me", text]):
        rows = [cells(n, *row) for n, row in enumerate(ROWS)]
        with pytest.raises(BadData, match="its first line does not name its .* columns"):
            read(tmp_path / "a.csv", table(rows, separator))
        head = ["time" if cell == ROWS[0][1] else "text" if cell == TEXTS[0] else "other"
                for cell in rows[0]]
        assert read(tmp_path / "a.csv", table([head, *rows], separator)) == [(end, text) for _, end, text in ROWS]


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("before_frames", [":", ";"])
def test_times_that_count_frames_are_refused(tmp_path, separator, before_frames):
    """As editors write them; with ";", the separator may be taken for the one of the cells."""
    rows = [[f"00:00:0{n}{before_frames}{n + 10}", text] for n, text in enumerate(TEXTS[:9])]
    for head in ([], [["time", "text"]]):
        for content in (table(head + rows, separator), "\n".join(map(separator.join, head + rows))):
            with pytest.raises(BadData, match="(without|have no) frames|its first line does not name"):
                read(tmp_path / "a.csv", content)


@pytest.mark.parametrize("content", [
    "0.5,2.0\n2.0,4.0\n", "0:01;0:02\n", "1,5\n", "time,text\n1,2\n3,4\n"])
def test_numbers_are_no_sentences(tmp_path, content):
    with pytest.raises(BadData, match="the sentences are numbers"):
        read(tmp_path / "a.csv", content)


@pytest.mark.parametrize("seed", range(3))
def test_any_table_is_read_or_refused(tmp_path, seed):
    """Cells of every kind, in rows that may not match."""
    rng = random.Random(seed)
    cells = ["", "1", "2.5", "0:01", "1,5", "x", "You sit.", '"', '"a, b"', "time", "text", "end", " "]
    for _ in range(300):
        separator = rng.choice(",;\t|")
        content = "\n".join(separator.join(rng.choices(cells, k=rng.randint(1, 4)))
                            for _ in range(rng.randint(0, 4)))
        try:
            sentences = read(tmp_path / "a.csv", content)
        except BadData as error:
            assert "\n" not in str(error)
        else:
            assert not sentences or any(re.search("[a-z]", text) for _, text in sentences), content


# ------------------------------------------------------------------------------ texts

SCRIPTS = [
    "دست را می\u200cشویید.",                    # Persian: a joiner inside a word
    "आप क\u094d\u200dष काटते हैं।",                # Hindi, with its own full stop
    "അവന\u0d4d\u200d വന്നു.", "你洗红色的杯子。", "빨간 컵을 씻는다.", "あなたは「洗う」。",
    "Ты моешь чашку!", "אתה שוטף כוס?", "คุณล้างถ้วย.", "আপনি ধোয়।", "تم دھوتے ہو۔", "እርስዎ ይታጠባሉ።",
    "Դու լվանում ես։", "អ្នកលាង។", "सः गच्छति॥",
    "You open the re\u00adfrigerator.",         # a soft hyphen
    "Vous dites\u202f: «\u00a0non\u00a0».", "Zoë cuts the cre\u0300me bru\u0302le\u0301e.",
    "You cook \U0001f469\u200d\U0001f373 with \u2764\ufe0f and \U0001f44d\U0001f3fd.",
    "You wave \U0001f3f4\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f.",
    "\u200fאתה \u200eA\u200f שוטף.", "You take 2\u2009ml\u3000now.", "You use \ue000 and \U0001fae8.",
    "葛\U000e0100飾区で洗う。", "You press <Enter>, {x} and a < b > c.",
]


def written(path, text: str) -> None:
    """A file of one narration at 2 s, by the ending of its name."""
    cue = f"00:00:01.000 --> 00:00:02.000\n{text}\n"
    rows = [{"time": 2.0, "text": text}]
    contents = {".srt": f"1\n{cue}", ".vtt": f"WEBVTT\n\n{cue}", ".csv": table([[2, text]], ","),
                ".json": json.dumps({"narrations": rows}, ensure_ascii=False),
                ".jsonl": json.dumps(rows[0])}
    path.write_text(contents[path.suffix], encoding="utf-8")


@pytest.mark.parametrize("ending", [".srt", ".vtt", ".csv", ".json", ".jsonl"])
def test_texts_of_all_scripts_are_read_as_they_were_written(tmp_path, ending):
    path = tmp_path / f"a{ending}"
    for text in SCRIPTS:
        written(path, text)
        sentence, = read_predictions(path)["a"]
        assert sentence.text == text
        if ending != ".jsonl":
            sentence, = read_sentences(path, Notes())
            assert sentence.text == text
            written(path, f"\u202e {text}\x1b\x9b\u2066")
            sentence, = read_sentences(path, Notes())
            assert sentence.text == text


def test_texts_of_all_scripts_are_written_as_they_are(tmp_path):
    """And read again, from each file."""
    files = {form: str(tmp_path / f"a.{form}") for form in ("jsonl", "srt", "vtt")}
    with Writers(Input("a.mp4", "", files)) as writers:
        for n, text in enumerate(SCRIPTS):
            writers.sentence({"n": n, "start": n, "end": n + 1.0, "text": text})
    for form in files:
        sentences = read_predictions(tmp_path / f"a.{form}")["a"]
        assert [sentence.text for sentence in sentences] == SCRIPTS


# ------------------------------------------------------------------------------ other programs

CUES = [("0:00:00.50", "0:00:02.00"), ("0:00:02.00", "0:00:04.00")]
OTHER = {
    ".ass": "[Script Info]\nScriptType: v4.00+\n\n[Events]\nDialogue: 0,0:00:00.50,0:00:02.00,A,,0,0,0,,Hi.\n",
    ".sbv": "0:00:00.500,0:00:02.000\nYou fill.\n\n0:00:02.000,0:00:04.000\nYou sit.\n",
    ".sub": "{1}{1}25\n{12}{50}You fill.\n",
    "SubViewer": "[INFORMATION]\n[TITLE]\n00:00:01.00,00:00:02.00\nYou fill.\n",
    "MPL2": "[10][20]You fill.\n",
    ".lrc": "[ti:Kitchen]\n[00:01.50]You fill.\n",
    "lyrics": "[00:01.50]You fill.\n[00:03.00]You sit.\n",
    ".smi": "<SAMI><BODY><SYNC Start=100><P>You fill.</BODY></SAMI>",
    ".ttml": "<?xml version='1.0'?><tt xmlns='http://www.w3.org/ns/ttml'><body/></tt>",
    "XML": "<transcript><text start='1'>You fill.</text></transcript>",
    ".scc": "Scenarist_SCC V1.0\n\n00:00:00:00\t9420 94ae\n",
    "TMPlayer": "00:00:01:You fill.\n00:00:02:You sit.\n",
    "JSON": '{"segments": [{"start": 1, "end": 2, "text": "You fill."}]}',
    "web page": "<!DOCTYPE html>\n<html>",
    "Git LFS": "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    "no subtitles": "You fill the rack.\nYou sit.\n",
}


@pytest.mark.parametrize("ending", [".srt", ".vtt"])
@pytest.mark.parametrize("kind", OTHER)
def test_subtitles_of_another_kind_are_shown(tmp_path, kind, ending):
    """Their beginning, or what else the file is, and how subtitles become .srt."""
    (tmp_path / f"a{ending}").write_text(OTHER[kind])
    shown = kind if kind in ("web page", "Git LFS") else re.escape(OTHER[kind].split()[0])
    if kind not in ("web page", "Git LFS", "JSON", ".smi", ".ttml", "XML"):
        shown = f"text, and begins with .{shown}"
    with pytest.raises(BadData, match=f"line 1: .*; it is .*{shown}.*ffmpeg") as error:
        read_cues(tmp_path / f"a{ending}", Notes())
    assert "empty line" not in str(error.value)


S = "You fill the rack."


@pytest.mark.parametrize("content, keys", [
    ({"transcription": [{"offsets": {"from": 500, "to": 2000}, "text": S}]}, ["transcription"]),
    ({"text": S, "chunks": [{"timestamp": [0.5, 2.0], "text": S}]}, ["text", "chunks"]),
    ({"events": [{"tStartMs": 500, "segs": [{"utf8": S}]}]}, ["events"]),
    ({"results": {"channels": []}, "metadata": {}}, ["results", "metadata"]),
    ({"utterances": [{"start": 500, "end": 2000, "text": S}]}, ["utterances"]),
    ({"monologues": []}, ["monologues"]),
    ([{"start": 0.5, "duration": 1.5, "text": S}], ["start, duration, text"]),
    ([{"end": 2.0, "transcript": S}], ["end, transcript"]),
    ({"segments": [{"start": 0.5, "words": []}]}, ["start, words"]),
    ([[0.5, S]], ["[0.5"]),
    ({}, ["nothing"]),
    (S, ["str"]),
    (None, ["NoneType"]),
])
def test_transcripts_of_other_programs_are_told_what_is_read(tmp_path, content, keys):
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(BadData) as error:
        read_sentences(tmp_path / "a.json", Notes())
    message = str(error.value)
    assert all(key in message for key in keys), message
    assert '"time"' in message and '"text"' in message and "\n" not in message


# ------------------------------------------------------------------------------ what people have

CUE = "{}00:00:01,000 --> 00:00:02,000\nYou fill the rack.\n\n{}00:00:03,000 --> 00:00:04,000\n42\n"


@pytest.mark.parametrize("number", ["{}\n", "", "{}\n\n", "\n\n{}\n", "{}\n\u200b", "{}\n\u200e", "\ufeff{}\n"])
@pytest.mark.parametrize("arrow", ["-->", "->", "→", "–>", "--&gt;", "-->\t"])
def test_numbers_and_times_in_every_form(tmp_path, number, arrow):
    content = CUE.format(number.format(1), number.format(2)).replace("-->", arrow)
    assert read(tmp_path / "a.srt", content) == [(2.0, S), (4.0, "42.")]


@pytest.mark.parametrize("end", ["", "\u200e", "\u200f\u200e", "\u2069", "\u00a0", "\ufeff", "» ", "”\u200f"])
def test_what_cannot_be_seen_after_a_full_stop_asks_for_no_other(tmp_path, end):
    (_, text), = read(tmp_path / "a.srt", CUE.format("", "")[:32] + f"Du sitzt.{end}\n")
    assert text.count(".") == 1


@pytest.mark.parametrize("seed", range(3))
def test_each_sentence_of_captions_is_read_once(tmp_path, seed):
    """Captions that roll by a line, word after word in colour, or that have lines in common by chance."""
    rng = random.Random(seed)
    lines = [" ".join(rng.sample(["You", "cut", "fill", "rack", "pan"], 3)) + f" {n}." for n in range(9)]
    stamp = "00:00:{:02},000 --> 00:00:{:02},000\n{}\n\n".format
    rolling = "".join(stamp(n, n + 1, "\n".join(lines[max(0, n - 1):n + 1])) for n in range(9))
    assert read(tmp_path / "a.srt", rolling) == [(n + 1.0, line) for n, line in enumerate(lines)]
    coloured = "".join(stamp(n, n + 1, line.replace(word, f"<u>{word}</u>"))
                       for n, (line, word) in enumerate((line, word) for line in lines for word in line.split()))
    assert read(tmp_path / "a.srt", coloured) == [(4 * n + 4.0, line) for n, line in enumerate(lines)]
    alike = "".join(stamp(n, n + 1, f"Yes.\n{line}") for n, line in enumerate(lines))
    assert read(tmp_path / "a.srt", alike) == [(n + 1.0, f"Yes. {line}") for n, line in enumerate(lines)]


def test_joined_files_are_refused(tmp_path):
    one = "WEBVTT\n\n00:00.000 --> 00:01.000\nYou sit.\n\n"
    with pytest.raises(BadData, match="line 6: here another file begins"):
        read(tmp_path / "a.vtt", one + one)


@pytest.mark.parametrize("rows", [
    [(0, 2.5), (2.5, 3), (5.5, 1)],            # start, duration
    [(2, 0.5), (4, 2.5), (6, 4)],              # end, start
    [(0, 5), (2, 0), (3, 5)],                  # decimal commas between commas
    [(0, 5), (1, 5), (2, 5)],
])
def test_two_columns_of_times_that_may_be_no_start_and_end(tmp_path, rows):
    with pytest.raises(BadData, match="what they are cannot be known"):
        read(tmp_path / "a.csv", table([(*row, S) for row in rows], ","))


@pytest.mark.parametrize("rows", [
    [(0, 2), (2, 4), (5, 7)],                  # whole seconds
    [(0.5, 2.5), (1.5, 4), (2, 3)],            # that overlap
    [(4.5, 6), (0.5, 2.5)],                    # in any order
    [(0, 0.5), (1, 1.5), (2, 2.5)],            # a number, and an end
])
def test_two_columns_of_times_are_a_start_and_an_end(tmp_path, rows):
    content = table([(*row, S) for row in rows], ",")
    assert read(tmp_path / "a.csv", content) == [(end, S) for end in sorted(end for _, end in rows)]


@pytest.mark.parametrize("head", ["start_time,end_time,caption", "begin,stop,narration"])
def test_a_head_with_other_names_is_asked_for_ours(tmp_path, head):
    with pytest.raises(BadData, match="its first line does not name.*time and text are read"):
        read(tmp_path / "a.csv", f"{head}\n0,2,You sit.\n2,4,You go.\n")


@pytest.mark.parametrize("separator", [";", ",", "\t", "|"])
def test_a_table_can_say_what_separates_its_cells(tmp_path, separator):
    content = f"sep={separator}\n" + table([(1.5, S), (2.5, S)], separator)
    assert read(tmp_path / "a.csv", content) == [(1.5, S), (2.5, S)]


@pytest.mark.parametrize("name", ["time", "text"])
def test_columns_of_one_name_are_refused(tmp_path, name):
    with pytest.raises(BadData, match=f"2 columns are named {name}"):
        read(tmp_path / "a.csv", f"time,text,{name}\n1,You sit.,You go.\n")


@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".json"])
@pytest.mark.parametrize("key", ["video", "video_id"])
def test_narrations_of_several_videos_are_not_joined(tmp_path, ending, key):
    rows = [{key: video, "time": 1.0, "text": S} for video in "ab"]
    contents = {".csv": table([rows[0].keys(), *(row.values() for row in rows)], ","),
                ".jsonl": "\n".join(map(json.dumps, rows)), ".json": json.dumps(rows)}
    (tmp_path / f"a{ending}").write_text(contents[ending])
    with pytest.raises(BadData, match="has narrations of 2 videos"):
        read_predictions(tmp_path / f"a{ending}")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("comma", [True, False])
def test_what_stands_behind_the_times(tmp_path, text, comma):
    """A text there is a cue's, too; settings are none."""
    kind = "a.srt" if comma else "a.vtt"
    head = "" if comma else "WEBVTT\n\n"
    settings = "X1:40 X2:600 Y1:20 Y2:50" if comma else "align:start position:10%,line-left size:35%"
    times = f"{clock(1, comma)} --> {clock(2, comma)}"
    for content in (f"{times} {text}\n", f"{times}\t{text}\n", f"{times} {settings}\n{text}\n",
                    f"{times} \u200e\n{text}\n", f"{times} line: 0 align: start\n{text}\n"):
        assert read(tmp_path / kind, head + content) == [(2.0, text)]
    assert read(tmp_path / kind, f"{head}{times} Ann: yes.\n") == [(2.0, "Ann: yes.")]


# What must not be read silently otherwise than it was meant
REFUSED = {
    "decimal comma in clocks.csv": ("0:02,25,You wash.\n0:06,20,You dry.\n", "cannot be known"),
    "frames.csv": ("00:00:02;25;You wash.\n00:00:06;20;You dry.\n", "cannot be known"),
    "ends before it begins.csv": ("start,end,text\n0,5,You wash.\n9,5,You dry.\n",
                                  "line 3: it ends before it begins"),
    "a clock and seconds.csv": ("0:02,5.5,You wash.\n0:06,7.5,You dry.\n", "cannot be known"),
    "of two clips.csv": ("clip_uid,time,text\nA,2,You wash.\nB,3,You open it.\n", "of 2 videos"),
    "of two takes.csv": ("Take UID,time,text\nA,2,You wash.\nB,3,You open it.\n", "of 2 videos"),
    "joined.srt": ("1\n00:00:00,000 --> 00:00:03,000\nYou stir.\n\n2\n00:00:03,000 --> 00:00:09,000\n"
                   "You taste.\n\n1\n00:00:00,000 --> 00:00:03,000\nYou wash.\n",
                   "another file begins"),
    "joined, from 0.srt": ("0\n00:00:04,000 --> 00:00:05,000\nYou stir.\n\n"
                           "0\n00:00:01,000 --> 00:00:03,000\nYou wash.\n", "another file begins"),
    "empty line in a text.vtt": ("WEBVTT\n\n00:00.000 --> 00:03.000\nYou wash\n\nthe cup.\n\n"
                                 "00:04.000 --> 00:05.000\nYou go.\n", "line 6"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_be_read_in_two_ways_is_refused(tmp_path, name):
    content, message = REFUSED[name]
    with pytest.raises(BadData, match=message):
        read(tmp_path / name, content)


@pytest.mark.parametrize("first", ["You stir the soup.", "You stir\nthe soup.", "{\\an8}You stir the soup."])
def test_a_text_that_comes_again_after_a_pause_is_another_narration(tmp_path, first):
    content = (f"1\n00:00:00,000 --> 00:00:03,000\nYou stir the soup.\n\n"
               f"2\n00:00:13,000 --> 00:00:15,000\n{first}\n\n"
               f"3\n00:00:18,000 --> 00:00:20,000\n{first}\n")
    assert read(tmp_path / "a.srt", content) == [(3, TEXT := "You stir the soup."), (15, TEXT), (20, TEXT)]


def test_cues_in_any_order(tmp_path):
    """Also where the same words come much earlier or later."""
    content = ("2\n00:05:03,000 --> 00:05:04,000\nYou stir.\n\n"
               "1\n00:00:01,000 --> 00:00:02,000\n<i>You stir.</i>\n")
    assert read(tmp_path / "a.srt", content) == [(2, "You stir."), (304, "You stir.")]


def test_each_narration_may_have_a_clip_and_a_file_of_its_own(tmp_path):
    content = "clip_id,file,time,text\n1,a.jpg,2,You wash.\n2,b.jpg,3,You open it.\n"
    assert read(tmp_path / "a.csv", content) == [(2, "You wash."), (3, "You open it.")]


def test_one_video_of_several_annotators(tmp_path):
    rows = [[{"time": 2, "text": "You wash."}], [{"time": 3, "text": "You dry."}]]
    (tmp_path / "a.json").write_text(json.dumps({"narrations": rows}))
    assert [len(sentences) for sentences in read_truth(tmp_path)["a"].annotators] == [1, 1]


def test_comments_and_styles_of_vtt_are_no_text(tmp_path):
    content = ("WEBVTT\nKind: captions\n\nSTYLE\n::cue { color: red }\n\n00:00.000 --> 00:03.000\nYou wash.\n\n"
               "NOTE of\nmany lines\n\nthe second\n00:04.000 --> 00:05.000\nYou go.\n")
    assert read(tmp_path / "a.vtt", content) == [(3, "You wash."), (5, "You go.")]


def test_an_end_is_the_time_where_there_are_both(tmp_path):
    assert read(tmp_path / "a.csv", "time,end,text\n0,5,You wash.\n5,9,You dry.\n") == \
        [(5, "You wash."), (9, "You dry.")]
    for rows, expected in (([{"timestamp": 0, "end": None}, {"timestamp": 5, "end": 9}], [0, 5]),
                           ([{"time": 0, "end": 2}, {"time": 5, "end": 9}], [2, 9])):
        (tmp_path / "a.json").write_text(json.dumps([row | {"text": "You go."} for row in rows]))
        assert [sentence.time for sentence in read_predictions(tmp_path / "a.json")["a"]] == expected
    for rows in ([{"start": 5, "end": 2, "text": "You go."}], [{"take_uid": "A", "time": 2, "text": "You go."},
                                                               {"take_uid": "B", "time": 3, "text": "You go."}]):
        (tmp_path / "a.json").write_text(json.dumps(rows))
        with pytest.raises(BadData, match="ends before|of 2 videos"):
            read_predictions(tmp_path / "a.json")


def test_one_text_scores_alike_in_every_format(tmp_path):
    """Without a full stop, and on two lines."""
    (tmp_path / "a.json").write_text(json.dumps({"narrations": [{"time": 2, "text": "You wash\nit"}]}))
    (tmp_path / "a.csv").write_text('time,text\n2,"You wash it"\n')
    (tmp_path / "a.srt").write_text("1\n00:00:00,000 --> 00:00:02,000\nYou wash\nit\n")
    for ending in ("json", "csv", "srt"):
        notes = Notes()
        sentence, = read_predictions(tmp_path / f"a.{ending}", notes)["a"]
        assert (sentence.time, sentence.text) == (2, "You wash it.")
        assert "1 sentences without a full stop given one" in str(notes)


@pytest.mark.parametrize("fps", [2, 3, 7, 12, 29.97])
def test_milliseconds_of_subtitles_do_not_move_a_narration(fps):
    for frame in range(300):
        assert frame_at(round(time_of(frame, fps), 3), fps) == frame
