"""Texts that come from elsewhere, as they are shown: narrations in one line, clocks, addresses
without secrets."""
import re
from collections.abc import Iterable, Sequence
from urllib.parse import unquote

# line breaks of every kind, tabs and ordinary blanks
BLANKS = re.compile(r"[ \t\n\v\f\r\x1c-\x1f\x85\u2028\u2029]+")
# What terminals and pages obey instead of showing it: control characters, halves of characters,
# and what turns the direction of the text that follows.
OBEYED = re.compile(
    r"[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]"
)


def one_line(text: str) -> str:
    """A text for files and terminals, in one line.

    A text is its writer's: nothing but OBEYED is taken out, in no script, and BLANKS become one
    blank. Joiners, soft hyphens, marks, emoji and other blanks are parts of words.
    """
    if text.isprintable() and "  " not in text:          # nearly all: nothing to take out
        return text.strip(" ")
    return BLANKS.sub(" ", OBEYED.sub("", text)).strip(" ")


def seconds_of(clock: Iterable[str | None]) -> float:
    """Hours, minutes and seconds: ("01", "02", "03,500") -> 3723.5; None is 0."""
    hours, minutes, seconds = (float((part or "0").replace(",", ".")) for part in clock)
    return round(3600 * hours + 60 * minutes + seconds, 6)     # the float that the digits mean


def counted(number: int, word: str) -> str:
    """A number with its word, such as "1 frame" and "2 frames"."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def listed(words: Sequence[str], separator: str = ", ", most: int = 3) -> str:
    """At most `most` of some words, and how many more there are."""
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return separator.join(words[:most]) + more


def without_controls(text: str) -> str:
    """A name for terminals: without the characters that they obey instead of showing."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", "", text)


def without_secrets(source: str) -> str:
    """A source for messages and files: an address is shown as scheme://host/..., because a user, a
    password, a path and a query may all be secret. Everything else is shown as it is."""
    source = without_controls(source)
    scheme, separator, rest = source.partition("://")
    if not separator:
        return source
    place = unquote(rest).rpartition("@")[2]   # after the last @: a password may hold / ? # and @
    host = re.match(r"[^/?#]*", place)[0]
    return f"{scheme}://{host}/..."
