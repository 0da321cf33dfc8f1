"""`ups data fetch` and `ups data cache`: published data sets, and the latents of a frozen encoder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ups.cli.options import JsonOption, RecipeArgument, SetOption
from ups.cli.output import report, say, table
from ups.config.recipe import recipe_file, resolve
from ups.data.download import shown
from ups.data.fetch import catalog, plan
from ups.data.fetch import fetch as run
from ups.errors import ConfigError
from ups.record.processes import usable_cores
from ups.record.text import counted, duration_text, path_text, size_text
from ups.run.progress_line import ProgressLine

if TYPE_CHECKING:
    from ups.run.latent_caching import Gain


def fetch(
    name: Annotated[str | None, typer.Argument(help="Data set, such as pdebench/burgers1d; none lists them.")] = None,
    out: Annotated[str, typer.Option(help="Directory for the data sets.")] = "data",
    only: Annotated[
        list[str], typer.Option(metavar="PATTERN", help="Only files like this: '*Nu0.01*', 'data/train/*'.")
    ] = [],  # noqa: B006 - typer copies it
    mirror: Annotated[
        str | None, typer.Option(metavar="URL", help="Fetch from here; {name} stands for the data set.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, max=16, help="Files at once.")] = 4,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be fetched, with sizes.")] = False,
    json: JsonOption = False,
) -> None:
    """Fetch a data set of PDEBench or The Well; an interrupted command continues when it is run again."""
    if name is None:
        _list(json)
    elif dry_run:
        _plan(name, Path(out), only, mirror, json)
    else:
        _fetch(name, Path(out), only, mirror, jobs, json)


def _list(json: bool) -> None:
    sets = catalog()
    if json:
        report({"sets": {name: [file.path for file in one.files] for name, one in sets.items()}})
        return
    say(table([(name, counted(len(one.files), "file")) for name, one in sets.items()]))


def _plan(name: str, out: Path, only: list[str], mirror: str | None, json: bool) -> None:
    wanted = plan(name, out, only=only, mirror=mirror)
    if json:
        rows = [
            {"path": str(one.target), "url": shown(one.file.url), "bytes": one.size, "present": one.present}
            for one in wanted
        ]
        report({"name": name, "files": rows})
        return
    for one in wanted:
        size = "size not known" if one.size is None else size_text(one.size)
        say(f"{size:>14}  {'here' if one.present else 'to fetch'}  {path_text(one.target)}")
    missing = [one for one in wanted if not one.present]
    unknown = sum(one.size is None for one in missing)
    total = size_text(sum(one.missing for one in missing)) + (f" and {unknown} of unknown size" if unknown else "")
    say(f"{counted(len(missing), 'file')} to fetch: {total}")


def _fetch(name: str, out: Path, only: list[str], mirror: str | None, jobs: int, json: bool) -> None:
    import time

    started = time.monotonic()
    with ProgressLine(quiet=json) as line:
        before = -1

        def show(done: int, total: int) -> None:
            nonlocal before
            megabytes = -(-total // 1_000_000)
            now = megabytes if done >= total else done // 1_000_000
            if now != before and total:  # where no size is known there is nothing to compare with
                before = now
                line.count("fetching", now, megabytes, "MB")

        fetched = run(name, out, only=only, mirror=mirror, jobs=jobs, progress=show)
    facts = {
        "name": fetched.name,
        "path": str(fetched.path),
        "files": [str(path) for path in fetched.paths],
        "fetched": fetched.num_fetched,
        "bytes": fetched.num_bytes,
        "seconds": round(time.monotonic() - started, 3),
    }
    if json:
        report(facts)
        return
    rows = [("data set", fetched.name), ("path", path_text(fetched.path))]
    rows += [("files", f"{len(fetched.paths)}, of which {fetched.num_fetched} were fetched now")]
    rows += [("size", size_text(fetched.num_bytes)), ("took", duration_text(time.monotonic() - started))]
    say(table(rows))


def cache(
    recipe: RecipeArgument,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The cache. [default: `cache` of the stage]")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. [default: `cache_dtype` of the stage]")
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Encoding processes. [default: one per core]")] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing: read every byte of the cache again.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace another cache of that name.")] = False,
    set: SetOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """Keep the latents of a frozen encoder for the stage that learns from them.

    The encoder is that of the stage's start_from. An interrupted command continues when it is run again.
    """
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
    from ups.run.latent_caching import encoder_hash, frozen_stepper, measure_gain, write_cache, writer_for

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
            elsewhere=(recipe, index),
            num_processes=processes or usable_cores(),
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
        facts |= {"field_bytes": gain.field_bytes, "encoder_seconds": gain.encoder_seconds}
        facts |= {"operator_seconds": gain.operator_seconds, "expected_gain": gain.factor, "pays": gain.pays}
        facts |= gain.to_json()
    return facts


def _lines(gain: Gain, dtype: str) -> list[str]:
    ratio = gain.latent_bytes / max(1, gain.field_bytes)
    lines = [
        f"size: {gain.latent_bytes / 1e6:,.1f} MB, {ratio:.3g} times that of the fields",
        f"forward pass of a window: encoder {1e3 * gain.encoder_seconds:.3g} ms, "
        f"operator {1e3 * gain.operator_seconds:.3g} ms (CPU time)",
    ]
    for name, error in gain.errors.items():
        change = "" if error.of_change is None else f", {error.of_change:.1e} of its change over a step"
        lines.append(f"error of {dtype} in task '{name}': {error.of_latent:.1e} of a latent{change}")
    return [*lines, gain.verdict]
