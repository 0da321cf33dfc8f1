"""ups: the network as a plugin, and a hook that notes the final weights. The rest is the recipe."""

import workload

import ups
from ups.registry import HOOKS
from ups.training.engine import Hook


@ups.model
class Waves(workload.Network):
    def __init__(self, channels, width: int = 16):
        super().__init__(width)


@HOOKS.register("final")
class Final(Hook):
    def at_end(self, engine):
        if engine.runtime.rank == 0:
            workload.write_final(dict(engine.stage.named_parameters()))
