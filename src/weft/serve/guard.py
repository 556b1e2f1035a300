"""Middleware for every request: authentication, rate and size limits, response headers.

A page of another site can make a user's browser send requests to a service on the user's machine. Therefore the Host
header must be a known name of the service, an Origin header must be that of the service, and the response headers
forbid other sites to embed its pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import math
import sys
import time
import traceback
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from weft.serve.settings import HELD_BYTES, Settings

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

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
DISCARD_SECONDS = 2  # time to discard the rest of a body that is too long, so that the client reads the response
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


class Json(JSONResponse):
    """JSON that can hold names that are not valid Unicode, such as those of folders on Linux."""

    def render(self, content: Any) -> bytes:
        """Return the bytes of a value; a character that UTF-8 does not have becomes its escape in JSON."""
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace")


def error_response(error: RequestError, request_id: str) -> Json:
    """Return the response for an error, `{"error": {"code", "message", "request_id"}}`."""
    content = {"code": error.code, "message": error.message, "request_id": request_id}
    return Json({"error": content}, error.status, headers=error.headers)


async def refuse_connection(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
    """Answer every request with status 503; the ASGI application of connections above the limit."""
    headers = {**HEADERS, **RETRY_LATER, **CLOSE}
    error = RequestError(503, "busy", "Too many clients are connected; try again later.", headers)
    await error_response(error, uuid.uuid4().hex[:12])(scope, receive, send)


class TokenGuesses:
    """Rate limit on wrong tokens, for each client: `burst` at first, then one every `seconds`.

    A client is an IPv4 address or an IPv6 network of 64 bits. While a client is above the limit, it is refused before
    its token is checked, so that it does not learn whether a guess is right. Clients behind a proxy count as one,
    unless the service trusts the proxy (`Settings.proxies`).

    Args:
        burst: number of wrong tokens without a delay.
        seconds: time after which one more wrong token is allowed.
        clients: maximum number of clients to remember; the one whose last guess is oldest is dropped first.
    """

    def __init__(self, burst: int = 10, seconds: float = 6.0, clients: int = 10_000) -> None:
        self.burst, self.seconds, self.clients = burst, seconds, clients
        self._full_at: OrderedDict[str, float] = OrderedDict()  # time at which a client has its full burst again

    def wait(self, client: str) -> float:
        """Return the number of seconds until the client may send another token; 0 if it may now."""
        debt = self._full_at.get(client, 0.0) - time.monotonic()
        return max(debt - (self.burst - 1) * self.seconds, 0.0)

    def count(self, client: str) -> None:
        """Count a wrong token."""
        self._full_at[client] = max(self._full_at.get(client, 0.0), time.monotonic()) + self.seconds
        self._full_at.move_to_end(client)
        while len(self._full_at) > self.clients:
            self._full_at.popitem(last=False)


class Guard:
    """ASGI middleware that checks a request, calls the application, and sends an error response if it fails.

    Args:
        app: the ASGI application.
        settings: of the service.
        on_response: called after every response with the method, path, status, seconds and ID of the request.
    """

    def __init__(self, app: Any, settings: Settings, on_response: Callable[[str, str, int, float, str], None]) -> None:
        self.app, self.settings, self.on_response = app, settings, on_response
        self.guesses = TokenGuesses()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id, begun, status = uuid.uuid4().hex[:12], time.perf_counter(), 0
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                more = {**HEADERS, "x-request-id": request_id}
                message["headers"] = [
                    *message.get("headers", []),
                    *((name.encode(), value.encode()) for name, value in more.items()),
                ]
            await send(message)

        try:
            self._check(Request(scope))
            # HEAD is GET without the body, which the server leaves out
            routed = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self.app(routed, receive, send_with_headers)
        except RequestError as error:
            await error_response(error, request_id)(scope, receive, send_with_headers)
        except ClientDisconnect:
            status = status or 499  # for the log and the metrics; the client has closed the connection
        except Exception:
            print(f"weft: request {request_id} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            if status == 0:
                text = "The service failed; its log has the reason under this request_id."
                error = RequestError(500, "internal", text)
                await error_response(error, request_id)(scope, receive, send_with_headers)
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
        if self.settings.token is not None and not _is_public(request.scope["path"]):
            self._check_token(request, self.settings.token)

    def _check_token(self, request: Request, token: str) -> None:
        client = _client_of(request.client.host if request.client else "")
        if (seconds := self.guesses.wait(client)) > 0:
            headers = {"retry-after": str(math.ceil(seconds))}
            text = "This client has sent too many wrong tokens; try again later."
            raise RequestError(429, "token-guesses", text, headers)
        given = request.headers.get("authorization")
        if given is not None and hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            return
        if given is not None:
            self.guesses.count(client)
        raise RequestError(
            401,
            "token",
            "This service requires a token; send the header 'Authorization: Bearer TOKEN'.",
            {"www-authenticate": "Bearer"},
        )


def _is_public(path: str) -> bool:
    return path in PUBLIC_PATHS or path.startswith("/page/")


def _client_of(address: str) -> str:
    """Return the network that identifies a client: an IPv4 address, or 64 bits of IPv6, as one household has."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:  # a Unix socket
        return address
    return str(ipaddress.ip_network((ip, 64 if ip.version == 6 else 32), strict=False))


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
            try:
                async with asyncio.timeout(self.settings.read_timeout):
                    await self._receive(request, parts)
            except TimeoutError:
                text = f"The request must be received within {self.settings.read_timeout:g} seconds; it was not."
                raise RequestError(408, "too-slow", text, CLOSE) from None
            yield parts
        finally:
            self.held -= len(parts)

    async def _receive(self, request: Request, parts: bytearray) -> None:
        declared = request.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > self.settings.max_bytes:
            await discard_body(request)
            raise self._too_large()
        async for chunk in request.stream():
            self.held += len(chunk)
            parts += chunk
            is_too_large = len(parts) > self.settings.max_bytes
            if is_too_large or self.held > max(HELD_BYTES, self.settings.max_bytes):
                self.held -= len(parts)  # before the rest is awaited: other requests need the memory
                parts.clear()
                await _discard_rest(request)
                if is_too_large:
                    raise self._too_large()
                text = "The service is receiving too much data at the moment; try again later."
                raise RequestError(503, "busy", text, RETRY_LATER | CLOSE)

    def _too_large(self) -> RequestError:
        text = (
            f"A request must have at most {self.settings.max_bytes:,} bytes; this one has more. Send fewer or smaller"
            " images."
        )
        return RequestError(413, "too-large", text, CLOSE)


async def discard_body(request: Request) -> None:
    """Receive and discard a body before a response that closes the connection, unless the client waits to send it."""
    if request.headers.get("expect", "").lower() != "100-continue":
        await _discard_rest(request)


async def _discard_rest(request: Request) -> None:
    """Receive and discard the rest of a body for DISCARD_SECONDS.

    If the connection is closed while the client still sends, the client does not receive the response.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_SECONDS):
            while (message := await request.receive())["type"] == "http.request" and message.get("more_body"):
                pass
