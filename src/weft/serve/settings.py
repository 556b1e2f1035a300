"""Settings of the service. Imports neither torch nor pydantic, because the command line imports this module."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from weft.data.formats import MAX_PIXELS
from weft.deploy.formats import RUNTIMES as RUNTIMES
from weft.errors import UsageError
from weft.machine.processor import available_cores
from weft.recipes.fields import Within
from weft.recipes.schema import ImageSize, Threads

TOKEN = "WEFT_TOKEN"  # environment variable with the token
MAX_BATCH = 32  # images per forward pass, where no number is set
LARGEST_BATCH = 4096  # that can be set
CONNECTIONS = 1000  # per process
HELD_BYTES = 256 << 20  # of all bodies that are being received or decoded; of forms there is a second copy
# of one decoder process; the most that was measured for 400 kinds of files is 22 bytes per pixel, for a WebP with alpha
DECODER_BYTES, DECODER_BYTES_PER_PIXEL = 64 << 20, 32
LOOPBACK = ("localhost", "127.0.0.1", "::1")

Count = Annotated[int, Within(1)]
Seconds = Annotated[float, Within(0, 3600, above=True, unit="s")]


@dataclass(frozen=True)
class Settings:
    """Settings of a service: the model, the address, and the limits on requests.

    Raises:
        UsageError: a value is out of range, or two values contradict each other.
    """

    run: str | Path
    """Run directory, model directory, export, or the name of a public model."""

    host: str = "127.0.0.1"
    """Address to listen on: a host name or an IP address."""

    port: Annotated[int, Within(0, 65_535)] = 8000
    """Port to listen on; 0 for any free port."""

    runtime: Literal["auto", "torch", "openvino", "onnx"] = "auto"
    """Inference runtime. auto: the fastest of the model and its exports, by measurement."""

    img_size: ImageSize | None = None
    """Input size in pixels, or (height, width). None: that of the model."""

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device of torch."""

    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    """Precision of torch."""

    reject_at_error: Annotated[float, Within(0, 1, below=True)] | None = None
    """Reject predictions below the confidence at which this share of the held-out images was classified wrongly. None:
    reject none."""

    threads: Threads | None = None
    """Compute threads per process. None: all cores, divided among the processes."""

    workers: Annotated[int, Within(1, 1024)] = 1
    """Server processes, each with its own model."""

    max_batch: Annotated[int, Within(1, LARGEST_BATCH)] | None = None
    """Maximum number of images per forward pass. None: the smallest number, up to 32, whose throughput is about the
    highest, by measurement at the start."""

    max_latency: Annotated[float, Within(0, 60, above=True, unit="s")] | None = None
    """Limit a batch to the images whose forward pass takes at most half of this time, in s, by measurement at the
    start; an image that waits for the pass in progress then has a result in this time. None: no such limit."""

    max_wait: Annotated[float, Within(0, 1, unit="s")] = 0.005
    """Maximum time to wait for a batch to fill, in s."""

    max_queue: Count = 128
    """Maximum number of waiting images; more are refused with status 429."""

    max_bytes: Count = 10 << 20
    """Maximum bytes of the body of a request."""

    max_pixels: Count = MAX_PIXELS
    """Maximum height x width of an image, read from its header; a decoder may use 64 MiB + 32 bytes per pixel."""

    max_images: Count = 16
    """Maximum number of images per request."""

    decoders: Annotated[int, Within(1, 1024)] | None = None
    """Image decoder processes per worker. None: one per core, at most 4."""

    decode_timeout: Seconds = 10.0
    """Maximum time to decode an image, in s; then its decoder is killed and the image refused."""

    read_timeout: Seconds = 10.0
    """Maximum time to receive the body of a request, in s."""

    timeout: Seconds = 30.0
    """Maximum time to compute a response, in s."""

    drain: Annotated[float, Within(0, 600, unit="s")] = 1.0
    """Time between the start of a shutdown and the closing of the port, in s. Meanwhile `/ready` returns 503, so that a
    load balancer stops sending requests."""

    grace: Seconds = 20.0
    """Time to finish accepted requests during a shutdown, in s; after that they are cancelled."""

    names: tuple[str, ...] = ()
    """Additional host names that clients may send in the Host header."""

    proxies: tuple[str, ...] = ()
    """Addresses of trusted reverse proxies, whose X-Forwarded-For header is used."""

    token: str | None = None
    """Token that clients must send as `Authorization: Bearer TOKEN`. None: no token on a loopback address, and a random
    token on any other."""

    is_open: bool = False
    """Disable authentication, also for remote clients."""

    log: bool = False
    """Log every response to stderr."""

    def __post_init__(self) -> None:
        """Check all values."""
        from weft.recipes.checks import check_fields  # imports pydantic

        if self.token is not None and not re.fullmatch(r"[!-~]+( +[!-~]+)*", self.token):
            raise UsageError(
                "A token must consist of ASCII letters, digits and punctuation; this one has other characters, or"
                f" begins or ends with a space. Change {TOKEN}."
            )
        check_fields(self)
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
    def is_private(self) -> bool:
        """Whether the service is reachable from this machine only."""
        address = _address(self.host)
        return self.host == "localhost" or (address is not None and address.is_loopback)

    def accepts_host(self, name: str) -> bool:
        """Return whether a Host header may have this host name or address.

        This check prevents DNS rebinding: a foreign page points its own host name to the address of this service, and
        the browser then treats the service as part of that page. Such a page needs a host name; it cannot use an
        address. So host names must be known, and addresses are accepted.
        """
        name = name.lower().strip("[]")
        if name in (*LOOPBACK, self.host.lower(), *(known.lower() for known in self.names)):
            return True
        return not self.is_private and _address(name) is not None


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def _is_network(text: str) -> bool:
    try:
        return bool(ipaddress.ip_network(text, strict=False))
    except ValueError:
        return False
