"""What a file is that could not be read as what it should be: by its first bytes."""
from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

HEAD = 4096                                    # bytes that are looked at
POINTER = "is a {} pointer, not the file that it stands for; get that by `{}`"

# (a pattern of the first bytes, what such a file is); the first one that fits is taken
KINDS = [(re.compile(pattern, re.DOTALL | re.IGNORECASE), what) for pattern, what in [
    (rb"version https://git-lfs", POINTER.format("Git LFS", "git lfs pull")),
    (rb"(?:\.\./)*(?:\.git)?/annex/objects/", POINTER.format("git-annex", "git annex get FILE")),
    (rb"(?:\xef\xbb\xbf)?\s*(?:<!--.*?-->\s*)?<(?:!doctype html|html|head|script)",
     "is a web page (HTML), not what it links to; download the file itself"),
    (rb"(?:\xef\xbb\xbf)?#EXTM3U",
     "is a playlist that cannot be opened. Are its parts there, does its name end in .m3u8, and does "
     "it begin without a byte order mark? Else give the address from which it came, or the video; "
     "or, if you trust it, --source-option allowed_extensions=ALL --source-option extension_picky=0 "
     "--source-option protocol_whitelist=file,http,https,tcp,tls,crypto"),
    (rb"(?:<\?xml.*?)?<MPD", "is a DASH playlist, which is not read here; give its .m3u8, or one "
                             "video: ffmpeg -i IN -c copy OUT.mp4"),
    (rb"d\d+:(?:announce|created by|info)", "is a torrent; download what it describes"),
    (rb"\[InternetShortcut\]", "is a link; download what it links to"),
    (rb"bplist00", "is a property list of macOS, perhaps of a file that is still in iCloud"),
    (rb"\x00\x05\x16[\x00\x07]", "is what macOS puts beside a file (._NAME); give NAME"),
    (rb"Salted__|age-encryption\.org|-----BEGIN PGP|\x85[\x01\x02].\x03",
     "is encrypted; decrypt it first"),
    (rb"RIFF....WEBP(?=.{0,64}ANIM)", "is an animated WebP, for which there is no decoder here; "
                                      "convert it to .gif, .png or .mp4"),
    (rb"\xff\x0a|\x00\x00\x00\x0cJXL ", "is a JPEG XL picture"),
    (rb"(?:....ftyp(?:heic|heix|mif1|msf1))", "is a HEIF picture"),
    (rb"8BPS", "is a Photoshop file"),
    (rb"....(?:styp|sidx|moof)", "is a segment of a stream, without the stream's first file; join "
                                 "them: cat INIT SEGMENTS > FILE.mp4"),
    (rb"%PDF", "is a PDF"),
    (rb"[FCZ]WS[\x03-\x30]", "is a Flash program (.swf); there is no decoder"),
    (rb"\x89MCAP0|#ROSBAG", "is a recording of ROS; take the video out of it first"),
    (rb"....RED[12]", "is raw film of a RED camera; convert it by the maker's program"),
    (rb"\x89HDF\r\n\x1a\n", "is an HDF5 file"),
    (rb"\x93NUMPY", "is a NumPy array (.npy)"),
    (rb"PK\x03\x04.{26}[^/]*/?data\.pkl", "is a file of torch.save (.pt)"),
    (rb"PK\x03\x04.{26}[^/]*\.npy", "is a file of NumPy arrays (.npz)"),
    (rb"PK\x03\x04.{26}(?:word|ppt|xl|\[Content_Types\])|\xd0\xcf\x11\xe0\xa1\xb1",
     "is a document of Office; save it as text (CSV)"),
    (rb"PAR1", "is a table of Parquet; save it as CSV"),
    (rb"PK\x03\x04", "is a ZIP archive; unpack it"),
    (rb"\x1f\x8b", "is compressed by gzip; unpack it (gunzip)"),
    (rb"BZh[1-9]", "is compressed by bzip2; unpack it (bunzip2)"),
    (rb"\xfd7zXZ", "is compressed by xz; unpack it (unxz)"),
    (rb"\x28\xb5\x2f\xfd", "is compressed by Zstandard; unpack it (unzstd)"),
    (rb"7z\xbc\xaf\x27\x1c", "is a 7z archive; unpack it"),
    (rb"Rar!", "is a RAR archive; unpack it"),
    (rb".{257}ustar", "is a tar archive; unpack it"),
    (rb"GGUF", "is a GGUF file"),
    (rb".{7}\x00\{\s*\"", "is a .safetensors file"),
    (rb"\x80[\x02-\x05]", "is a Python pickle"),
    (rb"SQLite format 3", "is a database (SQLite)"),
    (rb"\x7fELF|MZ.{58}|\xcf\xfa\xed\xfe", "is a program"),
]]
# endings that browsers and other programs give to what is not yet complete
UNFINISHED = (".part", ".partial", ".crdownload", ".download", ".ytdl", ".aria2", ".opdownload",
              ".!ut", ".!qb", ".!bt", ".tmp", ".incomplete")


def what_is(path: str | Path, quotes: bool = True) -> str | None:
    """What a file is, as what follows its name in a message; None if its bytes do not tell.

    quotes      of a text of no special kind, name its beginning

    It is for files that were refused: of a good video it may say that it is one of another kind.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(HEAD)
    except OSError:
        return None
    beside = path.with_name(path.name + ".aria2")
    if path.suffix.lower() in UNFINISHED or beside.exists():
        return "is an unfinished download; let it come to its end"
    if not head:
        return "is empty; get the file again"
    if head[7:9] == b"\0{" and (whole := size_of_tensors(path)) > size:
        return f"is damaged: {size} of {whole} bytes are there; get the file again"
    for pattern, what in KINDS:
        if pattern.match(head):
            return what
    if not any(head):
        return "begins with zeros: its download or its copy did not come to an end; get it again"
    if head[4:8] in (b"ftyp", b"mdat", b"wide", b"free", b"skip"):
        boxes = dict(boxes_of(path))
        if boxes and max(boxes.values()) > size:
            return (f"is cut off: {size} of at least {max(boxes.values())} bytes are there; "
                    f"get the file again")
        if not boxes.keys() & {b"moov", b"moof"}:
            return ("has no index (moov): its recording or its download did not come to an end; "
                    "get it again, or repair it by untrunc")
    return what_says(head) if quotes else None


def what_says(head: bytes) -> str | None:
    """What a text is, with its beginning; None if it is no text."""
    try:
        text = head.decode("utf-8-sig", "ignore" if len(head) == HEAD else "strict")
    except UnicodeDecodeError:
        return None
    if re.search(r"[\x00-\x08\x0e-\x1f\x7f]", text) or not text.strip():
        return None
    kind = "XML" if text.lstrip().startswith("<") else "text"
    if re.match(r"""\s*(\{\s*["}]|\[\s*["{\[\]])""", text):
        kind = "JSON"
    return f"is {kind}, and begins with {' '.join(text.split())[:60]!r}"


def size_of_tensors(path: Path) -> int:
    """The bytes that a .safetensors file has, as its header says; 0 if that cannot be read."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            tensors = json.loads(file.read(length))
            return 8 + length + max(tensor["data_offsets"][1] for name, tensor in tensors.items()
                                    if name != "__metadata__")
        except (ValueError, LookupError, TypeError, AttributeError):
            return 0


def boxes_of(path: Path) -> Iterator[tuple[bytes, int]]:
    """(kind, end) of the boxes of an .mp4 file, as they say it; end may be beyond the file's."""
    size = path.stat().st_size
    with path.open("rb") as file:
        begin = 0
        while begin + 8 <= size:
            file.seek(begin)
            head = file.read(16)
            length = int.from_bytes(head[:4], "big")
            if length == 1:                    # the length follows
                length = int.from_bytes(head[8:], "big")
            if length == 0:                    # up to the end of the file
                length = size - begin
            if length < 8:
                return
            yield head[4:8], begin + length
            begin += length
