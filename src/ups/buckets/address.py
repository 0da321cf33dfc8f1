"""Texts that may be addresses of objects: which are one, and what of one may be shown. Standard library only.

What an address consists of, and which are refused, is for `client`.
"""

from __future__ import annotations

import re

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_USER = re.compile(r"(?<=://)[^/@\s]+@")
_HOST = re.compile(r"([A-Za-z0-9+.-]+)://([^/?#\s]*)")
# Up to the first slash. What follows a colon and is no port is a password with a slash in it.
_PASSWORD = re.compile(r"[^:\[\]]+:.*\D.*")
# Tokens of well-known services, wherever they stand.
_TOKEN = re.compile(r"(?<![A-Za-z0-9])(gh[opsu]_|github_pat_|glpat-|hf_|pypi-|xox[abp]-|AKIA)[A-Za-z0-9_-]{12,}")
_QUERY = re.compile(r"(?<=[^\s?])\?[^\s\"'<>)]*")
# NAME=VALUE after '#' or ';', except for what pip writes there.
_ASSIGNED = re.compile(r"[#;](?!egg=|subdirectory=|sha256=)[^\s/#;]*=")


def is_address(text: object) -> bool:
    """Whether a text is an address and not the path of a file, of whatever scheme."""
    return _ADDRESS.match(str(text)) is not None


def holds_secret(text: str) -> bool:
    """Whether an address in a text carries a user, a password, a query or a token; for what is written down."""
    hosts = [(scheme, host) for scheme, host in _HOST.findall(text) if scheme != "databricks"]
    wrong = any("@" in host or _PASSWORD.fullmatch(host) for _, host in hosts)
    assigned = hosts and (_QUERY.search(text) or _ASSIGNED.search(text))
    return wrong or bool(assigned) or _TOKEN.search(text) is not None


def bare_addresses(text: str) -> str:
    """A text with users, passwords and query strings cut out of the addresses in it."""
    return _QUERY.sub("", _USER.sub("", text)) if "://" in text else text
