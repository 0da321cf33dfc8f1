"""Bundles on a hub: the real client against a server on loopback that cheats; changed copies are refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.support.checkout import ROOT
from tests.support.hub_server import Hub, serve
from tests.support.small_bundle import ADVECTION, make_bundle
from ups.config.model import LatentOperatorConfig
from ups.errors import IntegrityError
from ups.inference.bundle import load_bundle, write_bundle, write_card
from ups.inference.hub import Address, sign
from ups.record.manifest import commit_directory
from ups.record.run_dir import shipped_models

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
# A Python with the former major version of the client; its packages are put in front of ours.
FORMER = os.environ.get("UPS_HUB_1_PYTHON", "")


@dataclass
class Desk:
    """A user's program, the hub that it talks to, and where its files are."""

    folder: Path
    hub: Hub
    program: subprocess.Popen[str]

    def call(self, *words: Any) -> Any:
        assert self.program.stdin is not None
        assert self.program.stdout is not None
        self.program.stdin.write(json.dumps([str(w) if isinstance(w, Path) else w for w in words]) + "\n")
        self.program.stdin.flush()
        return json.loads(self.program.stdout.readline())


def started(folder: Path, hub: Hub, *paths: str) -> subprocess.Popen[str]:
    own = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_planted", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(folder / "hf")}
    path = os.pathsep.join([*paths, str(ROOT / "src"), str(ROOT)])
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.hub_program"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(folder / "stderr").open("w"),
        text=True,
        cwd=folder,
        env={**os.environ, **own, "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": path},
    )


def desk_of(folder: Path, *paths: str) -> Iterator[Desk]:
    with serve() as hub:
        program = started(folder, hub, *paths)
        try:
            yield Desk(folder, hub, program)
        finally:
            program.kill()
            program.communicate()


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    folder = tmp_path_factory.mktemp("desk")
    make_bundle(folder / "bundle")
    bundle = load_bundle(folder / "bundle")
    card = write_card("small", bundle.info)
    write_bundle(folder / "bundle", bundle.stepper, bundle.info, config_text="run:\n  name: small\n", card=card)
    make_bundle(folder / "other", config=LatentOperatorConfig(width=16, depth=1, num_heads=2))
    weights = folder / "other" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    commit_directory(folder / "other", folder / "changed")
    for name in ("mine", "theirs"):
        key = ec.generate_private_key(ec.SECP256R1())
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        (folder / f"{name}.pem").write_bytes(private)
        (folder / f"{name}.pub").write_bytes(
            key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        )
    yield from desk_of(folder)


def round_trip(desk: Desk, bundle: Path, repo: str) -> None:
    here = desk.call("rollout", bundle)
    address = desk.call("push", bundle, repo)
    assert address.startswith(f"hf://{repo}@"), address
    path, exact = desk.call("pull", address, desk.folder / f"pulled-{repo.replace('/', '-')}")
    assert exact == address
    assert {one.name: one.read_bytes() for one in Path(path).iterdir()} == {
        one.name: one.read_bytes() for one in bundle.iterdir()
    }
    commit = address.partition("#")[0]
    assert desk.call("rollout", path) == desk.call("rollout", commit) == desk.call("rollout", f"hf://{repo}") == here
    before = len(desk.hub.requests)
    assert desk.call("rollout", commit) == here
    assert len(desk.hub.requests) == before, "a pinned commit that is in the cache needs no network"


def test_a_bundle_comes_back_bitwise_with_its_card_and_signature(desk: Desk) -> None:
    round_trip(desk, desk.folder / "bundle", "me/small")
    files = desk.hub.commits["me/small"][-1][1]
    header, _, card = files["README.md"].decode().removeprefix("---\n").partition("---\n")
    assert "library_name: universal-simulator" in header
    assert 'ups.Simulator.load("hf://me/small")' in card
    # The owner of a repository may edit the YAML header of its README on the hub.
    edited = files | {"README.md": files["README.md"].replace(b"license: other", b"license: apache-2.0")}
    assert desk.call("pull", f"hf://me/small@{desk.hub.commit('me/small', edited)}")[0]


def test_a_signature_is_pushed_and_verified(desk: Desk) -> None:
    bundle = shutil.copytree(desk.folder / "bundle", desk.folder / "signed")
    address = desk.call("push", bundle, "me/signed", desk.folder / "mine.pem")
    assert "model.sig" in desk.hub.commits["me/signed"][-1][1]
    path, exact = desk.call("pull", address, desk.folder / "verified", desk.folder / "mine.pub")
    assert exact == address
    assert Path(f"{path}.sig").read_bytes() == Path(f"{bundle}.sig").read_bytes()
    assert desk.call("pull", address, None, desk.folder / "mine.pub")[1] == address
    assert desk.call("pull", address, None, desk.folder / "mine.pub")[1] == address  # from the cache
    assert "Key mismatch" in desk.call("pull", address, None, desk.folder / "theirs.pub")["line"]


@pytest.mark.long
@pytest.mark.skipif(not FORMER, reason="UPS_HUB_1_PYTHON names no Python with huggingface_hub 1.x")
def test_the_former_client_does_the_same(tmp_path: Path) -> None:
    words = [
        FORMER,
        "-c",
        "import huggingface_hub, os; print(os.path.dirname(os.path.dirname(huggingface_hub.__file__)))",
    ]
    packages = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    for desk in desk_of(tmp_path, packages):
        assert desk.call("client").startswith("1.")
        round_trip(desk, make_bundle(tmp_path / "bundle"), "me/small")
        assert desk.call("pull", "hf://me/nothing")["cause"] == "fetch_refused"


Files = dict[str, bytes]


def recommitted(desk: Desk, files: Files) -> Files:
    """The same files with a manifest that fits them: what somebody makes who knows our format."""
    folder = desk.folder / "forging"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in files.keys() - {"MANIFEST", "COMMITTED", "README.md", "model.sig", ".gitattributes"}:
        (folder / name).write_bytes(files[name])
    commit_directory(folder, desk.folder / "forged")
    return files | {one.name: one.read_bytes() for one in (desk.folder / "forged").iterdir()}


def renamed(files: Files) -> Files:
    return files | {"bundle.json": files["bundle.json"].replace(b'"advection"', b'"burgersxx"')}


def other_weights(desk: Desk, files: Files) -> Files:
    return files | {"model.safetensors": (desk.folder / "changed" / "model.safetensors").read_bytes()}


def with_manifest(files: Files, name: str, content: bytes) -> Files:
    """A file that the manifest names, too, under a path that our own writer would never give."""
    import hashlib

    manifest = json.loads(files["MANIFEST"])
    manifest["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    text = (json.dumps(manifest, indent=0, sort_keys=True) + "\n").encode()
    marker = json.loads(files["COMMITTED"]) | {"manifest_sha256": hashlib.sha256(text).hexdigest()}
    return files | {name: content, "MANIFEST": text, "COMMITTED": json.dumps(marker).encode()}


PICKLE = b"\x80\x04cos\nsystem\n."
# name -> (what was done to the files of a signed bundle, what is pinned besides the commit, words of the refusal)
TAMPERED: dict[str, tuple[Callable[[Desk, Files], Files], str, str]] = {
    "extra file": (lambda d, f: f | {"notes.txt": b"hello"}, "", "has a file that no bundle has: notes.txt"),
    "code": (lambda d, f: f | {"modeling.py": b"print(1)"}, "", "modeling.py"),
    "pickle added": (lambda d, f: f | {"model.pkl": PICKLE}, "", "has a file that no bundle has: model.pkl"),
    "pickle with a manifest": (lambda d, f: recommitted(d, f | {"model.pt": PICKLE}), "", "model.pt"),
    "pickle in the manifest only": (
        lambda d, f: {k: v for k, v in with_manifest(f, "a.pkl", PICKLE).items() if k != "a.pkl"}, "", "a.pkl: missing",
    ),
    "path traversal": (lambda d, f: f | {"../evil.json": b"{}"}, "", "../evil.json"),
    "traversal in the manifest": (lambda d, f: with_manifest(f, "../../evil.json", b"{}"), "", "evil.json"),
    "absolute path": (lambda d, f: f | {"/etc/cron.d/evil": b"x"}, "", "/etc/cron.d/evil"),
    "changed card": (lambda d, f: f | {"card.md": f["card.md"].replace(b"1", b"9", 1)}, "", "card.md: hash is"),
    "changed README": (lambda d, f: f | {"README.md": f["README.md"] + b"\nSafe for flight."}, "", "is not the card"),
    "swapped weights": (other_weights, "", "model.safetensors: hash is"),
    "swapped weights with a manifest": (lambda d, f: recommitted(d, other_weights(d, f)), "hash", "another bundle"),
    "signed, then swapped": (lambda d, f: recommitted(d, other_weights(d, f)), "key", "Hash mismatch for"),
    "renamed task": (lambda d, f: renamed(f), "", "bundle.json: hash is"),
    "renamed task with a manifest": (lambda d, f: recommitted(d, renamed(f)), "key", "Hash mismatch for"),
    "symbolic link": (lambda d, f: f | {"model.safetensors": b"/etc/passwd"}, "", "safetensors: size is 11 bytes"),
    "shorter weights": (
        lambda d, f: f | {"model.safetensors": f["model.safetensors"][:-8]}, "", "model.safetensors: size is",
    ),
    "file missing": (lambda d, f: {k: v for k, v in f.items() if k != "config.yaml"}, "", "config.yaml: missing"),
    "no manifest": (lambda d, f: {k: v for k, v in f.items() if k != "MANIFEST"}, "", "it has no MANIFEST"),
    "no bundle at all": (lambda d, f: {"README.md": b"hi", "pytorch_model.bin": PICKLE}, "", "pytorch_model.bin"),
    "unsigned": (lambda d, f: {k: v for k, v in f.items() if k != "model.sig"}, "key", "is not signed"),
    "signature of another": (
        lambda d, f: f | {"model.sig": sign(d.folder / "changed", d.folder / "mine.pem").read_bytes()},
        "key", "Hash mismatch for",
    ),
    "signed by another": (
        lambda d, f: f | {"model.sig": sign(d.folder / "bundle", d.folder / "theirs.pem").read_bytes()},
        "key", "Key mismatch",
    ),
    "signature cut short": (lambda d, f: f | {"model.sig": f["model.sig"][:200]}, "key", "is not signed by the owner"),
    "signature edited": (
        lambda d, f: f | {"model.sig": f["model.sig"].replace(b'"sig":"ME', b'"sig":"MF')},
        "key", "is not signed by the owner",
    ),
    "manifest that is a bomb": (lambda d, f: f | {"MANIFEST": b" " * (2**22 + 1)}, "", "bytes, more than"),
}  # fmt: skip


@pytest.mark.parametrize("name", TAMPERED)
def test_a_copy_that_was_tampered_with_is_refused(desk: Desk, name: str) -> None:
    change, pin, words = TAMPERED[name]
    if "me/tampered" not in desk.hub.commits:
        bundle = shutil.copytree(desk.folder / "bundle", desk.folder / "tampered")
        assert desk.call("push", bundle, "me/tampered", desk.folder / "mine.pem").startswith("hf://")
        desk.hub.commits["me/tampered"] = desk.hub.commits["me/tampered"][-1:]
    original = desk.hub.commits["me/tampered"][0][1]
    sha256 = load_bundle(desk.folder / "bundle").hash
    changed = change(desk, dict(original))
    assert changed != original
    commit = desk.hub.commit("me/tampered", changed)
    address = f"hf://me/tampered@{commit}" + (f"#sha256={sha256}" if pin == "hash" else "")
    before = sorted(desk.folder.iterdir())
    for out in (desk.folder / "refused", None):
        refused = desk.call("pull", address, out, desk.folder / "mine.pub" if pin == "key" else None)
        assert isinstance(refused, dict), f"{name} was taken: {refused}"
        assert refused["cause"] == "bundle", refused
        assert words in refused["line"], refused
    assert sorted(desk.folder.iterdir()) == before, "a refused bundle leaves nothing behind"
    assert not list((desk.folder / "cache").rglob(f"*{commit}*"))


def test_an_older_commit_is_not_taken_for_the_one_that_is_pinned(desk: Desk) -> None:
    old = desk.call("push", desk.folder / "bundle", "me/aged")
    new = desk.call("push", desk.folder / "changed", "me/aged")
    commits = [Address.parse(one).revision or "" for one in (old, new)]
    desk.hub.answers_with[commits[1]] = commits[0]
    assert "answers for" in desk.call("pull", new)["line"]
    desk.hub.answers_with.clear()
    # A hub that also lies about the hash of the commit: the hash of the bundle in the address shows it.
    newest = desk.hub.commits["me/aged"]
    newest[-1] = (commits[1], newest[-2][1])
    assert "holds another bundle, perhaps an older one" in desk.call("pull", new)["line"]
    assert desk.call("pull", f"hf://me/aged@{commits[1]}", desk.folder / "aged")[1].endswith(old.partition("#")[2])


def test_a_link_in_a_pulled_bundle_is_not_followed(desk: Desk) -> None:
    address = desk.call("push", desk.folder / "bundle", "me/linked")
    path = Path(desk.call("pull", address)[0])
    (path / "config.yaml").rename(desk.folder / "elsewhere.yaml")
    (path / "config.yaml").symlink_to(desk.folder / "elsewhere.yaml")
    assert "symbolic link" in desk.call("rollout", address)["line"]
    (desk.folder / "link").symlink_to(desk.folder / "other")
    assert "is not a directory" in desk.call("pull", address, desk.folder / "link")["line"]


def test_a_hub_that_fails_is_told_apart_from_a_bundle_that_is_wrong(desk: Desk) -> None:
    address = desk.call("push", desk.folder / "bundle", "me/failing")
    desk.hub.shorter = {"model.safetensors"}
    assert desk.call("pull", address, desk.folder / "cut")["cause"] == "fetch_unavailable"
    desk.hub.shorter = set()
    assert desk.call("pull", "hf://me/nothing")["cause"] == "fetch_refused"
    assert desk.call("pull", f"hf://me/failing@{'0' * 40}")["cause"] == "fetch_refused"
    desk.hub.status = 403
    assert desk.call("push", desk.folder / "bundle", "me/failing")["cause"] == "fetch_refused"
    desk.hub.status = 0
    assert not (desk.folder / "cut").exists()
    assert desk.call("pull", address, desk.folder / "cut")[1] == address


def test_a_signature_of_a_shipped_model_does_not_lie_in_the_package(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bundle = shipped_models()["ups-joint"]
    before = sorted(bundle.parent.iterdir())
    assert sign(bundle, desk.folder / "mine.pem") == Path("ups-joint.sig")
    assert (tmp_path / "ups-joint.sig").is_file()
    assert sorted(bundle.parent.iterdir()) == before


def test_a_push_does_not_replace_what_is_no_bundle(desk: Desk) -> None:
    desk.hub.commit("me/thesis", {"thesis.pdf": b"years of work"})
    refused = desk.call("push", desk.folder / "bundle", "me/thesis")
    assert refused["cause"] == "config"
    assert "thesis.pdf" in refused["line"]
    assert len(desk.hub.commits["me/thesis"]) == 1
    damaged = shutil.copytree(desk.folder / "bundle", desk.folder / "damaged")
    (damaged / "card.md").write_text("better")
    assert desk.call("push", damaged, "me/damaged")["cause"] == "bundle"
    with pytest.raises(IntegrityError, match=r"card\.md"):
        sign(damaged, desk.folder / "mine.pem")
    assert "me/damaged" not in desk.hub.commits


@pytest.mark.parametrize(
    "address",
    [
        "hf://me",
        "hf://me/../x",
        "hf://me/x@../y",
        "hf://a/b/c",
        "hf://me/x@",
        "hf://me/x#sha256=1",
        "hf:///x",
        "me x/y",
    ],
)
def test_an_address_that_is_none_is_refused_before_any_request(desk: Desk, address: str) -> None:
    before = len(desk.hub.requests)
    assert desk.call("pull", address)["cause"] == "config"
    assert len(desk.hub.requests) == before


def test_wrong_keys_are_named(desk: Desk) -> None:
    address = desk.call("push", desk.folder / "bundle", "me/keys")
    (desk.folder / "noise.pem").write_text("no key")
    for key in ("noise.pem", "missing.pem", "mine.pem"):
        assert desk.call("pull", address, None, desk.folder / key)["cause"] in ("config", "bundle")
    assert desk.call("push", desk.folder / "bundle", "me/keys", desk.folder / "noise.pem")["cause"] == "config"
    assert ADVECTION.name in load_bundle(desk.folder / "bundle").info.statistics
