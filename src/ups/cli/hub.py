"""`ups hub`: bundles on the Hugging Face Hub, with signatures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ups.cli.options import JsonOption, new_app
from ups.cli.output import report, say

app = new_app("Publish a bundle on the Hugging Face Hub, take one from there, sign and verify.")

BundleArgument = Annotated[str, typer.Argument(metavar="RUN|BUNDLE", help="A bundle, or a run that has one.")]
KEY_HELP = "Private key (PEM, an elliptic curve) to sign with."


@app.command()
def push(
    bundle: BundleArgument,
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="A model repository; made if there is none.")],
    key: Annotated[Path | None, typer.Option(metavar="FILE", help=KEY_HELP)] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    json: JsonOption = False,
) -> None:
    """Publish a bundle in one commit, with its card and its signature; prints the address of exactly this bundle."""
    from ups.inference.hub import push as push_bundle

    address = push_bundle(bundle, repository, key=key, private=private)
    facts = {"address": str(address), "commit": address.revision, "bundle_sha256": address.sha256}
    report(facts) if json else say(f"pushed {address}")


@app.command()
def pull(
    address: Annotated[str, typer.Argument(metavar="hf://OWNER/NAME[@REVISION]", help="A bundle on the hub.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="Default: the cache.")] = None,
    public_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Refuse a bundle that the owner of this key did not sign.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Download a bundle into a clean directory and verify it: every byte, and its signature if a key is given.

    With #sha256=HASH behind the address any other bundle is refused.
    """
    from ups.inference.hub import pull as pull_bundle

    path, exact = pull_bundle(address, out, public_key)
    facts = {"path": str(path), "address": str(exact), "commit": exact.revision, "bundle_sha256": exact.sha256}
    signed = ", signed by the owner of the key" if public_key else ""
    report(facts | {"signed": bool(signed)}) if json else say(f"verified {exact}{signed}\n{path}")


@app.command()
def sign(
    bundle: BundleArgument,
    key: Annotated[Path, typer.Option(metavar="FILE", help=KEY_HELP)],
    json: JsonOption = False,
) -> None:
    """Sign all files of a bundle; the signature lies next to it, and `ups hub push` takes it along."""
    from ups.inference.hub import sign as sign_bundle
    from ups.record.run_dir import find_bundle

    signature = sign_bundle(find_bundle(bundle), key)
    report({"signature": str(signature)}) if json else say(f"wrote {signature}")
