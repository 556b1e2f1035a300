"""One thread and one seed per test, as in tests/."""

from __future__ import annotations

import pytest
import torch

from weft.machine.system import hide_wandb

hide_wandb()
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
