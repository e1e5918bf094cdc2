"""streams/subtitles.py: files that are appended to."""
import pytest

from streams.subtitles import cut
from support.common.errors import BadData

CUE = "1\n00:00:01,000 --> 00:00:02,000\nA.\n\n"


@pytest.mark.parametrize("form, whole, half", [
    ("srt", CUE, ""),
    ("srt", CUE, "2\n00:00:03,000 --> 00:00:04,000\nYou fi"),
    ("vtt", "", "WEBVTT\n"),
    ("jsonl", '{"n": 0}\n', '{"n": '),
])
def test_what_a_killed_process_left_half_is_cut_and_said(tmp_path, capsys, form, whole, half):
    path = tmp_path / f"a.{form}"
    path.write_text(whole + half)
    cut(form, str(path))
    assert path.read_text() == whole
    assert ("its last line or cue is not whole" in capsys.readouterr().err) == bool(half)


def test_a_file_with_other_line_breaks_is_not_cut(tmp_path):
    path = tmp_path / "a.srt"
    path.write_bytes(CUE.replace("\n", "\r\n").encode())
    with pytest.raises(BadData, match="a.srt: has other line breaks"):
        cut("srt", str(path))
    assert path.stat().st_size == len(CUE) + 4
