"""The first loader worker of a rank is killed a moment after it has started, as by a lack of memory."""

import threading

from ups.data import worker_pool

_start = worker_pool._start


def start(number, rank, payload):
    found = _start(number, rank, payload)
    if number == 0:
        threading.Timer(0.2, found.process.kill).start()
    return found


worker_pool._start = start
