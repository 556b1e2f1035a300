"""uvicorn's HTTP protocol with limits on the size and duration of everything but the body.

uvicorn itself waits without a limit for a header that arrives byte by byte. It also stores all headers, all trailers
after a chunked body, and all requests that arrive before the first one is answered. The body is limited by
`weft.serve.guard.BodyReader`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from weft.serve.guard import RequestError, refuse_connection
from weft.serve.settings import CONNECTIONS

HEADER_BYTES = 64 << 10
OVERHEAD_PER_BODY_BYTE = 8  # a body in chunks of one byte has this many bytes around each
PIPELINED = 16  # requests of one connection that may wait for their responses


class GuardedProtocol(HttpToolsProtocol):
    """HTTP protocol that closes connections with a late header, excessive overhead, or unread responses."""

    _header_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _overhead = 0  # bytes since the start of the last request, without its body
    _header = 0  # bytes of the header of the last request
    _is_header = True  # the parser is in a header, not in a trailer

    def __init__(self, config: Any, server_state: Any, app_state: dict[str, Any], _loop: Any = None) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.seconds = config.loaded_app.state.service.settings.read_timeout

    def connection_made(self, transport: Any) -> None:
        """Start the timer of the first header; refuse a connection above the limit."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # unread bytes of a small response also start the timer
        if len(self.connections) > CONNECTIONS:
            self.app = refuse_connection  # type: ignore[assignment]
        self._start_header_timer()

    def data_received(self, data: bytes) -> None:
        """Parse bytes, and count those that are not part of a body."""
        if self._header_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._start_header_timer()
        self._overhead += len(data)
        super().data_received(data)
        if self._overhead > HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response("The header, the trailer or the chunk framing is too long.")

    def on_message_begin(self) -> None:
        """Note that a header begins."""
        self._is_header, self._header = True, 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a line of a header; ignore a line of a trailer."""
        if self._is_header:
            self._header += len(name) + len(value) + 4  # colon, space and line end
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop the timer of the header, and limit the number of pipelined requests."""
        if len(self.pipeline) >= PIPELINED:
            text = "Too many pipelined requests; wait for the responses."
            raise RequestError(400, "pipeline", text)  # an exception in a callback ends the connection
        if self._header > HEADER_BYTES:
            raise RequestError(400, "header", "The header is too long.")
        self._is_header = False
        self._overhead = 0
        self._header_timer = _cancelled(self._header_timer)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Subtract a part of a body, and the framing that it may have, from the overhead."""
        self._overhead = max(self._overhead - (1 + OVERHEAD_PER_BODY_BYTE) * len(body), 0)
        super().on_body(body)

    def pause_writing(self) -> None:
        """Start a timer when the client stops reading its response."""
        super().pause_writing()
        self._write_timer = self._write_timer or self.loop.call_later(self.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the timer when the client reads again."""
        super().resume_writing()
        self._write_timer = _cancelled(self._write_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        self._header_timer = _cancelled(self._header_timer)
        self._write_timer = _cancelled(self._write_timer)
        super().connection_lost(exc)

    def _start_header_timer(self) -> None:
        self._overhead = 0
        self._header_timer = self.loop.call_later(self.seconds, self._close_if_open)

    def _close_if_open(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    """Cancel a timer; return None, to assign to its attribute."""
    if timer is not None:
        timer.cancel()
