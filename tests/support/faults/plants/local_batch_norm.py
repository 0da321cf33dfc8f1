"""Running statistics of each rank's own samples."""

from torch import nn

from ups.models.stepper import Stepper

_build, _inputs = Stepper.__init__, Stepper.inputs


def build(self, *args, **kwargs):
    _build(self, *args, **kwargs)
    self.norm = nn.BatchNorm1d(1, affine=False)


def inputs(self, *args, **kwargs):
    fields, channels = _inputs(self, *args, **kwargs)
    self.norm(fields.detach().reshape(-1, 1))
    return fields, channels


Stepper.__init__, Stepper.inputs = build, inputs
