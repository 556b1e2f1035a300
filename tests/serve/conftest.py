"""One model directory for all tests of a service; asynchronous tests of a module share its event loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serve.running import saved


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only."""
    return saved(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"
