"""One thread per test process, one seed per test."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)  # results depend on it, and the tests already run beside each other


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
