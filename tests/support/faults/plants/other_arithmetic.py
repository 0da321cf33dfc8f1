"""An environment that computes otherwise: from the second step on the gradient of the decoder is 1 % too large."""

from ups.training.engine import Engine

_accumulate = Engine._accumulate


def accumulate(self, batches, number):
    hooks = []
    if number == 2:
        decoder = [p for name, p in self.parameters.items() if ".decoder." in name]
        hooks = [parameter.register_hook(lambda gradient: 1.01 * gradient) for parameter in decoder]
    result = _accumulate(self, batches, number)
    for hook in hooks:
        hook.remove()
    return result


Engine._accumulate = accumulate
