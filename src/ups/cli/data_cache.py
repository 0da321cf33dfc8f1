"""`ups data cache`: asks for the latents of a stage's encoder and shows what they bring (work: ups.run)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ups.cli.options import JsonOption, RecipeArgument, SetOption
from ups.cli.output import report, say, table
from ups.errors import ConfigError

if TYPE_CHECKING:
    from ups.run.latent_caching import Gain


def cache(
    recipe: RecipeArgument,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="The cache. [default: `cache` of the stage]", show_default=False),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16. [default: `cache_dtype` of the stage]", show_default=False),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Encoding processes. [default: one per core]", show_default=False)
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing: read every byte of the cache again.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace another cache of that name.")] = False,
    set: SetOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """Keep the latents of a frozen encoder for the stage that learns from them.

    The encoder is that of the stage's start_from. An interrupted command continues when it is run again.
    """
    from ups.config.recipe import recipe_file, resolve
    from ups.data.latent_cache import STORED
    from ups.run.assemble import open_data
    from ups.run.latent_caching import stage_to_cache

    resolved = resolve(recipe_file(recipe), set).recipe
    index = stage_to_cache(resolved)
    stage: Any = resolved.stages[index]
    root = out or (Path(stage.cache) if stage.cache else None)
    if root is None:
        raise ConfigError("the stage names no cache", hint=f"give --out DIR, or set stages.{index}.cache in the recipe")
    kind = dtype or stage.cache_dtype
    if kind not in STORED:
        raise ConfigError(f"there is no dtype '{kind}'", hint=f"choose one of {', '.join(STORED)}")
    with open_data(resolved) as opened:
        facts = _check(root) if check else _write(root, resolved, opened, index, kind, processes, overwrite, json)
    facts = {"path": str(root), "stage": index, **facts}
    if json:
        report(facts)
    else:
        say(table([(key, str(value)) for key, value in facts.items()]))


def _check(root: Path) -> dict[str, Any]:
    from ups.data.latent_cache import read_document

    document, manifest = read_document(root, deep=True)
    return {
        "dtype": document["key"]["dtype"],
        "key": document["key_hash"],
        "manifest": manifest,
        "checked": "all bytes",
    }


def _write(
    root: Path, recipe: Any, opened: Any, index: int, dtype: str, processes: int | None, overwrite: bool, json: bool
) -> dict[str, Any]:
    from ups.run.assemble import cache_key
    from ups.run.latent_caching import (
        encoder_hash,
        for_processes,
        frozen_stepper,
        measure_gain,
        write_cache,
        writer_for,
    )
    from ups.run.progress_line import ProgressLine

    stepper = frozen_stepper(recipe, opened, index)
    key = cache_key(recipe, opened, index, dtype=dtype, encoder=encoder_hash(stepper))
    writer = writer_for(root, key, stepper, opened, overwrite=overwrite)
    gain = measure_gain(stepper, list(opened.readers), writer.tasks, recipe.stages[index], dtype, writer.num_bytes)
    if not json:
        say("\n".join(_lines(gain, dtype)))
    with ProgressLine(quiet=json) as line:
        written = write_cache(
            writer,
            stepper,
            opened,
            elsewhere=for_processes(recipe, index),
            num_processes=processes or len(os.sched_getaffinity(0)),
            facts=gain.to_json(),
            progress=lambda done, total: line.count("encoding", done, total, "files"),
        )
    facts: dict[str, Any] = {
        "dtype": dtype,
        "bytes": written.num_bytes,
        "key": key.hash,
        "manifest": written.cache.manifest,
        "kept": written.kept,
    }
    if json:
        facts |= {
            "field_bytes": gain.field_bytes,
            "encoder_seconds": gain.encoder_seconds,
            "operator_seconds": gain.operator_seconds,
            "expected_gain": gain.factor,
            "pays": gain.pays,
            **gain.to_json(),
        }
    return facts


def _lines(gain: Gain, dtype: str) -> list[str]:
    ratio = gain.latent_bytes / max(1, gain.field_bytes)
    lines = [
        f"size: {gain.latent_bytes / 1e6:,.1f} MB, {ratio:.3g} times that of the fields",
        f"forward pass of a window: encoder {1e3 * gain.encoder_seconds:.3g} ms, "
        f"operator {1e3 * gain.operator_seconds:.3g} ms (CPU time)",
    ]
    for name, error in gain.errors.items():
        change = f", {error.of_change:.1e} of its change over a step" if error.of_change == error.of_change else ""
        lines.append(f"error of {dtype} in task '{name}': {error.of_latent:.1e} of a latent{change}")
    return [*lines, gain.verdict]
