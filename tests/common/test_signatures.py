"""support/common/signatures.py: what often stands in place of a file, by its first bytes."""
import pytest

from helpers import ROOT
from support.common.signatures import what_is

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + 64 * "0" + "\nsize 999\n"


@pytest.mark.parametrize("content, words", [
    (b"", "is empty"),
    (POINTER.encode(), "git lfs pull"),
    (b"\xef\xbb\xbf\n  <HTML lang=en>", "web page"),
    (b"<!DOCTYPE html>", "web page"),
    (b"404: not found", None),
    (bytes(range(256)), None),
    ((ROOT / "toy" / "kitchen.mp4").read_bytes(), None),
])
def test_a_file_is_named(tmp_path, content, words):
    path = tmp_path / "a.mp4"
    path.write_bytes(content)
    what = what_is(path)
    assert what is None if words is None else words in what
    assert what_is(tmp_path / "gone.mp4") is None and what_is(tmp_path) is None
