"""uvicorn's HTTP protocol with limits on the size and duration of everything but the body.

uvicorn waits for ever for a header that comes byte by byte, and keeps whatever comes: headers, trailers after a chunked
body, requests that are sent before the first is answered. The body itself is bounded by `weft.serve.guard.Intake`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from weft.serve.guard import Refusal, busy
from weft.serve.settings import CONNECTIONS

HEADER_BYTES = 64 << 10
BYTES_PER_BODY_BYTE = 8  # a body that comes in chunks of one byte has this much around each
PIPELINED = 16  # requests that one connection may have waiting


class GuardedProtocol(HttpToolsProtocol):
    """Closes a connection whose header is late, whose overhead is too long, or that reads no answers."""

    _header_clock: asyncio.TimerHandle | None = None
    _write_clock: asyncio.TimerHandle | None = None
    _overhead = 0  # bytes since the last request began, those of bodies aside
    _is_header = True  # what is parsed belongs to a header, not to a trailer

    def __init__(self, config: Any, server_state: Any, app_state: dict[str, Any], _loop: Any = None) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.seconds = config.loaded_app.state.service.settings.read_timeout

    def connection_made(self, transport: Any) -> None:
        """A client is there; its first header is awaited."""
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS:
            self.app = busy  # type: ignore[assignment]
        self._await_header()

    def data_received(self, data: bytes) -> None:
        """Bytes; those that are no body are counted."""
        if self._header_clock is None and (self.cycle is None or self.cycle.response_complete):
            self._await_header()
        self._overhead += len(data)
        super().data_received(data)
        if self._overhead > HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response("The header, the trailer or what surrounds the chunks is too long.")

    def on_message_begin(self) -> None:
        """A request begins."""
        self._is_header = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A line of a header is kept, one of a trailer is not."""
        if self._is_header:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A header has ended."""
        if len(self.pipeline) >= PIPELINED:
            raise Refusal(400, "pipeline", "Too many requests wait for their answers.")  # ends the connection
        self._is_header = False
        self._overhead = 0
        self._header_clock = _stopped(self._header_clock)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of a body."""
        self._overhead = max(self._overhead - (1 + BYTES_PER_BODY_BYTE) * len(body), 0)
        super().on_body(body)

    def pause_writing(self) -> None:
        """The client does not read its answer."""
        super().pause_writing()
        self._write_clock = self._write_clock or self.loop.call_later(self.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """It reads again."""
        super().resume_writing()
        self._write_clock = _stopped(self._write_clock)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has left."""
        self._header_clock = _stopped(self._header_clock)
        self._write_clock = _stopped(self._write_clock)
        super().connection_lost(exc)

    def _await_header(self) -> None:
        self._overhead = 0
        self._header_clock = self.loop.call_later(self.seconds, self._give_up)

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


def _stopped(clock: asyncio.TimerHandle | None) -> None:
    if clock is not None:
        clock.cancel()
