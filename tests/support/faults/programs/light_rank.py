"""A rank program without torch, for tests of supervisors over several hosts: it starts in a second.

`python light_rank.py RUN_DIR`. Ranks meet at the address of UPS_RENDEZVOUS, as real ones do, and sum a number in each
step over plain TCP connections to rank 0. A rank that loses a peer says so in the words of torch's store. Takes
TOY_STEPS, TOY_INTERVAL and TOY_STEP_SECONDS.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from ups.record import manifest
from ups.record.blackbox import Phase
from ups.record.failure import install_from_environment

RUN_DIR = Path(sys.argv[1])
RECORDER = install_from_environment(RUN_DIR)
BOX = RECORDER.box
assert BOX is not None
STEPS = int(os.environ.get("TOY_STEPS", "20"))
INTERVAL = int(os.environ.get("TOY_INTERVAL", "5"))
STEP_SECONDS = float(os.environ.get("TOY_STEP_SECONDS", "0.01"))
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ASKED: list[int] = []


class Group:
    """Connections of all ranks to rank 0."""

    def __init__(self) -> None:
        address = urlsplit(os.environ["UPS_RENDEZVOUS"])
        there = (str(address.hostname), int(address.port or 0))
        if RANK:
            self._peers = [self._reach(there)]
        else:
            with socket.create_server(there) as server:
                self._peers = [server.accept()[0] for _ in range(WORLD - 1)]

    def _reach(self, there: tuple[str, int]) -> socket.socket:
        deadline = time.monotonic() + 60
        while True:
            try:
                return socket.create_connection(there)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def total(self, value: int) -> int:
        """The sum over all ranks. Collective: all ranks."""
        try:
            if RANK:
                self._peers[0].sendall(value.to_bytes(8))
                return self._read(self._peers[0])
            result = value + sum(self._read(peer) for peer in self._peers)
            for peer in self._peers:
                peer.sendall(result.to_bytes(8))
            return result
        except OSError as error:
            raise RuntimeError(f"failed to recv, got 0 bytes. Connection was likely closed: {error}") from error

    @staticmethod
    def _read(peer: socket.socket) -> int:
        content = b""
        while len(content) < 8:
            more = peer.recv(8 - len(content))
            if not more:
                raise ConnectionResetError("closed")
            content += more
        return int.from_bytes(content)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: ASKED.append(number))
    group = Group()
    done = sorted(path for path in (RUN_DIR / "checkpoints").glob("step_*") if manifest.is_committed(path))
    step, state = (0, 0) if not done else json.loads((done[-1] / "state.json").read_text())
    BOX.total_steps = STEPS
    while step < STEPS:
        BOX.record(Phase.FORWARD, step)
        time.sleep(STEP_SECONDS)
        BOX.record(Phase.SYNC, step)
        state += group.total(step * (RANK + 1))
        leave = group.total(len(ASKED)) > 0
        step += 1
        if step % INTERVAL == 0 or step == STEPS or leave:
            BOX.record(Phase.SAVE, step)
            if RANK == 0:
                final = RUN_DIR / "checkpoints" / f"step_{step:08d}"
                temporary = manifest.make_temporary(final)
                (temporary / "state.json").write_text(json.dumps([step, state]))
                manifest.commit_directory(temporary, final)
            group.total(0)
        if leave and step < STEPS:
            BOX.leave(step)
            return
    BOX.record(Phase.TEARDOWN, step)
    BOX.finish(step)


if __name__ == "__main__":
    with RECORDER.watch():
        main()
