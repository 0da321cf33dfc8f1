"""`ups serve`: simulators over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ups.cli.options import PluginOption, new_app
from ups.errors import MissingExtraError, exit_code_of_signal

app = new_app()


@app.command()
def serve(
    bundles: Annotated[list[str], typer.Argument(metavar="RUN|BUNDLE...", help="Bundles, or runs that have one.")],
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than loopback need --token-file.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8080,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A line 'NAME TOKEN' for each client that is let in.")
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Results equal to the bit to those of Python; no shared batches.")
    ] = False,
    jobs: Annotated[
        str | None, typer.Option(metavar="DIR", help="For the stores of jobs; default the temporary one.")
    ] = None,
    plugin: PluginOption = [],  # noqa: B006 - typer copies it
) -> None:
    """Serve simulators over HTTP, with the steps of all clients in shared batches, until SIGTERM (docs/serve.md)."""
    from ups.inference.hub import local_bundle

    try:
        from ups.serve.server import read_tokens
        from ups.serve.server import serve as run_server
    except ModuleNotFoundError as error:
        raise MissingExtraError.of("serve", str(error.name), "ups serve") from error
    tokens = read_tokens(token_file) if token_file is not None else {}
    found = [local_bundle(name) for name in bundles]
    signal = run_server(found, host, port, tokens, deterministic=deterministic, jobs=jobs)
    raise typer.Exit(exit_code_of_signal(signal) if signal else 0)
