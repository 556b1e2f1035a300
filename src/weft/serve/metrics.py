"""Prometheus metrics of the service."""

from __future__ import annotations

import os
from collections.abc import Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from weft.version import __version__

MULTIPROC_DIR = "PROMETHEUS_MULTIPROC_DIR"  # environment variable; set if several processes share their metrics
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """Counters, gauges and histograms of one process.

    Args:
        paths: values of the label `path`. All other paths are counted as `other`, because clients could otherwise
            create any number of labels.
        runtime, precision: as in `set_model`.
    """

    def __init__(self, paths: tuple[str, ...], runtime: str, precision: str) -> None:
        self.paths = paths
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
        self.build = Gauge(
            "weft_build_info",
            "Version, runtime and precision as labels; the value is always 1.",
            ("version", "runtime", "precision"),
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._model: Gauge | None = None
        self.set_model(runtime, precision)
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)

    def set_model(self, runtime: str, precision: str) -> None:
        """Set the labels of `weft_build_info` to the runtime and precision of the model."""
        if self._model is not None:
            self._model.set(0)
        self._model = self.build.labels(__version__, runtime, precision)
        self._model.set(1)

    def on_response(self, method: str, path: str, status: int, seconds: float) -> None:
        """Count a response."""
        path = path if path in self.paths else "other"
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
        return generate_latest(_CurrentModels(registry))


class _CurrentModels(Collector):
    """All metrics, without the labels of models that are no longer served.

    prometheus_client cannot remove labels from metrics that several processes share.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self.registry.collect():
            if metric.name == "weft_build_info":
                metric.samples = [sample for sample in metric.samples if sample.value]
            yield metric
