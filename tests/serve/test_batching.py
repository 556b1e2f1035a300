"""The size of a batch: from durations that are made up, and as the service applies it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.serve.running import running
from weft.deploy import runtimes
from weft.deploy.model import ModelInfo
from weft.inference.predictor import Predictor
from weft.serve import service as service_module
from weft.serve.batching import TRIALS, Batcher, batch_limit
from weft.serve.service import Service
from weft.serve.settings import MAX_BATCH, Settings


def cpu(size: int) -> float:
    """Seconds of a batch on a processor: a little for each pass, and the same for each image."""
    return 0.004 + 0.030 * size


def gpu(size: int) -> float:
    """Seconds of a batch on a card that computes up to 64 images in the time of one."""
    return 0.010


@pytest.mark.parametrize(
    ("seconds", "most", "max_seconds", "min_gain", "limit"),
    [
        (cpu, 32, None, 1.05, 2),  # 1: 29 images a second, 2: 31, 4: 32, which is less than 5 % more
        (gpu, 32, None, 1.05, 32),
        (gpu, 20, None, 1.05, 20),  # the largest is no power of two
        (gpu, 1, None, 1.05, 1),
        (gpu, 32, 0.020, 1.05, 32),
        (cpu, 32, 0.050, 1.05, 1),
        (cpu, 32, 0.001, 1.05, 1),  # one image takes longer
        (lambda size: 0.010 if size < 8 else 0.100, 32, None, 1.05, 4),  # no longer fits into the cache
        (cpu, 16, 0.150, None, 4),  # where a number is given, only the time limits
        (cpu, 16, None, None, 16),
    ],
)
def test_a_batch_grows_only_while_that_pays(seconds, most, max_seconds, min_gain, limit):
    assert batch_limit(seconds, most, max_seconds=max_seconds, min_gain=min_gain) == limit


def test_a_batch_that_fails_is_the_limit() -> None:
    def seconds(size: int) -> float:
        if size >= least:
            raise MemoryError
        return gpu(size)

    least = 8
    assert batch_limit(seconds, 32) == 4
    least = 1
    with pytest.raises(MemoryError):
        batch_limit(seconds, 32)


def test_a_slow_first_trial_does_not_count() -> None:
    sizes: list[int] = []

    def seconds(size: int) -> float:
        sizes.append(size)
        return 0.010 if sizes.count(size) > 1 else 5.0  # the first also compiles

    assert batch_limit(seconds, 8, max_seconds=0.020, min_gain=1.05) == 8
    assert sizes == [size for size in (1, 2, 4, 8) for _ in range(TRIALS)]


def test_the_number_of_waiting_images_is_reported() -> None:
    waiting: list[int] = []

    async def predict() -> None:
        batcher = Batcher(2, 0, 8, on_queue=waiting.append)
        batcher.start()
        predictor: Any = SimpleNamespace(predict=lambda images, overlay: images)
        images: Any = [1, 2, 3]
        assert await batcher.predict(images, predictor, False) == images
        await batcher.close()

    asyncio.run(predict())
    assert waiting == [3, 1, 0, 0]


@pytest.fixture(scope="module")
def predictor(model_dir: Path) -> Predictor:
    return Predictor.load(model_dir, quiet=True)


@pytest.mark.parametrize(
    ("seconds", "arguments", "limit"),
    [
        (cpu, {}, 2),
        (gpu, {}, MAX_BATCH),
        (cpu, dict(max_batch=16), 16),
        (cpu, dict(max_batch=16, max_latency=0.3), 4),
        (gpu, dict(max_latency=0.01), 1),
    ],
)
def test_the_service_limits_its_batches_outside_the_main_thread(seconds, arguments, limit, predictor, monkeypatch):
    now, computing = 0.0, set[threading.Thread]()

    def predict(images: list[Any], *, overlay: bool = False) -> list[Any]:
        nonlocal now
        now += seconds(len(images))
        computing.add(threading.current_thread())
        return []

    monkeypatch.setattr(predictor, "predict", predict)
    monkeypatch.setattr(service_module.time, "perf_counter", lambda: now)
    assert Service(Settings(run="x", **arguments), predictor).max_batch == limit
    assert bool(computing) == (arguments != dict(max_batch=16))
    assert threading.main_thread() not in computing
    assert not any(thread.is_alive() for thread in computing)  # its compute threads have ended as well


def test_batch_sizes_are_measured_on_graphs_of_the_same_kind() -> None:
    """After the warm-up of a service; OpenVINO's graph for any batch size is slower than those for one."""
    graph = runtimes.OpenVinoModel.__new__(runtimes.OpenVinoModel)
    graph.info = ModelInfo(runtime="openvino", precision="fp32", num_classes=2)
    graph.is_dynamic, graph.has_features, graph.fixed, graph._max_fixed = True, False, {}, runtimes.FIXED
    used: list[tuple[int, str]] = []

    def of(kind: str) -> Callable[[np.ndarray], list[np.ndarray]]:
        return lambda images: (used.append((len(images), kind)), [np.zeros((len(images), 2), np.float32)])[1]

    vars(graph)["dynamic"] = of("any size")
    vars(graph)["_fixed_graph"] = lambda size: graph.fixed.setdefault(size, of("one size"))
    model = Predictor(graph).warmed_up(service_module.BATCH_SIZES[-1])
    used.clear()
    limit = service_module._max_batch(Settings(run="x", runtime="openvino"), model)
    assert {size for size, _ in used} >= {1, 2}
    assert {kind for _, kind in used} == {"any size"}
    model.warmed_up(limit)  # then, the sizes of the traffic get their own
    assert {1, limit} <= set(graph.fixed)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks GNU's OpenMP for its settings")
def test_threads_that_wait_leave_their_cores_to_the_decoders(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.forked.Popen", subprocess.Popen)  # OpenMP reads its environment once per process
    with running(model_dir, OMP_DISPLAY_ENV="VERBOSE") as service:
        assert "GOMP_SPINCOUNT = '20000'" in service.said
        assert service.ask("/model")[1]["limits"]["max_batch"] in (1, 2, 4, 8, 16, 32)
