"""A TCP proxy on loopback before a server: it delays what the server answers, and counts it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from urllib.parse import urlsplit


class SlowProxy:
    """num_bytes: what the server has sent through it. num_requests: what it was asked. busy_seconds: over all requests,
    how long each was under way. delay_seconds: how much later its answers arrive."""

    def __init__(self, target: str, delay_seconds: float = 0.0) -> None:
        parts = urlsplit(target)
        self._host, self._port, self._delay = parts.hostname, parts.port, delay_seconds
        self.num_bytes, self.num_requests, self.busy_seconds, self.endpoint = 0, 0, 0.0, ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._clock = time.CLOCK_THREAD_CPUTIME_ID  # until `run` has begun

    def run(self) -> None:
        """Serve until `stop`; the body of a thread."""
        asyncio.set_event_loop(self._loop)
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._loop.run_until_complete(self._start())
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    def cpu_seconds(self) -> float:
        """What its thread has taken of the processor."""
        return time.clock_gettime(self._clock)

    def wait(self) -> None:
        """Until `endpoint` is known."""
        self._ready.wait(30)

    async def _start(self) -> None:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.close()
            return
        asked: deque[float] = deque()  # when each request came that was not answered yet
        with contextlib.suppress(asyncio.CancelledError):  # of `run`, at its end
            await asyncio.gather(self._forward(reader, far_writer, asked), self._back(far_reader, writer, asked))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: deque[float]) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if data.startswith((b"GET ", b"HEAD ")):  # without a body: a request is one piece
                    self.num_requests += 1
                    asked.append(self._loop.time())
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: deque[float]) -> None:
        # Each piece has its own time: a delay is no limit on how many bytes come in a second.
        last = self._loop.create_task(asyncio.sleep(0))
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 18):
                self.num_bytes += len(data)
                if asked:  # until the first byte of the answer arrives
                    self.busy_seconds += self._loop.time() + self._delay - asked.popleft()
                last = self._loop.create_task(self._deliver(writer, data, self._loop.time() + self._delay, last))
        await last
        writer.close()

    async def _deliver(self, writer: asyncio.StreamWriter, data: bytes, due: float, before: asyncio.Task[None]) -> None:
        await asyncio.sleep(max(0.0, due - self._loop.time()))
        await before
        with contextlib.suppress(OSError):
            writer.write(data)
            await writer.drain()


@contextlib.contextmanager
def slow_proxy(target: str, delay_seconds: float = 0.0) -> Iterator[SlowProxy]:
    """A proxy before the server at an address, in a thread, until the end of the block."""
    proxy = SlowProxy(target, delay_seconds)
    thread = threading.Thread(target=proxy.run, daemon=True)
    thread.start()
    proxy.wait()
    try:
        yield proxy
    finally:
        proxy.stop()
        thread.join(10)
