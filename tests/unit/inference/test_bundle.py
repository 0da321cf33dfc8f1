"""A bundle is plain files, is whole or refused, and loads without training code or pickle."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open

from tests.support.small_bundle import make_bundle
from tests.unit.inference.bundles.make import HERE
from ups.errors import BundleError
from ups.inference.bundle import load_bundle, write_bundle
from ups.models.stepper import former_name
from ups.record.manifest import COMMITTED_NAME, MANIFEST_NAME, commit_directory

OTHER = {"type": "latent_operator", "width": 24, "num_heads": 2, "depth": 1}


def recommit(directory) -> None:
    """Give a tampered bundle a manifest that fits: what a malicious author can do."""
    for name in (MANIFEST_NAME, COMMITTED_NAME):
        (directory / name).unlink()
    other = directory.with_name("recommitted")
    directory.rename(other)
    commit_directory(other, directory)


def test_weights_come_back_bit_for_bit(tmp_path):
    path = make_bundle(tmp_path / "b")
    first, second = load_bundle(path), load_bundle(path)
    for (name, a), b in zip(first.stepper.state_dict().items(), second.stepper.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
        assert a.device.type == "cpu"
    assert first.hash == second.hash
    assert sorted(p.name for p in path.iterdir()) == [
        "COMMITTED", "MANIFEST", "bundle.json", "card.md", "config.yaml", "model.safetensors",
    ]  # fmt: skip


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_every_file_of_a_bundle_follows_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        path = make_bundle(tmp_path / "b")
    finally:
        os.umask(before)
    assert {file.name: file.stat().st_mode & 0o777 for file in path.iterdir()} == dict.fromkeys(os.listdir(path), mode)


def test_equal_models_give_equal_files(tmp_path):
    paths = [make_bundle(tmp_path / str(number)) for number in range(12)]
    assert len({(path / "model.safetensors").read_bytes() for path in paths}) == 1
    assert len({load_bundle(path).hash for path in paths[:2]}) == 1


def test_every_network_comes_back_under_its_name(tmp_path):
    source = load_bundle(HERE / "v2" / "two_networks")
    path = write_bundle(tmp_path / "b", source.stepper, source.info, config_text="", card="")
    info = json.loads((path / "bundle.json").read_text())
    assert {name: part["type"] for name, part in info["networks"].items()} == {
        "operator": "latent_operator",
        "corrector": "unet",
    }
    stepper = load_bundle(path).stepper
    assert stepper.configs == source.stepper.configs
    assert {name.split(".")[1] for name in stepper.state_dict() if name.startswith("networks.")} == set(stepper.configs)
    for name, tensor in source.stepper.state_dict().items():
        assert torch.equal(stepper.state_dict()[name], tensor), name


def test_a_bundle_of_one_network_is_read_as_its_operator():
    former = HERE / "v1" / "latent_operator"
    bundle = load_bundle(former)
    assert set(bundle.info.networks) == {"operator"}
    assert bundle.info.model.type == "latent_operator"
    with safe_open(former / "model.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    present = bundle.stepper.state_dict()
    assert present.keys() != stored.keys()
    assert {former_name(name) for name in present} == stored.keys()
    for name, tensor in present.items():
        assert torch.equal(tensor, stored[former_name(name)])


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_bundle_without_a_type_is_of_the_former_default(version, tmp_path):
    path = tmp_path / "bundle"
    shutil.copytree(HERE / version / "latent_operator", path)
    text = (path / "bundle.json").read_text()
    (path / "bundle.json").write_text(re.sub(r'"type": "latent_operator",\s*', "", text))
    recommit(path)
    bundle = load_bundle(path)
    assert bundle.info.model == load_bundle(HERE / version / "latent_operator").info.model
    assert bundle.info.model.type == "latent_operator"


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_loading_needs_neither_training_code_nor_distributed_nor_pickle(tmp_path):
    code = (
        "import sys, ups; s = ups.Simulator.load(sys.argv[1], device='cpu'); "
        "modules = ('ups.training', 'ups.distributed', 'ups.data', 'matplotlib'); "
        "bad = [m for m in sys.modules if m.startswith(modules)]; "
        "print(bad, list(s.tasks))"
    )
    path = make_bundle(tmp_path / "b")
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "[] ['advection', 'flow', 'darcy']"


def test_damage_is_named(tmp_path):
    path = make_bundle(tmp_path / "b")
    weights = path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    with pytest.raises(BundleError, match=r"damaged.*model\.safetensors"):
        load_bundle(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"networks": {"operator": OTHER}}, "does not hold the weights"),
        ({"networks": {"operator": OTHER | {"width": 16384, "depth": 256}}}, "does not hold the weights"),
        ({"version": 99}, "version 99 is not known"),
        ({"version": "1"}, "version 1 is not known"),
        ({"format": "x"}, "does not describe a bundle"),
        ({"tasks": []}, "tasks: List should have at least 1 item"),
        ({"context_frames": 0}, "context_frames"),
        ({"networks": {"operator": {"type": "rm -rf"}}}, "which no installed package has"),
        ({"statistics": {}}, "malformed"),
        ({"coordinates": {"advection": [[1, 0]], "flow": [], "darcy": []}}, "increasing"),
    ],
)
def test_a_untrusted_bundle_is_refused_with_a_reason(tmp_path, change, words):
    path = make_bundle(tmp_path / "b")
    data = json.loads((path / "bundle.json").read_text()) | change
    (path / "bundle.json").write_text(json.dumps(data))
    recommit(path)
    with pytest.raises(BundleError, match=words):
        load_bundle(path)


def test_what_is_not_a_bundle_gets_a_hint(tmp_path):
    with pytest.raises(BundleError, match="there is no bundle"):
        load_bundle(tmp_path / "nothing")
    make_bundle(tmp_path / "run" / "bundle")
    with pytest.raises(BundleError, match=r"no bundle\.json") as caught:
        load_bundle(tmp_path / "run")
    assert "its bundle is" in caught.value.hint
