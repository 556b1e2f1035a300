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

MULTIPROC_DIR = "PROMETHEUS_MULTIPROC_DIR"  # environment variable; set if several processes share their metrics
# values of the label `path`; all other paths are `other`, because clients could otherwise create any number of labels
PATHS = ("/", "/predict", "/model", "/health", "/live", "/ready", "/metrics")
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """Counters, gauges and histograms of one process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "weft_requests", "HTTP responses, by status code.", ("method", "path", "code"), registry=registry
        )
        self.seconds = Histogram(
            "weft_request_seconds",
            "Time from the header of a request to the end of its response.",
            ("path",),
            buckets=SECONDS,
            registry=registry,
        )
        self.images = Counter(
            "weft_images", "Images, by outcome: answered, or the error code.", ("outcome",), registry=registry
        )
        self.batches = Histogram(
            "weft_batch_images", "Images per forward pass.", buckets=(1, 2, 4, 8, 16, 32, 64, 128), registry=registry
        )
        self.forward = Histogram(
            "weft_forward_seconds", "Duration of one forward pass.", buckets=SECONDS, registry=registry
        )
        self.waiting = Gauge(
            "weft_waiting_images", "Images waiting for the model.", registry=registry, multiprocess_mode="livesum"
        )
        self.reloads = Counter("weft_reloads", "Model reloads, by outcome.", ("outcome",), registry=registry)
        build = Gauge(
            "weft_build_info",
            "Version of weft as a label; the value is always 1.",
            ("version",),
            registry=registry,
            multiprocess_mode="livemax",
        )
        build.labels(__version__).set(1)
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)

    def on_response(self, method: str, path: str, status: int, seconds: float) -> None:
        """Count a response."""
        path = path if path in PATHS else "other"
        method = method if method in ("GET", "POST", "HEAD", "OPTIONS") else "other"
        self.requests.labels(method, path, str(status)).inc()
        self.seconds.labels(path).observe(seconds)

    def on_batch(self, size: int, seconds: float) -> None:
        """Count a forward pass and its images."""
        self.batches.observe(size)
        self.forward.observe(seconds)
        self.images.labels("answered").inc(size)

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus; with several processes, the metrics of all of them."""
        registry = self.registry
        if MULTIPROC_DIR in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)
        return generate_latest(registry)
