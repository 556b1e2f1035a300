"""Settings of the service. No torch: the command line imports this module."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass

from weft.errors import UsageError

RUNTIMES = ("auto", "torch", "openvino", "onnx")
TOKEN = "WEFT_TOKEN"  # the environment variable that holds it
CONNECTIONS, CONNECTION_BYTES = 1000, 512 << 10  # of one process: what each may have sent unread, and its buffers
HELD_BYTES = 256 << 20  # of all bodies that are being received or decoded; of forms there is a second copy
DECODER_BYTES, DECODER_BYTES_PER_PIXEL = 64 << 20, 32  # 22 were the most of 400 kinds of files, a WebP with alpha
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Settings:
    """A service.

    Attributes:
        run: a run directory, a model directory or an export.
        host: address to listen on; a name or an IP address.
        port: 0 for any free one.
        runtime: what answers: one of RUNTIMES; `auto`: the quickest export beside the model, else torch.
        device: `auto`, `cpu` or `cuda`, for torch.
        precision: `fp32` or `bf16`, for torch.
        threads: to compute with, per process; None for all cores, shared among the processes.
        workers: processes, each with a model of its own.
        max_batch: pictures in one forward pass.
        max_wait_ms: how long the first picture waits for company.
        max_queue: pictures that may wait; more are refused with 429.
        max_bytes: of the body of one request.
        max_pixels: of one picture (height x width), judged by its header.
        max_images: in one request.
        decoders: processes that turn uploads into pixels, for each of `workers`; None for one per core, at most 4.
        decode_timeout: seconds after which an image's decoder is killed, and the image refused.
        read_timeout: seconds in which a request must have come.
        timeout: seconds in which it is answered.
        drain: seconds for which a stopping service still listens, unready, so that a balancer notices.
        grace: seconds after which what is still running is given up.
        names: more names under which the service may be asked for, as in the Host header.
        proxies: addresses of the proxies in front, whose header X-Forwarded-For is believed.
        token: what a client must send as `Authorization: Bearer TOKEN`; None for nothing on this machine, and for a
            token made up at the start where other machines reach it.
        is_open: no token is asked for, wherever a client is.
        log: a line on stderr for every answer.
    """

    run: str
    host: str = "127.0.0.1"
    port: int = 8000
    runtime: str = "auto"
    device: str = "auto"
    precision: str = "fp32"
    threads: int | None = None
    workers: int = 1
    max_batch: int = 32
    max_wait_ms: float = 5.0
    max_queue: int = 128
    max_bytes: int = 10 << 20
    max_pixels: int = 25_000_000
    max_images: int = 16
    decoders: int | None = None
    decode_timeout: float = 10.0
    read_timeout: float = 10.0
    timeout: float = 30.0
    drain: float = 1.0
    grace: float = 20.0
    names: tuple[str, ...] = ()
    proxies: tuple[str, ...] = ()
    token: str | None = None
    is_open: bool = False
    log: bool = False

    def __post_init__(self) -> None:
        """Raises a UsageError for what does not fit."""
        if self.runtime not in RUNTIMES:
            raise UsageError(f"runtime must be one of {', '.join(RUNTIMES)}; got {self.runtime!r}.")
        if not 0 <= self.port <= 65535:
            raise UsageError(f"port must be from 0 to 65535; got {self.port}.")
        for name in ("workers", "max_batch", "max_queue", "max_bytes", "max_pixels", "max_images"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1; got {getattr(self, name)}.")
        if self.decoders is not None and self.decoders < 1:
            raise UsageError(f"decoders must be at least 1; got {self.decoders}.")
        for name in ("read_timeout", "timeout", "grace", "decode_timeout"):
            if not 0 < getattr(self, name) <= 3600:
                raise UsageError(f"{name} is in seconds, above 0 and at most 3600; got {getattr(self, name)}.")
        if not 0 <= self.drain <= 600:
            raise UsageError(f"drain is in seconds, 0 to 600; got {self.drain}.")
        if not 0 <= self.max_wait_ms <= 1000:
            raise UsageError(f"max_wait_ms is in milliseconds, 0 to 1000; got {self.max_wait_ms}.")
        if self.is_open and self.token is not None:
            raise UsageError("Either a token is asked for or none; got both WEFT_TOKEN and no token. Leave one out.")
        if self.max_queue < self.max_images:
            raise UsageError(
                f"max_queue must hold the pictures of one request, max_images={self.max_images}; got {self.max_queue}."
            )

    @property
    def decoder_count(self) -> int:
        """Decoders of each worker."""
        return self.decoders or min(max((os.cpu_count() or 1) // self.workers, 1), 4)

    @property
    def decoder_memory(self) -> int:
        """Bytes that one decoder may take beyond its own code."""
        return DECODER_BYTES + DECODER_BYTES_PER_PIXEL * self.max_pixels

    @property
    def most_memory(self) -> int:
        """Bytes that clients can make the service take, beyond what it takes at rest."""
        held = 2 * max(HELD_BYTES, self.max_bytes)
        return self.workers * (held + CONNECTIONS * CONNECTION_BYTES + self.decoder_count * self.decoder_memory)

    @property
    def is_private(self) -> bool:
        """Whether only programs of this machine reach it."""
        return is_loopback(self.host)

    def answers_to(self, name: str) -> bool:
        """Whether a request may have been sent to this host name or address.

        A page from elsewhere can make a browser call this service under a name of its own that it points here (DNS
        rebinding); it cannot do so under an address. So every name has to be known.
        """
        name = name.lower().strip("[]")
        if name in (*LOOPBACK, self.host.lower(), *(known.lower() for known in self.names)):
            return True
        return not self.is_private and _is_address(name)


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine's own."""
    if host == "localhost":
        return True
    return _is_address(host) and ipaddress.ip_address(host.strip("[]")).is_loopback


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
