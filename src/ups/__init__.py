"""Universal Physics Stack: one neural simulator for many PDEs. No heavy import here.

The names below are found on first use, each in its module: `import ups` costs nothing, `ups.Simulator` imports torch.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ups.config.schema import Recipe
    from ups.inference.simulator import Simulator
    from ups.library.data import Dataset, generate_data, open_data
    from ups.library.finetune import finetune_recipe
    from ups.library.own_data import import_data
    from ups.library.recipe import load_recipe
    from ups.library.reproduce import reproduce
    from ups.library.run import Run
    from ups.library.run_recipe import run_recipe
    from ups.library.scores import Comparison, Scores, compare, evaluate
    from ups.library.train import fit, train
    from ups.models.plain import model
    from ups.registry import use_script
    from ups.serve.client import RemoteSimulator

__version__ = "0.1.0"
__all__ = [
    "Comparison",
    "Dataset",
    "Recipe",
    "RemoteSimulator",
    "Run",
    "Scores",
    "Simulator",
    "__version__",
    "calibrate",
    "compare",
    "evaluate",
    "finetune_recipe",
    "fit",
    "generate_data",
    "import_data",
    "load_recipe",
    "model",
    "open_data",
    "reproduce",
    "run_recipe",
    "train",
    "use_script",
]

_MODULES = {
    "Comparison": "ups.library.scores",
    "Dataset": "ups.library.data",
    "Recipe": "ups.config.schema",
    "RemoteSimulator": "ups.serve.client",
    "Run": "ups.library.run",
    "Scores": "ups.library.scores",
    "Simulator": "ups.inference.simulator",
    "calibrate": "ups.library.scores",
    "compare": "ups.library.scores",
    "evaluate": "ups.library.scores",
    "finetune_recipe": "ups.library.finetune",
    "fit": "ups.library.train",
    "generate_data": "ups.library.data",
    "import_data": "ups.library.own_data",
    "load_recipe": "ups.library.recipe",
    "model": "ups.models.plain",
    "open_data": "ups.library.data",
    "reproduce": "ups.library.reproduce",
    "run_recipe": "ups.library.run_recipe",
    "train": "ups.library.train",
    "use_script": "ups.registry",
}

# A library is silent; who imports it configures logging (ups.record.log).
logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'ups' has no attribute '{name}'")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
