"""Texts that may be addresses of objects: which are one, and what of one may be shown. Standard library only.

What an address consists of, and which are refused, is for `client`.
"""

from __future__ import annotations

import re

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_USER = re.compile(r"(?<=://)[^/@\s]+@")
_QUERY = re.compile(r"(?<=[^\s?])\?[^\s\"'<>)]*")


def is_address(text: object) -> bool:
    """Whether a text is an address and not the path of a file, of whatever scheme."""
    return _ADDRESS.match(str(text)) is not None


def bare_addresses(text: str) -> str:
    """A text with users, passwords and query strings cut out of the addresses in it."""
    return _QUERY.sub("", _USER.sub("", text)) if "://" in text else text
