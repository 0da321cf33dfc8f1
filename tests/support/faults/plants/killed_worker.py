"""A loader worker dies while it reads."""

from ups.data import worker_pool

_start = worker_pool._start


def start(number, rank, payload):
    worker = _start(number, rank, payload)
    if number == 1:
        worker.process.kill()
    return worker


worker_pool._start = start
