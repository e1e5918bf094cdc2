"""support/common/signatures.py: what a refused file is, by its first bytes."""
import gzip
import io
import pickle
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from helpers import ROOT
from support.common.signatures import what_is

KITCHEN = (ROOT / "toy" / "kitchen.mp4").read_bytes()
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + 64 * "0" + "\nsize 999\n"


def saved(save) -> bytes:
    buffer = io.BytesIO()
    save(buffer)
    return buffer.getvalue()


def zipped(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(name, "x")
    return buffer.getvalue()


@pytest.mark.parametrize("content, words", [
    (b"", "is empty"),
    (bytes(50_000), "begins with zeros"),
    (POINTER.encode(), "git lfs pull"),
    (b"../../.git/annex/objects/SHA256E-s5--0.mp4\n", "git annex get"),
    (b"/annex/objects/SHA256E-s5--0.mp4\n", "git annex get"),
    (b"<!DOCTYPE html><html>", "web page"),
    (b"\xef\xbb\xbf\n\n  <HTML lang=en>", "web page"),
    (b"<!-- saved -->\n<html>", "web page"),
    (b"#EXTM3U\n#EXTINF:3\na.mp4\n", "playlist"),
    (b"d8:announce35:udp://x", "torrent"),
    (b'{"error": "quota"}', "JSON, and begins with '{\"error\""),
    (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code>", "XML, and begins"),
    ("404: Nicht gefunden (ü)".encode(), "text, and begins with '404"),
    (b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X", "what macOS puts beside"),
    (b"Salted__12345678", "encrypted"),
    (b"RIFF\x00\x01\x00\x00WEBPVP8X\x0a\0\0\0\x02\0\0\0\0\0\0\0\0\0ANIM", "animated WebP"),
    (gzip.compress(KITCHEN), "gzip"),
    (zipped("video.mp4"), "ZIP archive"),
    (b"Rar!\x1a\x07\x01\x00", "RAR"),
    (b"7z\xbc\xaf\x27\x1c\0\x04", "7z"),
    (b"a.mp4" + bytes(252) + b"ustar\x0000", "tar archive"),
    (b"%PDF-1.7", "PDF"),
    (saved(lambda file: np.save(file, np.zeros(3))), "NumPy array"),
    (saved(lambda file: np.savez(file, a=np.zeros(3))), "NumPy arrays"),
    (saved(lambda file: torch.save({"a": torch.zeros(2)}, file)), "torch.save"),
    (pickle.dumps({"a": 1}), "pickle"),
    (b"\x89HDF\r\n\x1a\n", "HDF5"),
    (b"GGUF\x03\0\0\0", "GGUF"),
    (KITCHEN[:-5000], "is cut off"),
    (KITCHEN[:30], "is cut off"),
    (KITCHEN[:32] + b"\0\0\0\x10mdat" + bytes(8), "no index"),
    (b"\0\0\0\x18styp" + bytes(16), "segment of a stream"),
    (bytes(range(256)), None),
    (KITCHEN, None),
])
def test_a_file_is_named(tmp_path, content, words):
    path = tmp_path / "a.mp4"
    path.write_bytes(content)
    what = what_is(path)
    assert what is None if words is None else words in what
    assert "\n" not in str(what)


def test_other_names(tmp_path):
    assert what_is(tmp_path / "gone.mp4") is None
    assert what_is(tmp_path) is None
    save_file({"a": torch.zeros(2)}, tmp_path / "a.pt")
    assert what_is(tmp_path / "a.pt") == "is a .safetensors file"
    (tmp_path / "a.mp4.crdownload").write_bytes(b"x")
    assert "unfinished" in what_is(tmp_path / "a.mp4.crdownload")
    (tmp_path / "b.mp4").write_bytes(b"x")
    (tmp_path / "b.mp4.aria2").write_bytes(b"x")
    assert "unfinished" in what_is(tmp_path / "b.mp4")


@pytest.mark.parametrize("seed", range(5))
def test_nonsense_and_broken_boxes_end(tmp_path, seed):
    """Whatever the bytes are, there is an answer, and one line."""
    rng = np.random.default_rng(seed)
    for _ in range(100):
        content = bytearray(KITCHEN[:200] if rng.random() < 0.5 else rng.bytes(200))
        for position in rng.integers(0, 200, 5):
            content[position] = rng.integers(0, 256)
        (tmp_path / "a.mp4").write_bytes(content)
        assert "\n" not in str(what_is(tmp_path / "a.mp4"))


@pytest.mark.parametrize("share", [0.2, 0.5, 0.99])
def test_tensors_that_are_not_all_there(tmp_path, share):
    """Both sizes are said; of a whole file, what it is; of another beginning, nothing of the kind."""
    file = tmp_path / "a.safetensors"
    save_file({"x": torch.zeros(400), "y": torch.zeros(3)}, file)
    whole = file.read_bytes()
    assert what_is(file) == "is a .safetensors file"
    file.write_bytes(whole[:int(share * len(whole))])
    assert what_is(file).startswith(f"is damaged: {int(share * len(whole))} of {len(whole)} bytes")
    file.write_bytes(bytes([9, 0, 0, 0, 0, 0, 0, 0]) + b"{}" + bytes(50))
    assert what_is(file) is None
