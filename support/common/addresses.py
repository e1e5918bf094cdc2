"""Addresses in messages and files, without the secrets in them."""
from __future__ import annotations

import re
from urllib.parse import unquote


# where the part of a path that may be secret begins: a value, an object, or a password with a colon
SECRET = re.compile(r"(?i)=|\{|(?:pass|pwd|secret|token|key|auth|sig)[^/]*?:")


def without_secrets(source: str) -> str:
    """A source for messages and files: of an address, all that can be a secret becomes ***.

    That is what stands before the last @ (user and password), the value of every query parameter, and the rest of a
    path from a value in it on (user=admin_password=...). An address in which such parts are encoded is decoded.
    """
    plain = unquote(source)
    hidden = hide_secrets(plain)
    return hide_secrets(source) if hidden == plain else hidden


def hide_secrets(source: str) -> str:
    """See `without_secrets`; `source` is taken as it is, not decoded."""
    before, separator, rest = source.partition("://")
    if not separator:
        return source
    user, at, rest = rest.rpartition("@")        # the last one: a password may hold / ? # and @
    host, path, query = re.fullmatch(r"([^/?#]*)([^?#]*)(.*)", rest, re.DOTALL).groups()
    if secret := SECRET.search(path):
        path = path[:secret.end()] + "***"
    query = re.sub(r"[^?&;#]+", hide_value, query)
    return before + separator + ("***@" if at else "") + host + path + query


def hide_value(parameter: re.Match) -> str:
    """One parameter of a query: NAME=VALUE -> NAME=***. Without a name, all of it is taken for a value."""
    name, equals, value = parameter[0].partition("=")
    named = equals and value.strip("='")         # = at the end fills up a word in base64; ' is a message's
    return f"{name}=***" if named else "***"
