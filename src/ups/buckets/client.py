"""Addresses of buckets and opening one: `s3://`, `gs://` and `https://`, through obstore (extra `buckets`).

Credentials never stand in an address or a recipe: they come from the environment or the provider's own files
(AWS_ACCESS_KEY_ID ..., ~/.aws/credentials, GOOGLE_APPLICATION_CREDENTIALS, a role of the machine). AWS_ENDPOINT_URL
names another S3 server than Amazon's. Plain http is spoken to loopback only. Every request has a time limit and a
bounded number of retries; no torch, no numpy. What lies in a bucket is for the callers.
"""

from __future__ import annotations

import configparser
import ipaddress
import os
import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ups.errors import ConfigError, MissingExtraError, errors_as

if TYPE_CHECKING:
    from obstore.store import GCSStore, HTTPStore, S3Store

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


CONNECT_SECONDS = 5.0
REQUEST_SECONDS = 30.0
MAX_RETRIES = 3
RETRY_SECONDS = 60.0
# The order in which they count: the name that is about S3 alone first, as the tools of AWS have it.
ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")
_CREDENTIALS_HINT = (
    "keep secrets out of addresses: credentials are taken from the environment (AWS_ACCESS_KEY_ID, ...) or the "
    "provider's files (~/.aws/credentials, GOOGLE_APPLICATION_CREDENTIALS)"
)


@dataclass(frozen=True, slots=True)
class BucketUrl:
    """An address that was checked. host: the bucket, or host[:port] of a web server. prefix: of keys, without slashes
    at its ends ('' is the whole bucket)."""

    scheme: str
    host: str
    prefix: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}" + (f"/{self.prefix}" if self.prefix else "")


@dataclass(frozen=True, slots=True)
class Bucket:
    """store: of obstore, for keys from the root of the bucket (of the web server). prefix: where the caller's keys
    begin, without slashes at its ends."""

    url: BucketUrl
    store: S3Store | GCSStore | HTTPStore
    prefix: str

    def key(self, name: str) -> str:
        """The key of `name` below the prefix."""
        return f"{self.prefix}/{name}" if self.prefix else name


def parse_bucket_url(url: str) -> BucketUrl:
    """The parts of an address. Raises ConfigError for one that is not usable, and never repeats a secret."""
    scheme, host, loopback, port, path = _checked_parts(url, "an address of a bucket")
    prefix = path.strip("/")
    if scheme in ("s3", "gs"):
        usable = _BUCKET.fullmatch(host) is not None and port is None
    else:
        usable = scheme == "https" or (scheme == "http" and loopback)
    if not usable or not host or (prefix and not is_plain_key(prefix)):
        raise ConfigError(
            f"'{url}' is not an address of a bucket",
            hint="write s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or https://HOST/PATH, with plain names and single "
            "slashes; plain http is spoken to this machine only",
        )
    return BucketUrl(scheme, host, prefix)


def _checked_parts(url: str, what: str) -> tuple[str, str, bool, int | None, str]:
    """Scheme, host with port, whether it is this machine, port and path of an address that carries no secret."""
    if "@" in url or "?" in url or "#" in url or holds_secret(url):
        # Also where urlsplit sees no user: 'user:pass/word@host' has its secret in the path.
        raise ConfigError(f"{what} carries a user, a password, a query or a token", hint=_CREDENTIALS_HINT)
    with errors_as(ConfigError, f"{what} cannot be read", ValueError, hint="write SCHEME://HOST/PATH"):
        parts = urllib.parse.urlsplit(url)
        return parts.scheme, parts.netloc, is_loopback(parts.hostname or ""), parts.port, parts.path


def is_plain_key(key: str) -> bool:
    """Whether a key can be a relative path below a directory: no '..', no absolute path, no empty or odd parts."""
    parts = key.split("/")
    return key.isprintable() and "\\" not in key and all(part not in ("", ".", "..") for part in parts)


def open_bucket(url: str, *, request_seconds: float = REQUEST_SECONDS, max_retries: int = MAX_RETRIES) -> Bucket:
    """Open the bucket at `url`; nothing is sent yet. Raises ConfigError for a wrong address, MissingExtraError without
    obstore.

    request_seconds, max_retries: of one request, for callers that are patient by themselves.
    """
    address = parse_bucket_url(url)
    try:
        from obstore.store import GCSStore, HTTPStore, S3Store
    except ModuleNotFoundError as error:
        raise MissingExtraError.of("buckets", "obstore", f"reading or writing {address.scheme}:// addresses") from error
    retries: Any = {"max_retries": max_retries, "retry_timeout": timedelta(seconds=RETRY_SECONDS)}
    store: S3Store | GCSStore | HTTPStore
    if address.scheme == "s3":
        options = s3_options(os.environ)
        client = _client(request_seconds, plain=str(options.get("endpoint", "")).startswith("http:"))
        store = S3Store(address.host, client_options=client, retry_config=retries, **options)
    elif address.scheme == "gs":
        store = GCSStore(address.host, client_options=_client(request_seconds, plain=False), retry_config=retries)
    else:
        client = _client(request_seconds, plain=address.scheme == "http")
        root = f"{address.scheme}://{address.host}/"
        store = HTTPStore.from_url(root, client_options=client, retry_config=retries)
    return Bucket(address, store, address.prefix)


def s3_options(environment: Mapping[str, str]) -> dict[str, Any]:
    """Endpoint, region and credentials of S3 where obstore would not find them itself. Raises ConfigError for an
    endpoint that would send credentials in the clear."""
    profile = environment.get("AWS_PROFILE") or "default"
    home = Path(environment.get("HOME") or "/")
    shared = environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws" / "credentials"
    settings = environment.get("AWS_CONFIG_FILE") or home / ".aws" / "config"
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    region = region or _section(Path(settings), profile).get("region") or "us-east-1"
    options: dict[str, Any] = {"region": region}
    endpoint = next((environment[name] for name in ENDPOINT_VARIABLES if environment.get(name)), "")
    if endpoint:
        options["endpoint"] = _checked_endpoint(endpoint)
    if not environment.get("AWS_ACCESS_KEY_ID"):
        keys = _section(Path(shared), profile)
        if keys.get("aws_access_key_id") and keys.get("aws_secret_access_key"):
            options["access_key_id"] = keys["aws_access_key_id"]
            options["secret_access_key"] = keys["aws_secret_access_key"]
            if keys.get("aws_session_token"):
                options["session_token"] = keys["aws_session_token"]
    return options


def is_loopback(host: str) -> bool:
    """Whether a host name is this machine, without asking a name server."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _checked_endpoint(endpoint: str) -> str:
    scheme, host, loopback, _, _ = _checked_parts(endpoint, "AWS_ENDPOINT_URL")
    if not host or not (scheme == "https" or (scheme == "http" and loopback)):
        raise ConfigError(
            f"AWS_ENDPOINT_URL ({endpoint}) is not usable",
            hint="write https://HOST[:PORT]; plain http is spoken to this machine only",
        )
    return endpoint.rstrip("/")


def _client(request_seconds: float, *, plain: bool) -> Any:
    """allow_http is always said: a variable of the environment must not turn it on for a distant host."""
    return {
        "allow_http": plain,
        "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
        "timeout": timedelta(seconds=request_seconds),
    }


def _section(path: Path, profile: str) -> Mapping[str, str]:
    """One profile of a file of the tools of AWS; empty if there is none."""
    parser = configparser.RawConfigParser()
    try:
        parser.read(path, encoding="utf-8")
    except (OSError, configparser.Error, UnicodeDecodeError):
        return {}
    for name in (profile, f"profile {profile}"):
        if parser.has_section(name):
            return dict(parser.items(name))
    return {}
