"""Clients that keep their connections and judge what comes back; they ask when they are answered, or when they like."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field

CLIENTS = 64
IDLE = 20  # seconds; the service closes a connection after 30, maybe in the moment in which it is used again
SLACK = 1e-4  # of a probability


@dataclass
class Tally:
    """What came back."""

    codes: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)  # of good pictures that were answered
    wrong: int = 0
    unexpected: list[str] = field(default_factory=list)

    @property
    def answered(self) -> int:
        """Good pictures."""
        return len(self.seconds)

    def centile(self, percent: float) -> float:
        """Milliseconds."""
        ordered = sorted(self.seconds)
        return 1000 * ordered[min(int(len(ordered) * percent / 100), len(ordered) - 1)]


@dataclass(frozen=True)
class Body:
    """What a client sends, and what must come back: the offline answer, or codes."""

    data: bytes
    top: dict[str, float] | None = None
    codes: tuple[int, ...] = ()


class Client:
    """One connection, kept open."""

    def __init__(self, port: int, tally: Tally) -> None:
        self.port, self.tally = port, tally
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.used = 0.0

    async def ask(self, body: Body) -> None:
        """Sends, waits, and judges what comes."""
        begun = time.perf_counter()
        try:
            code, answer = await self._exchange(body.data)
        except (OSError, asyncio.IncompleteReadError, IndexError) as error:
            self.tally.unexpected.append(f"connection: {error!r}")
            self.streams = None
            return
        self.tally.codes[code] += 1
        if code in (429, 503):
            await asyncio.sleep(0.05)
        elif body.top is None:
            if code not in body.codes:
                self.tally.unexpected.append(f"{code} for {body.data[:20]!r}, not {body.codes}: {answer[:200]!r}")
        elif code != 200:
            self.tally.unexpected.append(f"{code} for a good picture: {answer[:200]!r}")
        else:
            self.tally.seconds.append(time.perf_counter() - begun)
            found = {item["class"]: item["probability"] for item in json.loads(answer)["answers"][0]["top"]}
            same = all(abs(found.get(name, 0) - share) <= SLACK for name, share in body.top.items())
            self.tally.wrong += not same

    async def _exchange(self, data: bytes) -> tuple[int, bytes]:
        if self.streams is None or time.perf_counter() - self.used > IDLE:
            self.close()
            self.streams = await asyncio.open_connection("127.0.0.1", self.port)
        self.used = time.perf_counter()
        reader, writer = self.streams
        head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        head_back = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = int(head_back.partition("content-length:")[2].split()[0])
        answer = await reader.readexactly(length)
        if "connection: close" in head_back:
            writer.close()
            self.streams = None
        return int(head_back.split()[1]), answer

    def close(self) -> None:
        """Leaves."""
        if self.streams is not None:
            self.streams[1].close()


async def closed_loop(port: int, bodies: list[Body], bad: list[Body], seconds: float) -> tuple[Tally, float]:
    """Clients that ask again as soon as they are answered; and answered good pictures per second."""
    tally, rng, end = Tally(), random.Random(1), time.perf_counter() + seconds

    async def one(number: int) -> None:
        client, place = Client(port, tally), number
        while time.perf_counter() < end:
            place += CLIENTS
            is_bad = bool(bad) and rng.random() < 0.1
            await client.ask(rng.choice(bad) if is_bad else bodies[place % len(bodies)])
        client.close()

    begun = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(CLIENTS)))
    return tally, len(tally.seconds) / (time.perf_counter() - begun)


async def open_loop(port: int, bodies: list[Body], rate: float, seconds: float, bad: list[Body] | None = None) -> Tally:
    """Requests at moments of their own, whatever the service does; where there are bad bodies, one of a hundred is."""
    tally, rng, tasks, free = Tally(), random.Random(2), set(), []
    end = time.perf_counter() + seconds

    async def one(body: Body) -> None:
        client = free.pop() if free else Client(port, tally)
        await client.ask(body)
        free.append(client)

    moment = time.perf_counter()
    while moment < end:
        await asyncio.sleep(max(moment - time.perf_counter(), 0))
        tasks.add(task := asyncio.create_task(one(rng.choice(bad if bad and rng.random() < 0.01 else bodies))))
        task.add_done_callback(tasks.discard)
        moment += rng.expovariate(rate)
    await asyncio.gather(*tasks)
    for client in free:
        client.close()
    return tally


async def overload(port: int, bodies: list[Body], rate: float) -> tuple[Tally, float, Tally]:
    """A minute of three times what can be answered; the slowest /live in ms; and ten seconds at half, 2 s later."""
    slowest, going = 0.0, True

    async def live() -> None:
        nonlocal slowest
        while going:
            begun = time.perf_counter()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()
            slowest = max(slowest, 1000 * (time.perf_counter() - begun))
            await asyncio.sleep(0.25)

    asking = asyncio.create_task(live())
    tally = await open_loop(port, bodies, 3 * rate, 60)
    going = False
    await asking
    await asyncio.sleep(2)
    return tally, slowest, await open_loop(port, bodies, rate / 2, 10)
