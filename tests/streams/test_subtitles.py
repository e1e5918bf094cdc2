"""streams/subtitles.py: files that are appended to."""
import pytest

from streams.subtitles import cut


@pytest.mark.parametrize("form, content, kept", [
    ("srt", "1\r\n00:00:01,000 --> 00:00:02,000\r\nA.\r\n\r\n", None),
    ("srt", "1\n00:00:01,000 --> 00:00:02,000\nA.\n", "1\n00:00:01,000 --> 00:00:02,000\nA.\n\n"),
    ("srt", "1\n00:00:01,000 --> 00:00:02,000\nA.\n\n2\n00:00:03,000 --> 00:00:04,000\nYou fi",
     "1\n00:00:01,000 --> 00:00:02,000\nA.\n\n"),
    ("srt", "1\n00:00:01,000 --> 00:00:02,000\nA.\nB.\n",
     "1\n00:00:01,000 --> 00:00:02,000\nA.\nB.\n\n"),
    ("srt", "1\r00:00:01,000 --> 00:00:02,000\rA.\r\r", "1\r00:00:01,000 --> 00:00:02,000\rA.\r\r\n\n"),
    ("vtt", "WEBVTT\r\n\r\n00:01.000 --> 00:02.000\r\nA.",
     "WEBVTT\r\n\r\n00:01.000 --> 00:02.000\r\nA.\n\n"),
    ("jsonl", '{"n": 0}\n{"n": 1}', '{"n": 0}\n{"n": 1}\n'),
    ("jsonl", '{"n": 0}\n{"n": ', '{"n": 0}\n'),
])
def test_whole_lines_of_a_file_that_is_appended_to_stay(tmp_path, form, content, kept):
    path = tmp_path / f"a.{form}"
    path.write_bytes(content.encode())
    cut(form, str(path))
    assert path.read_bytes() == (kept or content).encode()
