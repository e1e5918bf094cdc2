"""Texts that come from elsewhere, as they are shown: narrations in one line, addresses without
secrets."""
from __future__ import annotations

import re
import unicodedata
from urllib.parse import unquote


def one_line(text: str) -> str:
    """Generated text for files and terminals, in one line.

    White space is collapsed; control and format characters are removed.
    """
    characters = []
    for character in text:
        is_control = unicodedata.category(character).startswith("C")
        if character.isspace() or not is_control:
            characters.append(character)
    return " ".join("".join(characters).split())


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
