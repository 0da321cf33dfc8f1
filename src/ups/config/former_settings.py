"""Settings of networks that did not exist when a run or bundle was written, as the networks of that time had them.

What a run or bundle says of a network is complete: a setting that is missing there is one of later versions, and its
default of today is not what was trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# type of the network -> setting -> what all networks had before it existed
_BEFORE: dict[str, dict[str, Any]] = {"multiscale": {"own_kernels": False}}


def as_written(network: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a network that was stored, with those that it could not say."""
    return {**_BEFORE.get(str(network.get("type")), {}), **network}


def overrides_of(document: Mapping[str, Any]) -> list[str]:
    """What to change in the stored recipe of a run so that it says what was trained, as `a.b=c`."""
    others = document.get("networks")
    networks = {"model": document.get("model")}
    networks |= {f"networks.{name}": value for name, value in others.items()} if isinstance(others, Mapping) else {}
    return [
        f"{place}.{name}={str(value).lower()}"
        for place, network in networks.items()
        if isinstance(network, Mapping)
        for name, value in as_written(network).items()
        if name not in network
    ]
