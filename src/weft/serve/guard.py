"""Middleware for every request: authentication, rate and size limits, response headers.

A page of another site can make a person's browser send requests to a service on the same machine. So the Host header
must be a name that the service goes by, an Origin header must be its own, and browsers are told to lend its pages to
nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
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
AGAIN, CLOSE = {"retry-after": "1"}, {"connection": "close"}
LATER = 2  # seconds for which the rest of a body that is too long is thrown away, so that the client reads why
OPEN_PATHS = ("/", "/live", "/ready", "/health")  # need no token; nor do the page's files


class Refusal(Exception):
    """A request that gets an error for an answer.

    Attributes:
        status: of HTTP.
        code: a word for programs.
        message: a sentence for people.
        headers: of the answer.
    """

    def __init__(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.headers = status, code, message, headers or {}


def refused(refusal: Refusal, request_id: str) -> JSONResponse:
    """The answer: `{"error": {"code", "message", "request_id"}}`."""
    error = {"code": refusal.code, "message": refusal.message, "request_id": request_id}
    return JSONResponse({"error": error}, refusal.status, headers=refusal.headers)


async def busy(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
    """ASGI: what a connection gets that is one too many."""
    refusal = Refusal(503, "busy", "Too many clients are connected; try again.", {**HEADERS, **AGAIN, **CLOSE})
    await refused(refusal, uuid.uuid4().hex[:12])(scope, receive, send)


class Guesses:
    """How often each client may send a wrong token: `burst` times, then once in `seconds`.

    A client is an IPv4 address or an IPv6 network of 64 bits. While it may not guess, it does not learn whether a guess
    is right. Clients behind a proxy count as one, unless the service knows the proxy (`Settings.proxies`).
    """

    def __init__(self, burst: int = 10, seconds: float = 6.0, clients: int = 10_000) -> None:
        self.burst, self.seconds, self.clients = burst, seconds, clients
        self._full_at: OrderedDict[str, float] = OrderedDict()  # when a client will have all its guesses back

    def wait(self, client: str) -> float:
        """Seconds until the client may guess again; 0 for now."""
        owed = self._full_at.get(client, 0.0) - time.monotonic()
        return max(owed - (self.burst - 1) * self.seconds, 0.0)

    def count(self, client: str) -> None:
        """A wrong guess."""
        self._full_at[client] = max(self._full_at.get(client, 0.0), time.monotonic()) + self.seconds
        self._full_at.move_to_end(client)
        while len(self._full_at) > self.clients:
            self._full_at.popitem(last=False)


class Guard:
    """ASGI: checks a request, hands it on, and sees that an answer comes out whatever happens.

    Args:
        app: what answers.
        settings: of the service.
        on_answer: told of every answer: method, path, status, seconds, and the request's id.
    """

    def __init__(self, app: Any, settings: Settings, on_answer: Callable[[str, str, int, float, str], None]) -> None:
        self.app, self.settings, self.on_answer = app, settings, on_answer
        self.guesses = Guesses()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id, begun, status = uuid.uuid4().hex[:12], time.perf_counter(), 0
        scope.setdefault("state", {})["request_id"] = request_id

        async def carry(message: Message) -> None:
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
            await self.app(scope, receive, carry)
        except Refusal as refusal:
            await refused(refusal, request_id)(scope, receive, carry)
        except ClientDisconnect:
            status = status or 499  # nobody is there to be answered
        except Exception:
            print(f"weft: request {request_id} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            if status == 0:
                fault = Refusal(500, "internal", "The service failed; its log has the reason under this request_id.")
                await refused(fault, request_id)(scope, receive, carry)
        finally:
            self.on_answer(scope["method"], scope["path"], status, time.perf_counter() - begun, request_id)

    def _check(self, request: Request) -> None:
        hosts = request.headers.getlist("host")
        name = _host_name(hosts[0]) if len(hosts) == 1 else None
        if name is None or not self.settings.answers_to(name):
            raise Refusal(
                421,
                "unknown-host",
                "The Host header must be a name that this service goes by. Start it with --name NAME to add one.",
            )
        origins = request.headers.getlist("origin")
        is_foreign = any(_origin_host(origin) != hosts[0].lower() for origin in origins)
        is_page = request.method in ("GET", "HEAD")
        if is_foreign or (not is_page and request.headers.get("sec-fetch-site") in ("cross-site", "same-site")):
            raise Refusal(403, "foreign-origin", "Pages of other sites may not use this service.")
        if self.settings.token is not None and not _is_open(request.scope["path"]):
            self._check_token(request, self.settings.token)

    def _check_token(self, request: Request, token: str) -> None:
        client = _network(request.client.host if request.client else "")
        if (seconds := self.guesses.wait(client)) > 0:
            later = {"retry-after": str(math.ceil(seconds))}
            raise Refusal(429, "token-guesses", "Too many wrong tokens came from this client; try again later.", later)
        given = request.headers.get("authorization")
        if given is not None and hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            return
        if given is not None:
            self.guesses.count(client)
        raise Refusal(
            401,
            "token",
            "This service asks for a token: send 'Authorization: Bearer TOKEN'.",
            {"www-authenticate": "Bearer"},
        )


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith("/page/")


def _network(address: str) -> str:
    """The client that an address belongs to: a household has 64 bits of IPv6."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:  # a socket of this machine
        return address
    return str(ipaddress.ip_network((ip, 64 if ip.version == 6 else 32), strict=False))


def _host_name(host: str) -> str | None:
    """The name in a Host header, without its port; None for what is no host."""
    try:
        parts = urlsplit(f"//{host}")
        is_bare = not (parts.path or parts.query or parts.fragment or parts.username is not None)
        _ = parts.port  # not a number: ValueError
    except ValueError:
        return None
    return parts.hostname if is_bare else None


def _origin_host(origin: str) -> str | None:
    """The host and port of an Origin header; None for what is no address of a page."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


class Intake:
    """Receives bodies: counted while they come, against a clock, and never more at once than memory allows.

    Attributes:
        held: bytes that are being received or decoded.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.held = 0

    @contextlib.asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytearray]:
        """The body of a request, to be used inside.

        Raises:
            Refusal: it is too long, too slow, packed, or too many come at once.
            ClientDisconnect: the client has left.
        """
        if request.headers.get("content-encoding", "identity") != "identity":
            raise Refusal(415, "packed", "Send the body as it is, without Content-Encoding.")
        parts = bytearray()
        try:
            try:
                async with asyncio.timeout(self.settings.read_timeout):
                    await self._receive(request, parts)
            except TimeoutError:
                seconds = self.settings.read_timeout
                text = f"A request must have come within {seconds:g} seconds."
                raise Refusal(408, "too-slow", text, CLOSE) from None
            yield parts
        finally:
            self.held -= len(parts)

    async def _receive(self, request: Request, parts: bytearray) -> None:
        declared = request.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > self.settings.max_bytes:
            raise await self._too_large(request)
        async for chunk in request.stream():
            self.held += len(chunk)
            parts += chunk
            if len(parts) > self.settings.max_bytes:
                raise await self._too_large(request)
            if self.held > max(HELD_BYTES, self.settings.max_bytes):
                raise Refusal(503, "busy", "Too much is being received at once; try again.", AGAIN | CLOSE)

    async def _too_large(self, request: Request) -> Refusal:
        await _thrown_away(request)
        most = self.settings.max_bytes
        text = f"A request may have {most:,} bytes; this has more. Send fewer or smaller pictures."
        return Refusal(413, "too-large", text, CLOSE)


async def _thrown_away(request: Request) -> None:
    """Receives what is left, for a while: a connection that is closed before takes its answer with it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LATER):
            while (message := await request.receive())["type"] == "http.request" and message.get("more_body"):
                pass
