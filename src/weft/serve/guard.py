"""Middleware for every request: authentication, size limits, response headers.

A page of another site can make a user's browser send requests to a service on the user's machine. Therefore the Host
header must be a known name of the service, an Origin header must be that of the service, and the response headers
forbid other sites to embed its pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import sys
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.serve.settings import HELD_BYTES, Settings

HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' blob:; object-src 'none'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(self), microphone=(), geolocation=()",
}
RETRY_LATER, CLOSE = {"retry-after": "1"}, {"connection": "close"}
LINGER_SECONDS = 2  # between a response that closes the connection and its end, for a client that still sends
PUBLIC_PATHS = ("/", "/live", "/ready", "/health")  # need no token; neither do the files of the page


class RequestError(Exception):
    """A request that is answered with an error response.

    Attributes:
        status: HTTP status code.
        code: stable identifier of the error, for programs.
        message: description of the error, for people.
        headers: additional headers of the response.
    """

    def __init__(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.headers = status, code, message, headers or {}


class Guard:
    """ASGI middleware that checks a request, calls the application, and sends an error response if it fails.

    Args:
        app: the ASGI application.
        settings: of the service.
        on_response: called after every response with the method, path, status, seconds and ID of the request.
    """

    def __init__(
        self, app: ASGIApp, settings: Settings, on_response: Callable[[str, str, int, float, str], None]
    ) -> None:
        self.app, self.settings, self.on_response = app, settings, on_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id, begun, status, is_last = uuid.uuid4().hex[:12], time.perf_counter(), 0, False

        async def send_with_headers(message: Message) -> None:
            nonlocal status, is_last
            if message["type"] == "http.response.start":
                status = message["status"]
                more = {**HEADERS, "x-request-id": request_id}
                headers = [*message["headers"], *((name.encode(), value.encode()) for name, value in more.items())]
                is_last = (b"connection", b"close") in headers
                message = {**message, "headers": headers}
            elif is_last:
                await send({**message, "more_body": True})
                await _discard(receive)
                message = {"type": "http.response.body"}
            await send(message)

        async def refuse(error: RequestError) -> None:
            content = {"error": {"code": error.code, "message": error.message, "request_id": request_id}}
            await JSONResponse(content, error.status, headers=error.headers)(scope, receive, send_with_headers)

        try:
            self._check(Request(scope))
            # HEAD is GET without the body, which the server leaves out
            routed = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self.app(routed, receive, send_with_headers)
        except RequestError as error:
            await refuse(error)
        except ClientDisconnect:
            status = status or 499  # for the log and the metrics; the client has closed the connection
        except Exception:
            print(f"weft: request {request_id} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            if status == 0:
                text = "The service failed; its log has the reason under this request_id."
                await refuse(RequestError(500, "internal", text))
        finally:
            self.on_response(scope["method"], scope["path"], status, time.perf_counter() - begun, request_id)

    def _check(self, request: Request) -> None:
        hosts = request.headers.getlist("host")
        name = _host_name(hosts[0]) if len(hosts) == 1 else None
        if name is None or not self.settings.accepts_host(name):
            raise RequestError(
                421,
                "unknown-host",
                "The Host header must be a host name of this service. Start the service with --name NAME to add one.",
            )
        origins = request.headers.getlist("origin")
        is_foreign = any(_origin_host(origin) != hosts[0].lower() for origin in origins)
        is_page = request.method in ("GET", "HEAD")
        if is_foreign or (not is_page and request.headers.get("sec-fetch-site") in ("cross-site", "same-site")):
            raise RequestError(403, "foreign-origin", "Pages of other sites must not send requests to this service.")
        path, token, given = request.scope["path"], self.settings.token, request.headers.get("authorization", "")
        is_public = token is None or path in PUBLIC_PATHS or path.startswith("/page/")
        if not (is_public or hmac.compare_digest(given.encode(), f"Bearer {token}".encode())):
            raise RequestError(
                401,
                "token",
                "This service requires a token; send the header 'Authorization: Bearer TOKEN'.",
                {"www-authenticate": "Bearer"},
            )


def _host_name(host: str) -> str | None:
    """Return the name in a Host header without the port, or None if the header is not valid."""
    try:
        parts = urlsplit(f"//{host}")
        is_bare = not (parts.path or parts.query or parts.fragment or parts.username is not None)
        _ = parts.port  # raises a ValueError if it is not a number
    except ValueError:
        return None
    return parts.hostname if is_bare else None


def _origin_host(origin: str) -> str | None:
    """Return the host and port of an Origin header, or None if the header is not a valid URL."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


class BodyReader:
    """Reads request bodies with limits on their length, their duration and the memory of all bodies together.

    Args:
        settings: of the service.

    Attributes:
        held: number of bytes of all bodies that are being received or decoded.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.held = 0

    @contextlib.asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytearray]:
        """Yield the body of a request; it counts as held until the block ends.

        Raises:
            RequestError: the body is compressed, too long or too slow, or all bodies together are too large.
            ClientDisconnect: the client has closed the connection.
        """
        if request.headers.get("content-encoding", "identity") != "identity":
            raise RequestError(415, "packed", "The body must not be compressed; send it without Content-Encoding.")
        parts = bytearray()
        try:
            if (error := await self._receive(request, parts)) is not None:
                self.held -= len(parts)
                parts.clear()  # before the response: other requests need the memory
                raise error
            yield parts
        finally:
            self.held -= len(parts)

    async def _receive(self, request: Request, parts: bytearray) -> RequestError | None:
        """Receive a body; return the error if it is too long or too slow, or if all bodies together are too large."""
        settings, declared = self.settings, request.headers.get("content-length", "0")
        is_too_large = declared.isdecimal() and int(declared) > settings.max_bytes
        try:
            async with asyncio.timeout(settings.read_timeout):
                chunks = request.stream()
                while not is_too_large and (chunk := await anext(chunks, None)) is not None:
                    self.held += len(chunk)
                    parts += chunk
                    is_too_large = len(parts) > settings.max_bytes
                    if not is_too_large and self.held > max(HELD_BYTES, settings.max_bytes):
                        text = "The service is receiving too much data at the moment; try again later."
                        return RequestError(503, "busy", text, RETRY_LATER | CLOSE)
        except TimeoutError:
            text = f"The request must be received within {settings.read_timeout:g} seconds; it was not."
            return RequestError(408, "too-slow", text, CLOSE)
        if is_too_large:
            text = f"A request must have at most {settings.max_bytes:,} bytes; this one has more. Send fewer or smaller"
            return RequestError(413, "too-large", f"{text} images.", CLOSE)
        return None


async def _discard(receive: Receive) -> None:
    """Receive and discard the rest of a body, but not longer than LINGER_SECONDS.

    If the connection is closed while the client still sends, the client may not receive the response.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while (message := await receive())["type"] == "http.request" and message.get("more_body"):
                pass
