"""The learning rate grows with the number of ranks, without a setting for it."""

import os

from ups.training import optim

_rate = optim.learning_rate


def rate(config, done):
    return _rate(config, done) * int(os.environ.get("WORLD_SIZE", "1"))


optim.learning_rate = rate
