"""Write a network as a file of a runtime: ONNX, OpenVINO, torch.export, AOTInductor; fp32, fp16, bf16 or int8."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.deploy.runtimes import Answer, openvino_core, run_file
from weft.errors import UsageError, need

FORMATS = {
    "onnx": ("fp32", "fp16", "int8"),
    "openvino": ("fp32", "fp16", "bf16", "int8"),
    "torch": ("fp32", "fp16", "bf16"),
    "aotinductor": ("fp32", "bf16"),
}
NEEDS = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "openvino": ("openvino", "onnx", "onnxscript")}
OPSET = 20
COMPILERS = ("g++", "clang++", *([os.environ["CXX"]] if "CXX" in os.environ else []))
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
QUANTIZED = ["Conv", "Gemm", "MatMul"]  # in ONNX Runtime: where the multiply-adds are


class Cast(nn.Module):
    """A network in a narrower format between images and logits in float32, so that all are called alike.

    Args:
        network: is converted in place.
        dtype: what it computes in.
    """

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.network, self.dtype = network.to(dtype), dtype

    def forward(self, images: Tensor) -> Tensor:
        """Images (b c h w) to logits (b num_classes), float32 both."""
        return self.network(images.to(self.dtype)).float()


def check_tools(format: str, precision: str) -> None:
    """Before anything is computed.

    Raises:
        UsageError: a package or a compiler that this format and precision need is not installed.
    """
    need("deploy", *NEEDS.get(format, ()), *(("nncf",) if (format, precision) == ("openvino", "int8") else ()))
    if format == "aotinductor" and not any(shutil.which(name) for name in COMPILERS):
        raise UsageError(
            f"aotinductor needs a C++ compiler, and none of {', '.join(COMPILERS)} was found. Install one, name it"
            " in CXX, or take onnx or openvino."
        )


def write_graph(
    network: nn.Module,
    file: Path,
    format: str,
    precision: str,
    size: tuple[int, ...],
    calibration: Iterable[np.ndarray] = (),
) -> Answer:
    """The file of a network, for batches of any size, and what answers from it as it is.

    Args:
        network: folded, in evaluation mode, on the CPU; it may be changed.
        file: where to; OpenVINO's ends in .xml and gets a .bin beside it.
        format, precision: of FORMATS.
        size: (channels, height, width) of the images.
        calibration: images (1 c h w) whose values set the ranges of int8.

    Raises:
        UsageError: a package or a compiler is not installed.
    """
    check_tools(format, precision)
    if format in ("torch", "aotinductor"):
        return _write_torch(network, file, format, precision, size)
    if format == "onnx":
        narrow = Cast(network, DTYPES[precision]) if precision == "fp16" else network
        _to_onnx(narrow, file, size)
        if precision == "int8":
            _quantize_onnx(file, calibration)
        return run_file(file, format, precision, fixed=0)
    openvino = importlib.import_module("openvino")
    between = file.with_name("between.onnx")
    _to_onnx(network, between, size)
    graph = openvino_core().read_model(str(between))  # convert_model would report its use to its makers
    between.unlink()
    if precision == "int8":
        graph = quantized(graph, calibration)
    openvino.save_model(graph, str(file), compress_to_fp16=precision == "fp16")
    return run_file(file, format, precision, fixed=0)


def _to_onnx(network: nn.Module, file: Path, size: tuple[int, ...]) -> None:
    with _quietly():
        program = torch.onnx.export(
            network,
            (torch.zeros(2, *size),),  # two: a batch of one would be taken for a constant
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
            input_names=["images"],
            output_names=["logits"],
            opset_version=OPSET,
            verbose=False,
        )
    assert program is not None
    for node in program.model.graph.all_nodes():  # stack traces: half of a small file, with paths of this machine
        node.metadata_props.clear()
    program.save(str(file), external_data=False)


def _write_torch(network: nn.Module, file: Path, format: str, precision: str, size: tuple[int, ...]) -> Answer:
    narrow = network if precision == "fp32" else Cast(network, DTYPES[precision])
    batch = torch.export.Dim("batch", min=1)
    if format == "aotinductor":
        batch = torch.export.Dim("batch", min=1, max=2**16)
    program = torch.export.export(narrow, (torch.zeros(2, *size),), dynamic_shapes=({0: batch},))
    run: Any
    if format == "torch":
        torch.export.save(program, str(file))
        run = program.module()
    else:
        with _quietly():
            torch._inductor.aoti_compile_and_package(program, package_path=str(file))
        run = torch._inductor.aoti_load_package(str(file))  # what was compiled here a moment ago

    def answer(images: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return run(torch.from_numpy(images)).numpy()

    return answer


def _quantize_onnx(file: Path, calibration: Iterable[np.ndarray]) -> None:
    """Post-training quantisation by ONNX Runtime: weights per channel and symmetric, activations from 0 to 255."""
    tools = importlib.import_module("onnxruntime.quantization")
    shape_inference = importlib.import_module("onnxruntime.quantization.shape_inference")
    plain = file.with_name("plain.onnx")
    with _quietly():
        shape_inference.quant_pre_process(str(file), str(plain), skip_symbolic_shape=True)
        tools.quantize_static(
            str(plain),
            str(file),
            _Reader(calibration),
            per_channel=True,
            op_types_to_quantize=QUANTIZED,
            activation_type=tools.QuantType.QUInt8,
            weight_type=tools.QuantType.QInt8,
        )
    plain.unlink()


class _Reader:
    """Calibration images as ONNX Runtime asks for them."""

    def __init__(self, calibration: Iterable[np.ndarray]) -> None:
        self.images = iter(calibration)

    def get_next(self) -> dict[str, np.ndarray] | None:
        images = next(self.images, None)
        return None if images is None else {"images": images}


def quantized(graph: Any, calibration: Iterable[np.ndarray], smooth: bool = False) -> Any:
    """Post-training quantisation of products and convolutions by NNCF.

    Args:
        graph: of OpenVINO.
        calibration: images (1 c h w).
        smooth: move what is hard to quantise from activations into weights first. LeViT's logits end further off
            with it, and no network's top-1 gains (benchmarks/speed/int8.csv).
    """
    os.environ.setdefault("NNCF_CI", "1")  # it would report its use to its makers
    nncf = importlib.import_module("nncf")
    nncf.set_log_level(40)
    images = list(calibration)
    with _quietly():
        return nncf.quantize(
            graph,
            nncf.Dataset(images),
            model_type=nncf.ModelType.TRANSFORMER,
            preset=nncf.QuantizationPreset.MIXED,  # activations behind HardSwish and GELU are not symmetric
            subset_size=len(images),
            advanced_parameters=nncf.AdvancedQuantizationParameters(
                smooth_quant_alphas=nncf.AdvancedSmoothQuantParameters(convolution=-1, matmul=0.95 if smooth else -1)
            ),
        )


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without what exporters say about themselves: warnings, progress, a line for every constant left as it is."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
