"""Bundles on the Hugging Face Hub: push, pull, sign, and the address `hf://OWNER/NAME[@REVISION][#sha256=HASH]`.

A repository holds the files of a bundle, README.md (its card), and model.sig if it was signed. The hub is not trusted:
the list of files is checked before the first download, only files with the names of a bundle are taken, and our
manifest decides whether they are whole. A signature (OpenSSF Model Signing, an elliptic key pair) shows who made the
bundle; a hash in the address shows that it is the one that was meant. No torch here, but for `push`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ups.errors import (
    BundleError,
    ConfigError,
    FetchRefusedError,
    FetchUnavailableError,
    IntegrityError,
    MissingExtraError,
    errors_as,
)
from ups.record import manifest
from ups.record.files import machine_error, safe_read
from ups.record.run_dir import BUNDLE_FILES, CARD_NAME, cache_directory, find_bundle, is_shipped
from ups.record.text import path_text, printable

logger = logging.getLogger(__name__)

PREFIX = "hf://"
README_NAME = "README.md"
SIGNATURE_NAME = "model.sig"
_MARKS = frozenset({manifest.MANIFEST_NAME, manifest.COMMITTED_NAME})
# Files of a repository that are no part of the bundle. The hub itself writes .gitattributes.
_BESIDE = frozenset({README_NAME, SIGNATURE_NAME, ".gitattributes"})
# Of what no manifest says how long it is.
_MAX_SMALL_BYTES = 2**22
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_ADDRESS = re.compile(
    rf"(?:{PREFIX})?(?P<repo>{_NAME}/{_NAME})(@(?P<revision>{_NAME}(/{_NAME})*))?(#sha256=(?P<sha256>[0-9a-f]{{64}}))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DO_NOT_USE = "do not use this copy; ask who made the bundle"
# What readers of keys raise for other kinds, encrypted ones, and files that are none.
_KEY_ERRORS = (OSError, ValueError, TypeError, AttributeError)


@dataclass(frozen=True)
class Address:
    """A bundle on the hub. revision: a commit, tag or branch; sha256: of the manifest of the bundle that is meant."""

    repo: str
    revision: str | None = None
    sha256: str | None = None

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises ConfigError for anything else than an address, with or without its prefix."""
        parsed = _ADDRESS.fullmatch(text)
        if parsed is None or ".." in text:
            raise ConfigError(
                f"'{printable(text[:200])}' is not the address of a bundle on the hub",
                hint=f"write {PREFIX}OWNER/NAME, with @REVISION and then #sha256=HASH behind it to pin it",
            )
        return cls(**parsed.groupdict())

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{PREFIX}{self.repo}{revision}" + (f"#sha256={self.sha256}" if self.sha256 else "")


def local_bundle(name: str | os.PathLike[str]) -> Path:
    """The bundle that a name means (`find_bundle`); of an address on the hub it is in the cache of this user."""
    text = os.fspath(name)
    return pull(text)[0] if text.startswith(PREFIX) else find_bundle(text)


def signature_of(bundle: Path) -> Path:
    """Where the signature of a bundle lies: next to it, because any new file in it is damage; of a shipped one here."""
    if is_shipped(bundle):
        return Path(f"{bundle.resolve().parent.name}.sig")
    return bundle.with_name(f"{bundle.name}.sig")


def pull(address: str, out: Path | None = None, public_key: Path | None = None) -> tuple[Path, Address]:
    """Download a bundle into a clean directory and verify it there; returns it, and its address with commit and hash.

    out: appears whole or not at all; default a directory of the commit in the cache of this user, where a bundle that
    is there is verified and not fetched. public_key: refuse a bundle that was not signed with its private key. Raises
    BundleError for anything but the bundle that was asked for, FetchRefusedError or FetchUnavailableError of the hub.
    """
    wanted, files = Address.parse(address), None
    if out is not None or not (_COMMIT.fullmatch(wanted.revision or "") and manifest.is_committed(_cached(wanted))):
        files, commit = _listing(wanted)
        if wanted.revision != commit:
            logger.warning("%s is commit %s now; pin it: %s", wanted, commit, replace(wanted, revision=commit))
            wanted = replace(wanted, revision=commit)
    place = out or _cached(wanted)
    if files is None or (out is None and manifest.is_committed(place)):
        return place, _check(place, signature_of(place), wanted, public_key)
    manifest.check_replaceable(place)
    temporary, beside = manifest.make_temporary(place), manifest.make_temporary(place)
    try:
        with _hub_errors(wanted):
            from huggingface_hub import hf_hub_download

            for name in sorted(files.keys() - {".gitattributes"}):
                hf_hub_download(wanted.repo, name, revision=wanted.revision, local_dir=temporary)
        shutil.rmtree(temporary / ".cache", ignore_errors=True)  # notes of the client
        for name in {README_NAME, SIGNATURE_NAME} & files.keys():
            os.replace(temporary / name, beside / name)
        wanted = _check(temporary, beside / SIGNATURE_NAME, wanted, public_key)
        with errors_as(BundleError, f"the card of {wanted} cannot be used", OSError, ValueError):
            shown, card = beside / README_NAME, _readme(temporary, wanted)
            if shown.exists() and _body(safe_read(shown, _MAX_SMALL_BYTES)) != _body(card):
                raise BundleError(f"{README_NAME} of {wanted} is not the card of the bundle", hint=_DO_NOT_USE)
        manifest.commit_directory(temporary, place)
        signature_of(place).unlink(missing_ok=True)
        if (beside / SIGNATURE_NAME).exists():
            os.replace(beside / SIGNATURE_NAME, signature_of(place))
    finally:
        manifest.remove_path(temporary)
        manifest.remove_path(beside)
    return place, wanted


def push(bundle: str, address: str, *, key: Path | None = None, private: bool = False) -> Address:
    """Publish a bundle in one commit, in a new public repository if there is none; returns its exact address.

    key: sign it first. A bundle that was signed before is pushed with its signature. Files of an earlier bundle go.
    """
    from ups.inference.bundle import load_bundle

    wanted = Address.parse(address)
    if wanted.revision or wanted.sha256:
        raise ConfigError(f"'{address}' names a revision, and a push makes a new one", hint="give OWNER/NAME")
    directory = Path(find_bundle(bundle))
    sha256, names = load_bundle(directory).hash, manifest.read_manifest(directory).files.keys()
    _check_names(str(directory), names)
    signature = sign(directory, key) if key is not None else signature_of(directory)
    contents: dict[str, str | bytes] = {name: str(directory / name) for name in sorted(names | _MARKS)}
    contents[README_NAME] = _readme(directory, wanted)
    if signature.is_file():
        contents[SIGNATURE_NAME] = str(signature)
    with _hub_errors(wanted):
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        api = HfApi()
        api.create_repo(wanted.repo, private=private or None, exist_ok=True)
        there = api.model_info(wanted.repo)
        old = {file.rfilename for file in there.siblings or []} - {README_NAME, ".gitattributes"}
        if old and manifest.MANIFEST_NAME not in old:
            raise ConfigError(f"{wanted} holds files that are no bundle: {printable(str(sorted(old))[:200])}")
        changes = [CommitOperationAdd(name, content) for name, content in contents.items()]
        commit = api.create_commit(
            wanted.repo,
            [*changes, *map(CommitOperationDelete, sorted(old - contents.keys()))],
            commit_message=f"Bundle {sha256[:12]}",
            parent_commit=there.sha,
        )
    return Address(wanted.repo, commit.oid, sha256)


def sign(bundle: Path, key: Path) -> Path:
    """Sign all files of a bundle with a private key (PEM, an elliptic curve); returns the signature next to it."""
    manifest.verify(bundle)
    with _key_errors(key):
        from model_signing.signing import Config

        signer = Config().use_elliptic_key_signer(private_key=key)
    signer.sign(bundle, signature_of(bundle))
    return signature_of(bundle)


@contextlib.contextmanager
def _key_errors(key: Path) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise MissingExtraError.of("sign", "model-signing", "a signature") from error
    except _KEY_ERRORS as error:
        hint = "docs/hub.md shows how to make a key pair; the private key must not have a password"
        raise ConfigError(f"{key} is not such a key of an elliptic curve: {error}", hint=hint) from error


def _check(directory: Path, signature: Path, wanted: Address, public_key: Path | None) -> Address:
    """Verify what was pulled, and its signature; returns the address with its hash."""
    try:
        sha256 = manifest.verify(directory).sha256
    except IntegrityError as error:
        raise BundleError(error.message.replace(str(directory), str(wanted)), hint=_DO_NOT_USE) from error
    if wanted.sha256 not in (None, sha256):
        raise BundleError(f"{wanted} holds another bundle, perhaps an older one: {sha256}", hint=_DO_NOT_USE)
    if public_key is None:
        return replace(wanted, sha256=sha256)
    if not signature.is_file():
        raise BundleError(f"{wanted} is not signed, and a signature is required", hint=_DO_NOT_USE)
    with _key_errors(public_key):
        from cryptography.exceptions import InvalidSignature
        from model_signing.verifying import Config

        verifier = Config().use_elliptic_key_verifier(public_key=public_key)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # it prints warnings
            verifier.verify(directory, signature)
    except (InvalidSignature, LookupError, *_KEY_ERRORS) as error:
        reason = printable(" ".join(str(error).split())[:300]) or "made with another key"
        words = f"{wanted} is not signed by the owner of {path_text(public_key)}: {reason}"
        raise BundleError(words, hint=_DO_NOT_USE) from error
    return replace(wanted, sha256=sha256)


def _listing(wanted: Address) -> tuple[dict[str, int], str]:
    """Name -> size of every file of a revision, with names that a bundle has, and the commit that the revision is."""
    with _hub_errors(wanted):
        from huggingface_hub import HfApi

        info = HfApi().model_info(wanted.repo, revision=wanted.revision, files_metadata=True)
    commit, asked = info.sha or "", wanted.revision or ""
    if not _COMMIT.fullmatch(commit) or (_COMMIT.fullmatch(asked) and asked != commit):
        raise BundleError(f"the hub answers for {wanted} with commit {printable(commit[:60])!r}", hint=_DO_NOT_USE)
    files = {file.rfilename: int(file.size or 0) for file in info.siblings or []}
    _check_names(str(wanted), files.keys() - _MARKS - _BESIDE)
    if missing := sorted(_MARKS - files.keys()):
        raise BundleError(f"{wanted} is not a bundle: it has no {' and no '.join(missing)}")
    if long := [name for name in files.keys() & (_MARKS | _BESIDE) if files[name] > _MAX_SMALL_BYTES]:
        raise BundleError(f"{wanted}: {long[0]} has {files[long[0]]} bytes, more than {_MAX_SMALL_BYTES}")
    return files, commit


def _check_names(where: str, names: Iterable[str]) -> None:
    """Raises BundleError for a file that no bundle has: nothing else is ever downloaded or published."""
    if strange := sorted(set(names) - BUNDLE_FILES):
        hint = "a bundle is plain data, and this may be code or a pickle: do not use it"
        raise BundleError(f"{where} has a file that no bundle has: {printable(strange[0][:200])}", hint=hint)


def _readme(directory: Path, address: Address) -> bytes:
    """The card, with the address in the line that loads it. Its YAML header is what the hub lists it by."""
    card = safe_read(directory / CARD_NAME, _MAX_SMALL_BYTES)
    return card.replace(b'load("PATH")', f'load("{PREFIX}{address.repo}")'.encode(), 1)


def _body(readme: bytes) -> bytes:
    """A README without its YAML header, which owners of a repository edit on the hub: a license, tags."""
    return re.sub(rb"\A---\r?\n.*?\n---\r?\n", b"", readme, flags=re.DOTALL).strip()


def _cached(address: Address) -> Path:
    return (cache_directory() or Path("/nonexistent")) / "hub" / address.repo.replace("/", "--") / str(address.revision)


@contextlib.contextmanager
def _hub_errors(wanted: Address) -> Iterator[None]:
    """What the client raises, of both of its major versions, as errors of this package."""
    try:
        from huggingface_hub import errors
    except ImportError as error:
        raise MissingExtraError.of("hub", "huggingface_hub", "a bundle on the hub") from error
    http_error: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]  # of httpx or of httpx2
    try:
        yield
    except (http_error, OSError, ValueError) as error:
        words = printable(" ".join(str(error).split())[:300])
        if isinstance(error, ValueError):
            raise ConfigError(f"the hub does not take {wanted}: {words}") from error
        if isinstance(error, OSError) and error.filename:
            raise machine_error(f"cannot write {wanted}", error) from error
        if isinstance(error, errors.HfHubHTTPError) and 400 <= error.response.status_code < 500:
            hint = "look at its name and revision; a private one, and a push, need `hf auth login`"
            raise FetchRefusedError(f"the hub refuses {wanted}: {words}", hint=hint) from error
        hint = "try again; look at the network, and at HF_ENDPOINT and HF_HUB_OFFLINE if they are set"
        raise FetchUnavailableError(f"the hub does not give {wanted}: {words}", hint=hint) from error
