"""What an input of a command line is: asked once, when the line is read."""
import re
from dataclasses import dataclass
from pathlib import Path

from support.common.errors import BadData
from support.common.text import without_secrets

PIPE = re.compile(r"(?is)-|(https?|ftp)://.*")
# A camera of this machine, FFmpeg's test pictures, and every other address
LIVE = re.compile(
    r"(?s)camera(:.+)?|/dev/video.*|lavfi:.+|(?i:(?!(https?|ftp|file):)[a-z][a-z0-9+.-]+://.*)"
)
TENSOR = re.compile(r"(?is)(.+?\.safetensors):(.*)")


@dataclass(frozen=True)
class Source:
    """An input. As a str, it is shown without what may be secret.

    given       as it was given; an address may hold a password
    kind        "video"     a file
                "features"  a file of frame features: FILE.safetensors, FILE.safetensors:NAME, FILE.pt
                "live"      a camera or an address; its newest pictures count (beyond/streams/live.py)
                "pipe"      a recording from standard input or the network
    path        of the file
    tensor      NAME, of features; or None
    """
    given: str
    kind: str
    path: Path
    tensor: str | None = None

    @property
    def is_live(self) -> bool:
        return self.kind == "live"

    def __str__(self) -> str:
        return without_secrets(self.given)


def source_of(given: str, live: bool = False) -> Source:
    """What an input is, by its name and by --live (`live`). BadData if --live is given for a file."""
    path, tensor = Path(given), None
    if LIVE.fullmatch(given):
        kind = "live"
    elif PIPE.fullmatch(given):
        kind = "live" if live else "pipe"
    elif live:
        raise BadData(f"{without_secrets(given)}: --live is for what comes as it happens; "
                      f"a file is narrated in full without it")
    else:
        kind = "video"
        if match := TENSOR.fullmatch(given):
            path, tensor = Path(match[1]), match[2]
        if path.suffix.lower() in (".safetensors", ".pt"):
            kind = "features"
    return Source(given, kind, path, tensor)
