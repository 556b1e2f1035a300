"""Bodies of requests: their memory is bounded, and who is refused hears why; faults of weft are answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import traceback
from typing import Any

import pytest
from starlette.requests import Request

from weft.serve import guard
from weft.serve.guard import BodyReader, Guard, RequestError
from weft.serve.settings import Settings

SMALL = Settings(run="x", max_bytes=1000)


class Sender:
    """A client that sends a body of `size` bytes in two parts; counts the parts that were received."""

    def __init__(self, size: int, **headers: str) -> None:
        self.parts, self.received = [bytes(size // 2), bytes(size - size // 2)], 0
        pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        self.scope = {"type": "http", "method": "POST", "path": "/predict", "headers": pairs}
        self.request = Request(self.scope, self.receive)

    async def receive(self) -> dict[str, Any]:
        self.received += 1
        return {"type": "http.request", "body": self.parts.pop(0), "more_body": bool(self.parts)}


async def entered(reader: BodyReader, sender: Sender) -> None:
    async with reader.body(sender.request):
        pass


def test_a_refused_body_frees_its_memory_before_the_rest_is_read() -> None:
    reader, sender = BodyReader(SMALL), Sender(4000)
    with pytest.raises(RequestError, match="at most 1,000 bytes") as caught:
        asyncio.run(entered(reader, sender))
    assert (sender.received, reader.held) == (1, 0)
    parts = [frame.f_locals["parts"] for frame, _ in traceback.walk_tb(caught.tb) if "parts" in frame.f_locals]
    assert parts
    assert not any(parts)


def test_bodies_share_their_memory_and_the_last_one_too_many_is_told_to_come_again(monkeypatch):
    """Together, bodies may take more than one alone."""
    monkeypatch.setattr(guard, "HELD_BYTES", 2400)
    reader = BodyReader(SMALL)

    async def go() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(2):
                assert len(await stack.enter_async_context(reader.body(Sender(1000).request))) == 1000
            late = Sender(1000)
            with pytest.raises(RequestError) as caught:
                await entered(reader, late)
            assert (caught.value.status, caught.value.headers["retry-after"]) == (503, "1")
            assert (late.received, reader.held) == (1, 2000)
        async with reader.body(Sender(1000).request):
            assert reader.held == 1000

    asyncio.run(go())


def test_a_byte_now_and_then_does_not_extend_the_time_for_a_body() -> None:
    reader = BodyReader(SMALL)

    async def go() -> None:
        loop, now = asyncio.get_running_loop(), 0.0
        loop.time = lambda: now

        async def receive() -> dict[str, Any]:
            nonlocal now
            now += 4
            await asyncio.sleep(0)
            return {"type": "http.request", "body": b"x", "more_body": True}

        with pytest.raises(RequestError) as caught:
            async with reader.body(Request({"type": "http", "headers": []}, receive)):
                pass
        assert (caught.value.status, caught.value.code) == (408, "too-slow")
        assert (now, reader.held) == (pytest.approx(12, abs=4), 0)

    asyncio.run(go())


def test_a_body_that_is_refused_by_its_length_is_received_after_the_response() -> None:
    """A client that has not sent all of it would see a broken connection instead of the reason."""
    reader, sender, order = BodyReader(SMALL), Sender(4000, host="localhost", content_length="4000"), []

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        async with reader.body(Request(scope, receive)):
            pass

    async def receive() -> dict[str, Any]:
        order.append("received")
        return await sender.receive()

    async def send(message: dict[str, Any]) -> None:
        order.append((message["type"], message.get("status"), len(message.get("body", b"")) > 0))

    asyncio.run(Guard(refuse, SMALL, lambda *_: None)(sender.scope, receive, send))
    start, body, end = ("http.response.start", 413, False), ("http.response.body", None, True), ("http.response.body",)
    assert order == [start, body, "received", "received", (*end, None, False)]
    assert reader.held == 0


def test_a_fault_of_weft_is_answered_and_logged(capsys: pytest.CaptureFixture[str]) -> None:
    sent, responses = list[dict[str, Any]](), list[tuple[Any, ...]]()

    async def app(*_: object) -> None:
        raise RuntimeError("nobody expected this")

    async def send(message: Any) -> None:
        sent.append(message)

    sender = Sender(0, host="localhost")
    asyncio.run(Guard(app, SMALL, lambda *response: responses.append(response))(sender.scope, sender.receive, send))
    assert sent[0]["status"] == 500
    assert json.loads(sent[1]["body"])["error"]["code"] == "internal"
    assert responses[0][:3] == ("POST", "/predict", 500)
    assert "RuntimeError: nobody expected this" in capsys.readouterr().err
