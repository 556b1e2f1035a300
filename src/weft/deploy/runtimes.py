"""The runtimes of exports, ONNX Runtime and OpenVINO: from a file to logits, features and attention. No torch."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.deploy.formats import PACKAGES
from weft.deploy.model import ModelInfo, Outputs
from weft.errors import UsageError, need
from weft.machine import processor

Infer = Callable[[np.ndarray], np.ndarray]  # from images (b c h w) to logits (b num_classes), float32
FILES = {"onnx": ("model.onnx",), "openvino": ("model.xml", "model.bin"), "torch": ("model.pt2",)}
FIXED = 4  # number of batch sizes for which OpenVINO compiles a separate graph
LARGEST = 64  # largest batch where OpenVINO has no graph for any batch size
LINEAR_ONNX = ("Gemm", "MatMul")  # operators of a linear layer
AROUND_LINEAR = ("Add", "Cast")  # its bias, number formats


def run_file(
    file: Path,
    format: str,
    precision: str,
    threads: int | None = None,
    fixed: int = FIXED,
    *,
    features: bool = False,
    info: ModelInfo | None = None,
) -> OnnxModel | OpenVinoModel:
    """Load the file of an export into its runtime.

    Args:
        file: for OpenVINO the .xml.
        format: `onnx` or `openvino`.
        precision: number format to compute in; `bf16` also for a file in float32, where the runtime supports it.
        threads: number of threads of the runtime; None for `weft.machine.processor.num_threads`.
        fixed: number of batch sizes for which OpenVINO may compile a separate graph.
        features: also compute the inputs of the classifier, if it is linear.
        info: description of the model; None for one of format and precision alone.
    """
    need(format, PACKAGES[format])
    threads, info = threads or processor.num_threads(), info or ModelInfo(runtime=format, precision=precision)
    if format == "onnx":
        return OnnxModel(file, info, threads, features)
    return OpenVinoModel(file, info, threads, fixed, features)


def import_onnx_runtime() -> Any:
    """Return the package onnxruntime, without its telemetry.

    Version 1.31 stores a device number in the user's cache directory when it is imported, and sends events to
    Microsoft, unless a variable of the environment is set before.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    return importlib.import_module("onnxruntime")


class OnnxModel:
    """An ONNX file in ONNX Runtime; the first request of attention creates a second session, with more outputs.

    Attributes:
        info: description of the model.
        has_features: whether `run` can return features: they were requested, and the graph ends in a linear classifier.
    """

    def __init__(self, file: Path, info: ModelInfo, threads: int, features: bool = False) -> None:
        self.info, self._file, self._threads, self._features = info, file, threads, features
        graph, self.has_features = _onnx_with(file, features=True) if features else (str(file), False)
        self._session = self._opened(graph)

    def run(self, images: np.ndarray, *, features: bool = False, attention: bool = False) -> Outputs:
        """Run one forward pass, as `weft.deploy.model.Model.run`."""
        session = self._with_attention if attention else self._session
        arrays = session.run(None, {session.get_inputs()[0].name: _checked(images, self.info)})
        return _outputs(arrays, self.has_features, features)

    def compile_for(self, batch_sizes: Sequence[int]) -> None:
        """Do nothing: ONNX Runtime runs all batch sizes alike."""

    @functools.cached_property
    def _with_attention(self) -> Any:
        return self._opened(_onnx_with(self._file, features=self._features, attention=True)[0])

    def _opened(self, graph: str | bytes) -> Any:
        runtime = import_onnx_runtime()
        options = runtime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = self._threads, 3
        return runtime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def _checked(images: np.ndarray, info: ModelInfo) -> np.ndarray:
    """Return images as a runtime takes them; raise a UsageError if they do not have the size of the export."""
    size = info.pretrained_cfg.get("input_size")
    if size is not None and tuple(images.shape[1:]) != tuple(size):
        raise UsageError(
            f"The images must be {'x'.join(map(str, size))}, as the export was made for; got"
            f" {'x'.join(map(str, images.shape[1:]))}. For another size, export the model again."
        )
    return np.ascontiguousarray(images, np.float32)


def _outputs(arrays: Sequence[np.ndarray], has_features: bool, wants_features: bool) -> Outputs:
    """Return the outputs of a graph by name: logits, features if it has them, attention weights."""
    logits, *attention = arrays
    features = attention.pop(0).astype(np.float32) if has_features else None
    return Outputs(logits, features if wants_features else None, attention)


def _onnx_with(file: Path, *, features: bool = False, attention: bool = False) -> tuple[bytes, bool]:
    """Return an ONNX file with features and attention weights as further outputs, and whether it has features."""
    need("onnx", "onnx")
    onnx = importlib.import_module("onnx")
    model = onnx.load(str(file))
    softmax = [node.output[0] for node in model.graph.node if attention and node.op_type == "Softmax"]
    classifier = onnx_classifier(model.graph) if features else None
    inputs = [] if classifier is None else [classifier[1]]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inputs + softmax)
    return model.SerializeToString(), classifier is not None


def onnx_classifier(graph: Any) -> tuple[Any, str] | None:
    """Return the node of the linear classifier of an ONNX graph and the name of its inputs; None without one."""
    made_by = {name: node for node in graph.node for name in node.output}
    name = graph.output[0].name
    while name in made_by and made_by[name].op_type in (*LINEAR_ONNX, *AROUND_LINEAR):
        node = made_by[name]
        name = next((given for given in node.input if given in made_by and not _is_weight(given, made_by)), "")
        if node.op_type in LINEAR_ONNX:
            return node, name
    return None


def _is_weight(name: str, made_by: dict[str, Any]) -> bool:
    """Return whether a value is computed from constants alone, such as a weight of 16 bits."""
    return name not in made_by or (
        all(given not in made_by for given in made_by[name].input if given)
        and (made_by[name].op_type in ("Constant", "Transpose", "Cast"))
    )


def openvino_classifier(graph: Any) -> Any:
    """Return the MatMul node of the linear classifier of an OpenVINO model; None without one."""
    node = graph.get_results()[0].input_value(0).get_node()
    while node.get_type_name() in ("Add", "Convert", "Multiply"):
        node = node.input_value(0).get_node()
    return node if node.get_type_name() == "MatMul" else None


@functools.cache
def openvino_core() -> Any:
    """Return OpenVINO's core; the process has only one.

    Each core installs an alternate signal stack in the thread that loads its CPU plugin, and restores the previous one
    when it is destroyed. If two cores are destroyed in the order of their creation, the restored stack has been freed,
    and the next signal, for example Ctrl-C, ends the process with a segmentation fault (OpenVINO 2026.4).
    """
    core = importlib.import_module("openvino").Core()
    core.get_versions("CPU")  # load the plugin now, in this thread
    return core


class OpenVinoModel:
    """A model in OpenVINO: one graph for any batch size, and separate graphs for the first batch sizes that occur.

    OpenVINO removes layout conversions only if it knows the batch size. This saves up to a sixth of the time
    (benchmarks/speed/choices.csv), and costs 0.3 s and one more copy of the weights per graph.

    On CPUs with AMX, int8 with an unknown batch size crashes with a segmentation fault (OpenVINO 2026.1 to 2026.4,
    openvino issue 37577). There, no graph for any batch size is compiled: batches are padded to a power of two, and
    each such size has a separate graph.

    Args:
        file: the .xml file.
        info: description of the model, with the number format to compute in.
        threads: number of threads.
        max_fixed: maximum number of separate graphs next to the one for any batch size.
        features: also compute the inputs of the classifier, if it is linear.

    Attributes:
        info: description of the model.
        has_features: whether `run` can return features.
        is_dynamic: whether a graph for any batch size is possible; False where it would crash.
        fixed: the separate graphs, by batch size.
    """

    def __init__(self, file: Path, info: ModelInfo, threads: int, max_fixed: int, features: bool = False) -> None:
        self.info, self.core, self._file, self._max_fixed = info, openvino_core(), file, max_fixed
        self.has_features = features and openvino_classifier(self.core.read_model(str(file))) is not None
        is_bf16 = info.precision in ("bf16", "int8") and processor.has_bf16()
        self.hints = {
            "INFERENCE_PRECISION_HINT": "bf16" if is_bf16 else "f32",
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
        }
        if threads < processor.available_cores():
            # every process pins its threads from the first core on, so that several would compute on the same cores
            self.hints["ENABLE_CPU_PINNING"] = False
        flags = processor.cpu_flags()
        # the flags are not known on Windows
        self.is_dynamic = info.precision != "int8" or (bool(flags) and "amx_int8" not in flags)
        self.fixed: dict[int, Any] = {}

    def run(self, images: np.ndarray, *, features: bool = False, attention: bool = False) -> Outputs:
        """Run one forward pass, as `weft.deploy.model.Model.run`; with attention image by image."""
        images = _checked(images, self.info)
        if attention:
            rows = [_arrays(self._with_attention(image[None])) for image in images]
            return _outputs([np.concatenate(parts) for parts in zip(*rows, strict=True)], self.has_features, features)
        return _outputs(self._run(images), self.has_features, features)

    def compile_for(self, batch_sizes: Sequence[int]) -> None:
        """Compile a separate graph for each of these batch sizes; all others run in the graph for any batch size."""
        if self.is_dynamic:
            self.fixed = {size: self._fixed_graph(size) for size in batch_sizes}
            self._max_fixed = len(self.fixed)

    @functools.cached_property
    def dynamic(self) -> Any:
        """The graph for any batch size, which is compiled when it is needed first: one image does not need it."""
        return self._compiled(self._read())

    @functools.cached_property
    def _with_attention(self) -> Any:
        """A graph of batch size 1 with the outputs of all softmax nodes in order: the attention weights."""
        graph = self._read()
        graph.add_outputs([op.output(0) for op in graph.get_ordered_ops() if op.get_type_name() == "Softmax"])
        return self._compiled(graph, 1)

    def _read(self) -> Any:
        graph = self.core.read_model(str(self._file))
        if self.has_features:
            graph.add_outputs([openvino_classifier(graph).input_value(0)])
        return graph

    def _compiled(self, graph: Any, batch_size: int | None = None) -> Any:
        """Compile a graph, for one batch size or for any."""
        if batch_size is not None:
            _, *size = graph.inputs[0].get_partial_shape()
            graph.reshape([batch_size, *size])
        return self.core.compile_model(graph, "CPU", self.hints)

    def _run(self, images: np.ndarray) -> list[np.ndarray]:
        size = len(images)
        if not self.is_dynamic:
            chunks = [images[start : start + LARGEST] for start in range(0, size, LARGEST)]
            outputs = [self._run_padded(chunk) for chunk in chunks]
            return [np.concatenate(parts) for parts in zip(*outputs, strict=True)]
        if size in self.fixed or len(self.fixed) < self._max_fixed:
            return _arrays(self._fixed_graph(size)(images))
        return _arrays(self.dynamic(images))

    def _run_padded(self, images: np.ndarray) -> list[np.ndarray]:
        padded = np.zeros((1 << (len(images) - 1).bit_length(), *images.shape[1:]), images.dtype)
        padded[: len(images)] = images
        return [rows[: len(images)] for rows in _arrays(self._fixed_graph(len(padded))(padded))]

    def _fixed_graph(self, batch_size: int) -> Any:
        if batch_size not in self.fixed:
            self.fixed[batch_size] = self._compiled(self._read(), batch_size)
        return self.fixed[batch_size]


def _arrays(outputs: Any) -> list[np.ndarray]:
    """Copy the outputs of an inference request, whose memory is used again by the next."""
    return [np.array(outputs[number]) for number in range(len(outputs))]
