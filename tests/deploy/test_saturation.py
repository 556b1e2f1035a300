"""int8 exports are right on x86 processors without VNNI, whose 16-bit sums of two multiplications saturate.

OpenVINO's copy of oneDNN reads ONEDNN_MAX_CPU_ISA, so that its kernels for AVX2 run on any x86 processor.
"""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import weft
from tests.helpers import ONE_OF_NANO, enliven
from weft.deploy import fold, graphs

RUN = """
import sys
from pathlib import Path
import numpy as np
from weft.deploy.runtimes import run_file
np.save(sys.argv[3], run_file(Path(sys.argv[2]), "openvino", "fp32").run(np.load(sys.argv[1])).logits)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="kernels of x86")
@pytest.mark.parametrize("name", ONE_OF_NANO)
def test_no_sum_saturates_without_vnni(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with 8 bits, the same network is at least twice as far from float32."""
    model = enliven(weft.create_model(name, num_classes=10)).eval()
    images = torch.randn(16, 3, 32, 32)
    np.save(tmp_path / "images.npy", images.numpy())
    with torch.inference_mode():
        expected = model(images).numpy()
    monkeypatch.setattr(graphs, "has_int8", lambda flags: True)  # as an export from a processor with VNNI
    quantized, difference = graphs.quantized, {}
    for bits in (7, 8):
        monkeypatch.setattr(graphs, "quantized", functools.partial(quantized, bits=bits))
        file = tmp_path / f"{bits}.xml"
        calibration = [image[None].numpy() for image in images]
        graphs.write_graph(fold(model), file, "openvino", "int8", (3, 32, 32), calibration)
        environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
        paths = [str(tmp_path / "images.npy"), str(file), str(tmp_path / "logits.npy")]
        subprocess.run([sys.executable, "-c", RUN, *paths], env=environment, check=True)
        logits = np.load(tmp_path / "logits.npy")
        difference[bits] = float(np.abs(logits - expected).max() / np.abs(expected).max())
    assert difference[7] < 0.08, difference
    assert difference[8] > 2 * difference[7], difference
