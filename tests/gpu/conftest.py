"""The device of these tests: a GPU, or what WEFT_TEST_DEVICE names. Without either they are skipped."""

from __future__ import annotations

import os

import pytest
import torch

from tests.gpu.deviation import tf32


@pytest.fixture(scope="session")
def device() -> str:
    name = os.environ.get("WEFT_TEST_DEVICE", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; WEFT_TEST_DEVICE=cpu rehearses these tests on the CPU")
    return name


@pytest.fixture(autouse=True)
def _true_fp32():
    with tf32(False):
        yield
