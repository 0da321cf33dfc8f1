"""A loader worker dies while it reads."""

from ups.data import worker_pool

_start = worker_pool._start


def start(number, rank, payload):
    found = _start(number, rank, payload)
    if number == 1:
        found.process.kill()
    return found


worker_pool._start = start
