"""A recipe on the mixture of tasks whose operator stage reads latents of a frozen encoder, and what it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.mixture import MODELS, mixture_recipe
from ups.config.recipe import resolve_data
from ups.config.schema import Recipe
from ups.inference.bundle import BundleInfo, write_bundle
from ups.models.build import build_model
from ups.run.assemble import OpenData, cache_key, open_data
from ups.run.latent_caching import Written, encoder_hash, frozen_stepper, write_cache, writer_for


def latent_recipe(folder: Path, tasks: list[dict[str, Any]], *, name: str = "mixture", **stage: Any) -> dict[str, Any]:
    """Plain values of a recipe that starts from `folder/encoder` and reads `folder/latents`."""
    on_latents = {
        "type": "operator",
        "steps": 4,
        "space": "latent",
        "unroll_steps": 2,
        "start_from": str(folder / "encoder"),
        "cache": str(folder / "latents"),
    }
    return mixture_recipe(folder / name, tasks, model=MODELS["deep_encoder"], stages=[on_latents | stage])


def write_encoder(folder: Path, recipe: Recipe, opened: OpenData, seed: int = 11) -> Path:
    """A bundle `folder/encoder` of the recipe's model with weights as drawn."""
    tasks = tuple(reader.task for reader in opened.readers)
    context = recipe.data.context_frames
    stepper = build_model(recipe.model, tasks, opened.statistics, context, seed=seed)
    grids = {reader.task.name: reader.coordinates for reader in opened.readers}
    info = BundleInfo(stepper.configs, context, tasks, dict(opened.statistics), grids)
    text = resolve_data(recipe.model_dump(mode="json")).text
    return write_bundle(folder / "encoder", stepper, info, config_text=text, card="# encoder\n")


def prepare_latents(folder: Path, tasks: list[dict[str, Any]]) -> dict[str, Any]:
    """Write `folder/encoder` and `folder/latents`; returns the settings of a stage that reads them."""
    recipe = Recipe.model_validate(latent_recipe(folder, tasks))
    with open_data(recipe) as opened:
        write_encoder(folder, recipe, opened)
        write_latents(recipe, opened, folder / "latents")
    return {name: getattr(recipe.stages[0], name) for name in ("space", "start_from", "cache")}


def write_latents(recipe: Recipe, opened: OpenData, root: Path, dtype: str = "float32", **options: Any) -> Written:
    """The cache of the recipe's first stage."""
    stepper = frozen_stepper(recipe, opened, 0)
    key = cache_key(recipe, opened, 0, dtype=dtype, encoder=encoder_hash(stepper))
    writer = writer_for(root, key, stepper, opened, overwrite=options.pop("overwrite", False))
    return write_cache(writer, stepper, opened, **options)
