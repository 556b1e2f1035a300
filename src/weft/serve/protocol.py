"""HTTP as uvicorn speaks it, with a clock and a measure for the part of a request that comes before its body.

uvicorn waits for ever for a header that comes byte by byte, and keeps whatever comes.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADER_BYTES = 64 << 10


class GuardedProtocol(HttpToolsProtocol):
    """Closes a connection whose header is late or too long."""

    def __init__(self, config: Any, server_state: Any, app_state: dict[str, Any], _loop: Any = None) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.seconds = config.loaded_app.state.service.settings.read_timeout

    _clock: asyncio.TimerHandle | None = None
    _bytes = 0

    def connection_made(self, transport: Any) -> None:
        """A client is there; its first header is awaited."""
        super().connection_made(transport)
        self._await_header()

    def data_received(self, data: bytes) -> None:
        """Bytes; those of a header are counted."""
        if self._clock is None and (self.cycle is None or self.cycle.response_complete):
            self._await_header()
        if self._clock is not None:
            self._bytes += len(data)
        super().data_received(data)
        # what was fed may have ended a header and begun a body; if not, all of it was header
        if self._clock is not None and self._bytes > HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response("The header is too long.")

    def on_headers_complete(self) -> None:
        """A header has ended."""
        self._stop_clock()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has left."""
        self._stop_clock()
        super().connection_lost(exc)

    def _await_header(self) -> None:
        self._bytes = 0
        self._clock = self.loop.call_later(self.seconds, self._give_up)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
