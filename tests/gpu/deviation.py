"""Difference of a network on a device from the recorded outputs of the released code."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import torch

from tests.parity.test_golden import GOLDEN, NETWORKS, loaded
from tests.reference.deterministic import image_batch

TOLERANCE = {  # largest difference, relative to the largest logit
    "fp32": 5e-5,  # sums in another order: 1e-5 on CPUs
    "tf32": 2e-2,  # 10 bits of mantissa in every product
    "bf16": 5e-2,  # 7 bits, and random weights that amplify more than trained ones
}


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow a GPU to multiply float32 in TF32, or not; PyTorch's defaults allow it in convolutions alone."""
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = allowed
    try:
        yield
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.allow_tf32 = value


def deviation(theirs: str, precision: str, device: str) -> tuple[float, bool]:
    """Run a network of the records.

    Args:
        theirs: name in the records.
        precision: of TOLERANCE; bf16 is autocast.
        device: cpu or cuda.

    Returns:
        The largest difference of the logits relative to the largest recorded one, and whether the predicted classes are
        the same.
    """
    record = torch.from_numpy(GOLDEN[f"{theirs}/logits"])
    model = copy.deepcopy(loaded(theirs)).float().to(device).eval()
    images = torch.from_numpy(image_batch(NETWORKS[theirs]["image_size"])).float().to(device)
    enabled = precision == "bf16"
    with torch.inference_mode(), tf32(precision == "tf32"), torch.autocast(device, torch.bfloat16, enabled=enabled):
        logits = model(images).double().cpu()
    difference = float((logits - record).abs().max() / record.abs().max())
    return difference, torch.equal(logits.argmax(dim=1), record.argmax(dim=1))
