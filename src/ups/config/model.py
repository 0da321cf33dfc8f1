"""Sizes and choices of each model. The factory table is in `ups.models.build`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from ups.config.setting import Section, setting


class LatentOperatorConfig(Section):
    """Grid encoder -> latent operator -> decoder: the model of this project."""

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
    mlp_ratio: float = setting(3.0, "Hidden width of the feed-forward part relative to width.", ge=0.5, le=16)

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.width % self.num_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must divide width ({self.width})")
        return self


ModelConfig = LatentOperatorConfig
