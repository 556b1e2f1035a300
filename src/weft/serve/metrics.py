"""Prometheus metrics of the service."""

from __future__ import annotations

import os

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector

from weft.version import __version__

SHARED = "PROMETHEUS_MULTIPROC_DIR"  # set where several processes count together
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """The counters of one process.

    Args:
        paths: whose requests are told apart; all others count as `other`, or strangers could invent labels.
        runtime, precision: of the model.
    """

    def __init__(self, paths: tuple[str, ...], runtime: str, precision: str) -> None:
        self.paths = paths
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "weft_requests", "Answers given, by code.", ("method", "path", "code"), registry=registry
        )
        self.seconds = Histogram(
            "weft_request_seconds",
            "From the header of a request to its answer.",
            ("path",),
            buckets=SECONDS,
            registry=registry,
        )
        self.images = Counter(
            "weft_images", "Pictures, by outcome: answered, or why not.", ("outcome",), registry=registry
        )
        self.batches = Histogram(
            "weft_batch_images", "Pictures in a forward pass.", buckets=(1, 2, 4, 8, 16, 32, 64, 128), registry=registry
        )
        self.forward = Histogram("weft_forward_seconds", "One forward pass.", buckets=SECONDS, registry=registry)
        self.waiting = Gauge(
            "weft_waiting_images", "Pictures that wait for the model.", registry=registry, multiprocess_mode="livesum"
        )
        self.reloads = Counter("weft_reloads", "Models loaded anew, by outcome.", ("outcome",), registry=registry)
        self.build = Gauge(
            "weft_build_info",
            "Always 1.",
            ("version", "runtime", "precision"),
            registry=registry,
            multiprocess_mode="livemax",
        )
        self.build.labels(__version__, runtime, precision).set(1)
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)

    def on_answer(self, method: str, path: str, status: int, seconds: float) -> None:
        """Counts an answer."""
        path = path if path in self.paths else "other"
        method = method if method in ("GET", "POST", "HEAD", "OPTIONS") else "other"
        self.requests.labels(method, path, str(status)).inc()
        self.seconds.labels(path).observe(seconds)

    def on_batch(self, size: int, seconds: float) -> None:
        """Counts a forward pass."""
        self.batches.observe(size)
        self.forward.observe(seconds)
        self.images.labels("answered").inc(size)

    def text(self) -> bytes:
        """Everything, in the format that Prometheus reads; of all processes where there are several."""
        if SHARED not in os.environ:
            return generate_latest(self.registry)
        together = CollectorRegistry()
        MultiProcessCollector(together)
        return generate_latest(together)
