"""Write a network as a file of a runtime: ONNX, OpenVINO, torch.export; fp32, fp16, bf16 or int8."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.deploy.runtimes import (
    Infer,
    import_onnx_runtime,
    onnx_classifier,
    openvino_classifier,
    openvino_core,
    run_file,
)
from weft.machine.processor import has_int8, onednn_flags

OPSET = 20
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
WEIGHT_BITS = 7  # of int8: see `quantized`
MOVES = ("Reshape", "Transpose", "VariadicSplit", "Split", "Slice", "StridedSlice", "Squeeze", "Unsqueeze", "Gather")
QUANTIZED = ["Conv", "Gemm", "MatMul"]  # operators that ONNX Runtime quantises: those with the multiply-adds


class Cast(nn.Module):
    """A network that computes in fp16 or bf16, with images and logits in float32.

    Args:
        network: the network; converted in place.
        dtype: number format of weights and activations.
    """

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.network, self.dtype = network.to(dtype), dtype

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (b num_classes) of images (b c h w), both in float32."""
        return self.network(images.to(self.dtype)).float()


def write_graph(
    network: nn.Module,
    file: Path,
    format: str,
    precision: str,
    size: tuple[int, ...],
    calibration: Iterable[np.ndarray] = (),
) -> Infer:
    """Write a network to a file for batches of any size, and return a function that runs the file.

    Args:
        network: folded, in evaluation mode, on the CPU; it may be changed.
        file: path of the file; an OpenVINO file ends in .xml, and a .bin is written next to it.
        format, precision: of FORMATS.
        size: (channels, height, width) of the images.
        calibration: images (1 c h w) that determine the ranges of int8.

    Returns:
        A function from images (b c h w) to logits (b num_classes), float32 arrays.
    """
    if format == "torch":
        return _write_torch(network, file, precision, size)
    if format == "onnx":
        converted = Cast(network, DTYPES[precision]) if precision == "fp16" else network
        _to_onnx(converted, file, size)
        if precision == "int8":
            quantize_onnx(file, calibration)
    else:
        onnx_file = file.with_name("between.onnx")
        _to_onnx(network, onnx_file, size)
        graph = openvino_core().read_model(str(onnx_file))  # not convert_model, which sends telemetry
        onnx_file.unlink()
        if precision == "int8":
            graph = quantized(graph, calibration)
        openvino = importlib.import_module("openvino")
        openvino.save_model(graph, str(file), compress_to_fp16=precision == "fp16")
    model = run_file(file, format, precision, fixed=0)
    return lambda images: model.run(images).logits


def _to_onnx(network: nn.Module, file: Path, size: tuple[int, ...]) -> None:
    with _quiet():
        program = torch.onnx.export(
            network,
            (torch.zeros(2, *size),),  # two images: a batch of one would become a constant
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
            input_names=["images"],
            output_names=["logits"],
            opset_version=OPSET,
            verbose=False,
        )
    assert program is not None
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # stack traces, which contain local paths, and are half of a small file
    program.save(str(file), external_data=False)


def _write_torch(network: nn.Module, file: Path, precision: str, size: tuple[int, ...]) -> Infer:
    converted = network if precision == "fp32" else Cast(network, DTYPES[precision])
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    program = torch.export.export(converted, (torch.zeros(2, *size),), dynamic_shapes=shapes)
    torch.export.save(program, str(file))
    run: Any = program.module()

    def infer(images: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return run(torch.from_numpy(images)).numpy()

    return infer


def quantize_onnx(file: Path, calibration: Iterable[np.ndarray], bits: int = WEIGHT_BITS) -> None:
    """Quantise a file with ONNX Runtime after training: symmetric weights per channel, unsigned activations.

    The inputs of multiplications are quantised, and the outputs of convolutions. Outputs of matrix
    multiplications stay in float32: a few large values in the residual sums of a transformer leave 8 bits too coarse
    for all others. So does the classifier: see `quantized`.

    Args:
        file: the ONNX file; replaced.
        calibration: images (1 c h w) that determine the ranges of activations.
        bits: of weights, 7 or 8; activations have 8. With 7, no sum of activations times weights saturates on an x86
            processor without VNNI.
    """
    import_onnx_runtime()
    tools = importlib.import_module("onnxruntime.quantization")
    shape_inference = importlib.import_module("onnxruntime.quantization.shape_inference")
    preprocessed, images = file.with_name("plain.onnx"), ({"images": array} for array in calibration)
    with _quiet():
        shape_inference.quant_pre_process(str(file), str(preprocessed), skip_symbolic_shape=True)
        classifier = onnx_classifier(importlib.import_module("onnx").load(str(preprocessed)).graph)
        tools.quantize_static(
            str(preprocessed),
            str(file),
            SimpleNamespace(get_next=lambda: next(images, None)),  # a CalibrationDataReader
            per_channel=True,
            op_types_to_quantize=QUANTIZED,
            nodes_to_exclude=[] if classifier is None else [classifier[0].name],
            activation_type=tools.QuantType.QUInt8,
            weight_type=tools.QuantType.QInt8,
            reduce_range=bits < 8,
            extra_options={"OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"]},
        )
    preprocessed.unlink()


def quantized(graph: Any, calibration: Iterable[np.ndarray], smooth: bool = False, bits: int = WEIGHT_BITS) -> Any:
    """Quantise the matrix multiplications and convolutions of a graph with NNCF, after training.

    x86 processors without VNNI multiply 8-bit numbers and add pairs of results in 16 bits, which saturate. So one
    factor of every multiplication has 7 bits: the weights, and the keys and values of attention. This costs no speed
    (benchmarks/speed/saturation.csv). On a processor without VNNI, attention stays in float32, for which OpenVINO has
    one kernel, and networks are 1.0 to 1.3 times as fast (benchmarks/speed/int8_linear.csv).

    The classifier stays in float32. It needs hardly any time, and the classes of a person's own images can differ by
    less than 8 bits resolve: features that all images share are large, and cancel only in the sum.

    Args:
        graph: an OpenVINO model.
        calibration: images (1 c h w) that determine the ranges of activations.
        smooth: apply SmoothQuant (arXiv 2211.10438), which moves outliers of activations into weights. With it, the
            logits of LeViT are less accurate, and no network has a higher top-1 (benchmarks/speed/int8.csv).
        bits: of one factor of every multiplication, 7 or 8.

    Returns:
        The quantised OpenVINO model.
    """
    linear_to_convolution(graph)
    os.environ.setdefault("NNCF_CI", "1")  # no telemetry
    nncf = importlib.import_module("nncf")
    nncf.set_log_level(40)
    images = list(calibration)
    in_fp32 = [] if has_int8(onednn_flags()) else _products_of_activations(graph)
    in_fp32 += [node for node in [openvino_classifier(graph)] if node is not None]
    with _quiet():
        integer = nncf.quantize(
            graph,
            nncf.Dataset(images),
            ignored_scope=nncf.IgnoredScope(names=[node.get_friendly_name() for node in in_fp32]),
            model_type=nncf.ModelType.TRANSFORMER,
            preset=nncf.QuantizationPreset.MIXED,  # activations after Hardswish and GELU are not symmetric
            subset_size=len(images),
            advanced_parameters=nncf.AdvancedQuantizationParameters(
                overflow_fix=nncf.OverflowFix.ENABLE if bits < 8 else nncf.OverflowFix.FIRST_LAYER,
                smooth_quant_alphas=nncf.AdvancedSmoothQuantParameters(convolution=-1, matmul=0.95 if smooth else -1),
            ),
        )
    for node in _second_factors(integer) if bits < 8 else ():
        _to_half_range(node)
    return integer


def linear_to_convolution(graph: Any) -> None:
    """Replace the linear layers on tokens (b n c) by 1x1 convolutions, in place.

    Without VNNI, OpenVINO multiplies matrices more slowly in int8 than in fp32, but computes convolutions faster:
    LeViT has 1.5 to 1.8 times the throughput with them, CvT-13 1.6 to 1.7 times, CeiT-T 1.2 times; with VNNI or AMX,
    there is little difference (benchmarks/speed/int8_linear.csv). No data move: a map (b c n 1) with channels last is
    the memory of its tokens.

    Args:
        graph: an OpenVINO model.
    """
    opset = importlib.import_module("openvino.opset13")
    for node in graph.get_ordered_ops():
        if node.get_type_name() != "MatMul" or node.get_attributes()["transpose_a"]:
            continue
        tokens, weight = node.input_value(0), node.input_value(1).get_node()
        is_linear = weight.get_type_name() == "Constant" and len(weight.shape) == 2
        if not is_linear or tokens.get_partial_shape().rank.get_length() != 3:
            continue
        matrix = np.asarray(weight.get_data())
        kernel = (matrix if node.get_attributes()["transpose_b"] else matrix.T)[:, :, None, None]
        outputs = node.output(0)
        bias = _bias_of(outputs)
        fmap = opset.transpose(opset.unsqueeze(tokens, np.array([2])), np.array([0, 3, 1, 2]))
        fmap = opset.convolution(fmap, np.ascontiguousarray(kernel), [1, 1], [0, 0], [0, 0], [1, 1])
        if bias is not None:
            fmap = opset.add(fmap, bias[0][None, :, None, None])
            outputs = bias[1]
        result = opset.squeeze(opset.transpose(fmap, np.array([0, 2, 3, 1])), np.array([2]))
        for target in outputs.get_target_inputs():
            target.replace_source_output(result.output(0))


def _bias_of(output: Any) -> tuple[np.ndarray, Any] | None:
    """Return the bias that alone is added to an output, and the output of that sum; None if there is none."""
    targets = list(output.get_target_inputs())
    if len(targets) != 1 or (node := targets[0].get_node()).get_type_name() != "Add":
        return None
    other = node.input_value(1 - targets[0].get_index()).get_node()
    if other.get_type_name() != "Constant":
        return None
    bias = np.asarray(other.get_data())
    channels = output.get_partial_shape()[2].get_length()
    return (bias.reshape(-1), node.output(0)) if bias.size == channels == bias.shape[-1] else None


def _products_of_activations(graph: Any) -> list[Any]:
    """Return the MatMul nodes that multiply no weights: those of attention."""
    is_constant: dict[str, bool] = {}
    nodes = []
    for node in graph.get_ordered_ops():
        sources = [node.input_value(number).get_node() for number in range(node.get_input_size())]
        constants = [is_constant[source.get_friendly_name()] for source in sources]
        is_constant[node.get_friendly_name()] = node.get_type_name() == "Constant" or (
            len(constants) > 0 and all(constants)
        )
        if node.get_type_name() == "MatMul" and not any(constants):
            nodes.append(node)
    return nodes


def _second_factors(graph: Any) -> list[Any]:
    """Return the FakeQuantize nodes of second factors without weights: the keys and values of attention."""
    nodes: dict[str, Any] = {}
    for product in _products_of_activations(graph):
        source = product.input_value(1).get_node()
        while source.get_type_name() in MOVES:
            source = source.input_value(0).get_node()
        if source.get_type_name() == "FakeQuantize":
            nodes[source.get_friendly_name()] = source  # queries, keys and values may share one
    return list(nodes.values())


def _to_half_range(node: Any) -> None:
    """Double the range of a FakeQuantize node, so that its values have 7 of 8 bits."""
    opset = importlib.import_module("openvino.opset13")
    for number in range(1, 5):  # limits of the inputs, and of the outputs
        limit = np.asarray(node.input_value(number).get_node().get_data())
        node.input(number).replace_source_output(opset.constant((2 * limit).astype(np.float32)).output(0))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings, progress and log lines of exporters."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(max(before, logging.WARNING))
        try:
            yield
        finally:
            logging.disable(before)
