"""One thread per test process, one seed per test. pytest-xdist itself needs no torch, so functions import it."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from unittest import mock

import pytest

from tests import forked


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "numprocesses", None):
        if "coverage" not in sys.modules:  # it would not see lines that an import runs
            forked.fork_workers()
        return
    import torch

    from weft.machine.system import hide_wandb

    hide_wandb()  # timm would import it in every test process
    torch.set_num_threads(1)  # results depend on it, and the tests already run beside each other


@pytest.fixture(scope="session", autouse=True)
def _artefacts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Networks that are equal are exported once for all test processes; digits are encoded once in each."""
    from tests.artefacts import share_digits, share_graphs

    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "graphs"
    folder.mkdir(exist_ok=True)
    undo = [share_graphs(folder), share_digits()]
    yield
    for call in undo:
        call()


@pytest.fixture(autouse=True)
def _environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A verb in the process of the tests may set variables for the processes that it starts. What is cached about files
    and features stays in the folder of the tests."""
    with mock.patch.dict(os.environ, WEFT_CACHE=str(tmp_path_factory.getbasetemp() / "cache")):
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _blank_figures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save figures as one pixel, except in tests marked `figures`: drawing a report takes as long as a small run."""
    from tests.helpers import BLANK, blank_figures

    if request.node.get_closest_marker("figures") is None:
        blank_figures(monkeypatch.setattr)
        monkeypatch.setenv(BLANK, "1")


def pytest_collection_finish() -> None:
    """Leave what the imports have made out of garbage collections, each of which would visit all of it."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """End as without `gc.freeze`: nanobind would report all that it has not seen collected."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of a parametrized test as slow, except those that `slow_except` names."""
    for item in items:
        marker = item.get_closest_marker("slow_except")
        if marker is not None:
            case = item.name.partition("[")[2].removesuffix("]")
            if case not in marker.args:
                item.add_marker(pytest.mark.slow)
