"""Tensors that follow from names and sizes alone: made once for a device and a type, and no part of a state dict."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor


class Constants:
    """A cache of such tensors. The key must say everything that the value depends on, but for device and type."""

    def __init__(self) -> None:
        self._known: dict[tuple[Hashable, ...], Tensor] = {}

    def get(self, make: Callable[[], Tensor], key: Hashable, device: torch.device, dtype: torch.dtype) -> Tensor:
        """What `make` returns (on the CPU), on `device` as `dtype`."""
        place = (key, device, dtype)
        if place not in self._known:
            # Autograd refuses to keep a tensor that was made in inference mode, and training may follow.
            with torch.inference_mode(False), torch.device("cpu"):
                self._known[place] = make().to(device=device, dtype=dtype)
        return self._known[place]

    def index(self, numbers: Callable[[], list[int]], key: Hashable, device: torch.device) -> Tensor:
        """Row numbers as an index on `device`: made there once, because a copy to a GPU waits for it."""
        return self.get(lambda: torch.tensor(numbers(), dtype=torch.int64), key, device, torch.int64)
