"""Settings of the service. Does not import torch, because the command line imports this module."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, fields

from weft.data.formats import MAX_PIXELS
from weft.deploy.formats import RUNTIMES as RUNTIMES
from weft.errors import UsageError
from weft.processor import MAX_THREADS, available_cores

DEVICES, PRECISIONS = ("auto", "cpu", "cuda", "mps"), ("auto", "fp32", "bf16")
NUMBERS = {"int": (int, "a whole number"), "float": ((int, float), "a number")}
TOKEN = "WEFT_TOKEN"  # environment variable with the token
MAX_BATCH = 32  # images per forward pass, where no number is set
LARGEST_BATCH = 4096  # that can be set
CONNECTIONS, CONNECTION_BYTES = 1000, 512 << 10  # per process; unread bytes and buffers of one connection
HELD_BYTES = 256 << 20  # of all bodies that are being received or decoded; of forms there is a second copy
# of one decoder process; the most that was measured for 400 kinds of files is 22 bytes per pixel, for a WebP with alpha
DECODER_BYTES, DECODER_BYTES_PER_PIXEL = 64 << 20, 32
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Settings:
    """Settings of a service: the model, the address, and the limits on requests.

    Attributes:
        run: a run directory, a model directory, an export, or the name of a public model.
        host: address to listen on; a host name or an IP address.
        port: 0 for any free port.
        runtime: inference runtime, one of RUNTIMES. `auto` is the fastest of the model and its exports, by measurement.
        device: one of DEVICES, for torch.
        precision: one of PRECISIONS, for torch.
        reject_at_error: reject predictions below the confidence at which this share of the held-out images was
            classified wrongly, from 0 to 1; None rejects none.
        threads: compute threads per process; None for all cores, divided among the processes.
        workers: server processes, each with its own model.
        max_batch: maximum number of images per forward pass. None: the smallest number, up to MAX_BATCH, whose
            throughput is about the highest, by measurement at the start.
        max_latency_ms: limit a batch to the images whose forward pass takes at most half of this time, in ms, by
            measurement at the start; an image that waits for the pass in progress then has a result in this time. None:
            no such limit.
        max_wait_ms: maximum time to wait for a batch to fill, in ms.
        max_queue: maximum number of waiting images; more are refused with status 429.
        max_bytes: maximum size of the body of a request.
        max_pixels: maximum height x width of an image, read from its header. It determines `decoder_memory`.
        max_images: maximum number of images per request.
        decoders: image decoder processes per worker; None for one per core, at most 4.
        decode_timeout: seconds after which the decoder of an image is killed and the image refused.
        read_timeout: maximum number of seconds to receive a request.
        timeout: maximum number of seconds to compute a response.
        drain: seconds between the start of a shutdown and the closing of the port. Meanwhile `/ready` returns 503, so
            that a load balancer stops sending requests.
        grace: seconds to finish accepted requests during a shutdown; after that they are cancelled.
        names: additional host names that clients may send in the Host header.
        proxies: addresses of trusted proxies, whose X-Forwarded-For header is used.
        token: token that clients must send as `Authorization: Bearer TOKEN`. None: no token on a loopback address, and
            a random token on any other.
        is_open: disable authentication, also for remote clients.
        log: write a line to stderr for every response.
    """

    run: str
    host: str = "127.0.0.1"
    port: int = 8000
    runtime: str = "auto"
    device: str = "auto"
    precision: str = "fp32"
    reject_at_error: float | None = None
    threads: int | None = None
    workers: int = 1
    max_batch: int | None = None
    max_latency_ms: float | None = None
    max_wait_ms: float = 5.0
    max_queue: int = 128
    max_bytes: int = 10 << 20
    max_pixels: int = MAX_PIXELS
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
        """Check all values.

        Raises:
            UsageError: a value is out of range, or two values contradict each other.
        """
        for name, choices in (("runtime", RUNTIMES), ("device", DEVICES), ("precision", PRECISIONS)):
            if getattr(self, name) not in choices:
                raise UsageError(f"{name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}.")
        for field in fields(self):
            kind, _, optional = str(field.type).partition(" | ")
            value = getattr(self, field.name)
            if kind in NUMBERS and not isinstance(value, NUMBERS[kind][0]) and not (optional and value is None):
                raise UsageError(f"{field.name} must be {NUMBERS[kind][1]}; got {value!r}.")
        if not 0 <= self.port <= 65535:
            raise UsageError(f"port must be from 0 to 65535; got {self.port}.")
        for name in ("workers", "max_queue", "max_bytes", "max_pixels", "max_images"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1; got {getattr(self, name)}.")
        if self.max_batch is not None and not 1 <= self.max_batch <= LARGEST_BATCH:
            raise UsageError(f"max_batch must be from 1 to {LARGEST_BATCH}; got {self.max_batch}.")
        for name in ("decoders", "threads"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1; got {getattr(self, name)}.")
        if self.threads is not None and self.threads > MAX_THREADS:
            raise UsageError(f"threads must be at most {MAX_THREADS}; got {self.threads}.")
        if self.reject_at_error is not None and not 0 <= self.reject_at_error < 1:
            raise UsageError(
                f"reject_at_error must be a share of errors from 0 to below 1; got {self.reject_at_error:g}."
            )
        if self.max_latency_ms is not None and not 0 < self.max_latency_ms <= 60_000:
            raise UsageError(
                f"max_latency_ms must be above 0 and at most 60000 milliseconds; got {self.max_latency_ms}."
            )
        for name in ("read_timeout", "timeout", "grace", "decode_timeout"):
            if not 0 < getattr(self, name) <= 3600:
                raise UsageError(f"{name} must be above 0 and at most 3600 seconds; got {getattr(self, name)}.")
        if not 0 <= self.drain <= 600:
            raise UsageError(f"drain must be from 0 to 600 seconds; got {self.drain}.")
        if not 0 <= self.max_wait_ms <= 1000:
            raise UsageError(f"max_wait_ms must be from 0 to 1000 milliseconds; got {self.max_wait_ms}.")
        for proxy in self.proxies:
            if proxy != "*" and not _is_network(proxy):
                raise UsageError(f"A proxy must be an address, a network such as 10.0.0.0/8, or *; got '{proxy}'.")
        for name in self.names:
            if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", name):
                raise UsageError(f"A name must be a host name without a port; got '{name}'. For example: photos.local.")
        if self.is_open and self.token is not None:
            raise UsageError(
                "Authentication must be either on or off; got both WEFT_TOKEN and --no-token. Leave one out."
            )
        if self.token is not None and not re.fullmatch(r"[!-~]+( +[!-~]+)*", self.token):
            raise UsageError(
                "A token must consist of ASCII letters, digits and punctuation; this one has other characters, or"
                f" begins or ends with a space. Change {TOKEN}."
            )
        if self.max_queue < self.max_images:
            raise UsageError(
                f"max_queue must be at least max_images, {self.max_images}, so that one request fits;"
                f" got {self.max_queue}."
            )

    @property
    def decoder_count(self) -> int:
        """Number of decoder processes of each worker."""
        return self.decoders or min(max(available_cores() // self.workers, 1), 4)

    @property
    def decoder_memory(self) -> int:
        """Limit on the memory of one decoder process, in bytes beyond what it uses at rest."""
        return DECODER_BYTES + DECODER_BYTES_PER_PIXEL * self.max_pixels

    @property
    def max_memory(self) -> int:
        """Maximum memory that requests can make the service use, in bytes beyond what it uses at rest."""
        held = 2 * max(HELD_BYTES, self.max_bytes)
        return self.workers * (held + CONNECTIONS * CONNECTION_BYTES + self.decoder_count * self.decoder_memory)

    @property
    def is_private(self) -> bool:
        """Whether the service is reachable from this machine only."""
        return is_loopback(self.host)

    def accepts_host(self, name: str) -> bool:
        """Return whether a Host header may have this host name or address.

        This check prevents DNS rebinding: a foreign page points its own host name to the address of this service, and
        the browser then treats the service as part of that page. Such a page needs a host name; it cannot use an
        address. So host names must be known, and addresses are accepted.
        """
        name = name.lower().strip("[]")
        if name in (*LOOPBACK, self.host.lower(), *(known.lower() for known in self.names)):
            return True
        return not self.is_private and _is_address(name)


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is a loopback address."""
    if host == "localhost":
        return True
    return _is_address(host) and ipaddress.ip_address(host.strip("[]")).is_loopback


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
