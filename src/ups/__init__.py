"""Universal Physics Stack: one neural simulator for many PDEs. No side effect and no heavy import here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ups.inference.simulator import Simulator

__version__ = "0.1.0"
__all__ = ["Simulator", "__version__"]


def __getattr__(name: str) -> Any:
    """`ups.Simulator` imports torch; `import ups` alone does not."""
    if name == "Simulator":
        from ups.inference.simulator import Simulator

        return Simulator
    raise AttributeError(f"module 'ups' has no attribute '{name}'")
