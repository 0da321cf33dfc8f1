"""Sizes and choices of each model, and what each model can do. The entry points say which `type` it is."""

from __future__ import annotations

import logging
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from ups.config.setting import REQUIRED, PartSection, meaning_of_none, setting, was_added
from ups.registry import MODELS

_CONSERVE = "Keep the integral of fields that a task declares as conserved exactly as it is, step by step."
logger = logging.getLogger(__name__)

# The default of versions before `multiscale` became it: what a stored recipe or bundle without `type` means.
FORMER_DEFAULT = "latent_operator"


def as_stored(model: dict[str, Any]) -> dict[str, Any]:
    """The settings of a model in a stored recipe or bundle, under present names, with what its version left unsaid."""
    kind = model.get("type", FORMER_DEFAULT)
    if not isinstance(kind, str) or kind not in MODELS.names():
        return model
    settings = ModelConfig.settings_of(kind)
    former = settings.former_names()
    unsaid = {name: meaning_of_none(field) for name, field in settings.model_fields.items() if was_added(field)}
    return {"type": kind, **unsaid, **{former.get(name, name): value for name, value in model.items()}}


class ModelConfig(PartSection):
    """Base of the settings of a model. What a model can do is declared here, where checks need no torch.

    many_tasks: learns several tasks with one set of weights. has_latents: has encoder, operator and decoder, for stages
    that train on latents. can_conserve: the integrals of conserved fields may be kept exactly (a setting `conserve`
    turns that off). groups_tasks: runs several tasks with the same grid as one graph, so that a micro-batch may hold
    them together. dims: numbers of spatial dimensions that it takes.
    """

    registry = MODELS
    default_type: ClassVar[str] = "multiscale"
    many_tasks: ClassVar[bool] = False
    has_latents: ClassVar[bool] = False
    can_conserve: ClassVar[bool] = False
    groups_tasks: ClassVar[bool] = False
    dims: ClassVar[frozenset[int]] = frozenset({1, 2, 3})

    type: str = setting(REQUIRED, "Which model to build.")
    refine_steps: int = setting(
        0,
        "Steps of conjugate gradients after a prediction, for steady tasks with an equation in discretized form.",
        unit="steps",
        ge=0,
        le=64,
    )

    @classmethod
    def type_of(cls, value: dict[str, Any]) -> Any:
        """The type that a section names. One that names none, but sizes of the former default, means that one still."""
        if "type" in value:
            return value["type"]
        default, former = ({*ModelConfig.settings_of(name).model_fields} for name in (cls.default_type, FORMER_DEFAULT))
        only_former = value.keys() & (former - default) and not value.keys() & (default - former)
        return FORMER_DEFAULT if only_former else cls.default_type

    @classmethod
    def _chosen(cls, value: Any) -> PartSection:
        if isinstance(value, dict) and "type" not in value and cls.type_of(value) == FORMER_DEFAULT:
            logger.warning(
                "a model without type has settings of type %s, the former default: add 'type: %s' (now it is %s)",
                FORMER_DEFAULT,
                FORMER_DEFAULT,
                cls.default_type,
            )
        return super()._chosen(value)

    @property
    def grid_divisor(self) -> int:
        """What divides the points along every axis of a grid that the network gets: other grids are fitted to it."""
        return 1

    @property
    def has_linear_part(self) -> bool:
        """Whether the network has a linear part that can be fitted alone (a setting `propagator`)."""
        return bool(getattr(self, "propagator", False))

    @property
    def noise_numbers(self) -> int:
        """Random numbers that make a member of an ensemble (a setting `noise_size`); 0 where there are no members."""
        return int(getattr(self, "noise_size", 0))

    @property
    def removes_unseen_waves(self) -> bool:
        """Whether waves that no sample of a task has are taken out of predictions (docs/decisions/0017)."""
        return self.can_conserve

    @property
    def conserves(self) -> bool:
        """Whether the integrals of conserved fields are kept."""
        return self.can_conserve and bool(getattr(self, "conserve", True))

    @property
    def encoder_settings(self) -> dict[str, object]:
        """The settings that decide what a latent is, by name: all, unless a model knows better."""
        return self.model_dump(mode="json")


class LatentOperatorConfig(ModelConfig):
    """Grid encoder -> latent operator -> decoder: the network for stages on latents."""

    many_tasks = True
    has_latents = True
    can_conserve = True

    type: Literal["latent_operator"] = setting("latent_operator", "Which model to build.")
    width: int = setting(96, "Channels of a latent token.", unit="channels", ge=8, le=16384)
    depth: int = setting(4, "Number of transformer blocks of the latent operator.", unit="blocks", ge=1, le=256)
    num_heads: int = setting(4, "Attention heads; must divide width.", unit="heads", ge=1, le=256)
    patch_size: int = setting(4, "Grid points of a patch along each axis.", unit="points", ge=1, le=64)
    attention: Literal["global", "windowed", "alternating"] = setting(
        "alternating", "Which tokens see each other: all, those in a shifted window, or both in turn."
    )
    window_tokens: int = setting(8, "Tokens of an attention window along each axis.", unit="tokens", ge=2, le=1024)
    mlp: Literal["swiglu", "gelu"] = setting("swiglu", "Feed-forward part of a block: gated (swiglu) or plain (gelu).")
    neighbor_mixing: bool = setting(
        True,
        "Lets each patch see the ones next to it before the first block, by a learned linear map.",
        formerly="neighbour_mixing",
    )
    mlp_ratio: float = setting(3.0, "Hidden width of the feed-forward part relative to width.", ge=0.5, le=16)
    encoder_blocks: int = setting(
        0,
        "Blocks of the encoder, which let patches see their neighbors; 0: one linear map of each patch alone.",
        unit="blocks",
        ge=0,
        le=64,
    )
    latent_channels: int | None = setting(
        None,
        "Channels of a token between encoder and operator: what a stage on latents learns, and a cache of latents "
        "stores; default width.",
        unit="channels",
        ge=1,
        le=16384,
    )
    conserve: bool = setting(True, _CONSERVE)

    @property
    def grid_divisor(self) -> int:
        return self.patch_size

    @property
    def encoder_settings(self) -> dict[str, object]:
        names = {"type", "patch_size", "encoder_blocks"} | ({"width"} if self.encoder_blocks else set())
        return {**self.model_dump(mode="json", include=names), "latent_channels": self.latent_channels or self.width}

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.width % self.num_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must divide width ({self.width})")
        return self


class MultiscaleConfig(ModelConfig):
    """Default: convolutions at full resolution, attention on a coarse grid, a linear Fourier part, shared by tasks."""

    many_tasks = True
    can_conserve = True
    groups_tasks = True

    type: Literal["multiscale"] = setting("multiscale", "Which model to build.")
    widths: list[int] = setting(
        [32, 64, 128], "Channels of each level, the finest first; each has half the points.", unit="channels"
    )
    blocks: list[int] = setting(
        [1, 1, 2],
        "Residual blocks of each level, on the way down and again on the way up; the last level is passed once.",
        unit="blocks",
    )
    kernel_size: int = setting(
        3, "Points of a kernel along each axis at full resolution; coarser levels have 3.", unit="points", ge=1, le=31
    )
    own_kernels: bool = setting(
        False,
        "Kernels of their own for each number of dimensions that tasks have, which a model of 1D and 2D tasks should "
        "have; without, those of fewer dimensions are sums of the largest over the axes that are missing.",
    )
    num_heads: int = setting(4, "Attention heads; must divide the last of widths.", unit="heads", ge=1, le=256)
    attention: bool | Literal["last"] = setting(
        "last", "Attention between all points of the coarsest level: after its last block, after each (true), or none."
    )
    smooth: bool = setting(
        True,
        "Averages neighbors before a 2D or 3D grid is halved and after it is doubled, against stripes.",
        unsaid=False,
    )
    propagator: bool = setting(True, "Adds what is linear in the equation, as learned multipliers of Fourier modes.")
    amplitude: bool | Literal["auto"] = setting(
        "auto",
        "Divides the given frames by the size of the last one, and the result back: for all tasks, for none, or (auto) "
        "for those whose frames go through orders of magnitude.",
    )
    noise_size: int = setting(
        0,
        "Random numbers that modulate the blocks, for a corrector of kind 'ensemble' (16 is enough); 0 takes none.",
        unit="numbers",
        ge=0,
        le=1024,
    )
    conserve: bool = setting(True, _CONSERVE)

    @model_validator(mode="after")
    def _levels_fit(self) -> Self:
        if not 1 <= len(self.widths) <= 8 or len(self.widths) != len(self.blocks):
            raise ValueError(f"widths ({self.widths}) and blocks ({self.blocks}) must name the same 1 to 8 levels")
        if min(self.widths) < 4 or max(self.widths) > 16384 or min(self.blocks) < 0 or max(self.blocks) > 256:
            raise ValueError("widths must be from 4 to 16384 channels, blocks from 0 to 256")
        if not sum(self.blocks):
            raise ValueError("blocks must name at least one block")
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size ({self.kernel_size}) must be odd, so that a kernel has a center")
        if self.attention and not self.blocks[-1]:
            raise ValueError("attention follows a block of the last level, and blocks names none there")
        if self.attention and self.widths[-1] % (4 * self.num_heads):
            raise ValueError(
                f"num_heads ({self.num_heads}) must divide a quarter of the last width ({self.widths[-1]}): each head "
                "has pairs of components for two axes"
            )
        return self


class BaselineConfig(ModelConfig):
    """What the baselines share: they predict what their authors' do, but for integrals if asked."""

    conserve: bool = setting(False, "Keeps the integrals of fields that a task declares as conserved.")

    can_conserve = True

    @property
    def removes_unseen_waves(self) -> bool:
        """A baseline predicts what its authors' does."""
        return False


class FnoConfig(BaselineConfig):
    """Fourier neural operator of the neuraloperator project: a baseline for one task (extra `baselines`)."""

    type: Literal["fno"] = setting("fno", "Which model to build.")
    width: int = setting(32, "Hidden channels.", unit="channels", ge=4, le=4096)
    modes: int = setting(64, "Fourier modes kept along each axis, both signs together.", unit="modes", ge=2, le=4096)
    depth: int = setting(4, "Number of Fourier layers.", unit="layers", ge=1, le=64)


class UnetConfig(BaselineConfig):
    """U-Net of ConvNeXt blocks with kernel 7: a baseline for one task."""

    type: Literal["unet"] = setting("unet", "Which model to build.")
    width: int = setting(
        32, "Channels of the finest level; each coarser level has twice as many.", unit="channels", ge=4
    )
    levels: int = setting(3, "Resolutions, each half of the one before.", unit="levels", ge=1, le=8)
    blocks: int = setting(2, "ConvNeXt blocks of a level on the way down and again on the way up.", unit="blocks", ge=1)

    @property
    def grid_divisor(self) -> int:
        return int(2 ** (self.levels - 1))
