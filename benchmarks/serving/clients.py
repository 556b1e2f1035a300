"""Clients with keep-alive connections that check every response, in a closed loop or at random times (open loop)."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field

CLIENTS = 64
MAX_IDLE = 20  # seconds before a client reconnects; the service closes an idle connection after 30
TOLERANCE = 1e-4  # of a probability


@dataclass
class Tally:
    """Responses of a load test.

    Attributes:
        codes: number of responses by status code.
        seconds: latency of every prediction for a valid image.
        wrong: number of predictions that differ from the expected ones.
        unexpected: connection errors, and status codes that are not allowed for a body.
    """

    codes: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    wrong: int = 0
    unexpected: list[str] = field(default_factory=list)

    @property
    def predictions(self) -> int:
        """Number of predictions for valid images."""
        return len(self.seconds)

    def percentile(self, percent: float) -> float:
        """Return a percentile of the latency in milliseconds."""
        ordered = sorted(self.seconds)
        return 1000 * ordered[min(int(len(ordered) * percent / 100), len(ordered) - 1)]


@dataclass(frozen=True)
class Body:
    """Body of a request, and the expected response.

    Attributes:
        data: bytes of the body.
        top: expected probabilities by class; None for a broken or hostile body.
        codes: allowed status codes of a broken or hostile body.
    """

    data: bytes
    top: dict[str, float] | None = None
    codes: tuple[int, ...] = ()


class Client:
    """A client with a keep-alive connection."""

    def __init__(self, port: int, tally: Tally) -> None:
        self.port, self.tally = port, tally
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.used = 0.0

    async def send(self, body: Body) -> None:
        """Send a request, and record and check the response."""
        begun = time.perf_counter()
        try:
            code, content = await self._exchange(body.data)
        except (OSError, asyncio.IncompleteReadError, IndexError) as error:
            self.tally.unexpected.append(f"connection: {error!r}")
            self.streams = None
            return
        self.tally.codes[code] += 1
        if code in (429, 503):
            await asyncio.sleep(0.05)
        elif body.top is None:
            if code not in body.codes:
                self.tally.unexpected.append(f"{code} for {body.data[:20]!r}, not {body.codes}: {content[:200]!r}")
        elif code != 200:
            self.tally.unexpected.append(f"{code} for a valid image: {content[:200]!r}")
        else:
            self.tally.seconds.append(time.perf_counter() - begun)
            top = {item["class"]: item["probability"] for item in json.loads(content)["answers"][0]["top"]}
            is_same = all(abs(top.get(name, 0) - value) <= TOLERANCE for name, value in body.top.items())
            self.tally.wrong += not is_same

    async def _exchange(self, data: bytes) -> tuple[int, bytes]:
        if self.streams is None or time.perf_counter() - self.used > MAX_IDLE:
            self.close()
            self.streams = await asyncio.open_connection("127.0.0.1", self.port)
        self.used = time.perf_counter()
        reader, writer = self.streams
        head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        response_head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = int(response_head.partition("content-length:")[2].split()[0])
        content = await reader.readexactly(length)
        if "connection: close" in response_head:
            writer.close()
            self.streams = None
        return int(response_head.split()[1]), content

    def close(self) -> None:
        """Close the connection."""
        if self.streams is not None:
            self.streams[1].close()


async def closed_loop(port: int, bodies: list[Body], bad: list[Body], seconds: float) -> tuple[Tally, float]:
    """Run clients that send their next request after each response, a tenth of them from `bad`.

    Returns:
        The responses, and the throughput in predictions for valid images per second.
    """
    tally, rng, end = Tally(), random.Random(1), time.perf_counter() + seconds

    async def one(number: int) -> None:
        client, index = Client(port, tally), number
        while time.perf_counter() < end:
            index += CLIENTS
            is_bad = bool(bad) and rng.random() < 0.1
            await client.send(rng.choice(bad) if is_bad else bodies[index % len(bodies)])
        client.close()

    begun = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(CLIENTS)))
    return tally, len(tally.seconds) / (time.perf_counter() - begun)


async def open_loop(port: int, bodies: list[Body], rate: float, seconds: float, bad: list[Body] | None = None) -> Tally:
    """Send requests at random times (a Poisson process), independent of the responses; one of a hundred from `bad`.

    Args:
        port: of the service.
        bodies: valid images.
        rate: requests per second on average.
        seconds: duration.
        bad: broken and hostile bodies; None to send valid images only.
    """
    tally, rng, tasks, idle = Tally(), random.Random(2), set(), []
    end = time.perf_counter() + seconds

    async def one(body: Body) -> None:
        client = idle.pop() if idle else Client(port, tally)
        await client.send(body)
        idle.append(client)

    next_time = time.perf_counter()
    while next_time < end:
        await asyncio.sleep(max(next_time - time.perf_counter(), 0))
        tasks.add(task := asyncio.create_task(one(rng.choice(bad if bad and rng.random() < 0.01 else bodies))))
        task.add_done_callback(tasks.discard)
        next_time += rng.expovariate(rate)
    await asyncio.gather(*tasks)
    for client in idle:
        client.close()
    return tally


async def overload(port: int, bodies: list[Body], rate: float) -> tuple[Tally, float, Tally]:
    """Send requests at three times a rate for a minute; two seconds later, send them at half of it for ten seconds.

    Returns:
        The responses of the overload, the largest latency of /live during it in ms, and the later responses.
    """
    slowest, is_overloaded = 0.0, True

    async def live() -> None:
        nonlocal slowest
        while is_overloaded:
            begun = time.perf_counter()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()
            slowest = max(slowest, 1000 * (time.perf_counter() - begun))
            await asyncio.sleep(0.25)

    live_requests = asyncio.create_task(live())
    tally = await open_loop(port, bodies, 3 * rate, 60)
    is_overloaded = False
    await live_requests
    await asyncio.sleep(2)
    return tally, slowest, await open_loop(port, bodies, rate / 2, 10)
