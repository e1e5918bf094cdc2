"""Addresses in messages and files, without the secrets in them."""
from __future__ import annotations

import re
from urllib.parse import unquote


# where a secret in a path may begin: at a value, an object, or a password with a colon
SECRET = re.compile(r"(?i)=|\{|(?:pass|pwd|secret|token|key|auth|sig)[^/]*?:")


def without_secrets(source: str) -> str:
    """A source for messages and files: in an address, everything that can be a secret becomes ***.

    Secrets are: user and password (everything before the last @), the value of every query
    parameter, and the rest of a path from its first value on (user=admin_password=...). An address
    with encoded secrets is decoded.
    """
    decoded = unquote(source)
    hidden = hide_secrets(decoded)
    if hidden == decoded:
        return hide_secrets(source)
    return hidden


def hide_secrets(source: str) -> str:
    """As `without_secrets`, but nothing is decoded."""
    before, separator, rest = source.partition("://")
    if not separator:
        return source
    _, at, rest = rest.rpartition("@")           # the last one: a password may hold / ? # and @
    user = "***@" if at else ""
    host, path, query = re.fullmatch(r"([^/?#]*)([^?#]*)(.*)", rest, re.DOTALL).groups()
    secret = SECRET.search(path)
    if secret:
        path = path[:secret.end()] + "***"
    query = re.sub(r"[^?&;#]+", hide_value, query)
    return before + separator + user + host + path + query


def hide_value(parameter: re.Match) -> str:
    """One parameter of a query: NAME=VALUE -> NAME=***. A parameter without a name is a value."""
    name, equals, value = parameter[0].partition("=")
    # `=` at the end is base64's padding, not an empty value; a quote there belongs to a message
    if equals and value.strip("='"):
        return f"{name}=***"
    return "***"
