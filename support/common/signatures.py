"""What a file is that often stands in place of another one: by its first bytes."""
from pathlib import Path

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# the first bytes, in small letters, and what such a file is
KINDS = {
    b"version https://git-lfs": "is a Git LFS pointer, not the file that it stands for; get that "
                                "by `git lfs pull`",
    b"<!doctype html": "is a web page (HTML), not what it links to; download the file itself",
    b"<html": "is a web page (HTML), not what it links to; download the file itself",
}


def what_is(path: str | Path) -> str | None:
    """What a file is that was refused, as what follows its name in a message; None if its first
    bytes are no pointer's and no web page's.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(256)
    except OSError:
        return None
    if not head:
        return "is empty; get the file again"
    head = head.removeprefix(BYTE_ORDER_MARK).lstrip().lower()
    for beginning, what in KINDS.items():
        if head.startswith(beginning):
            return what
    return None
