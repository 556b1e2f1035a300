"""The runtimes of exports, ONNX Runtime and OpenVINO: from a file to logits, features and attention. No torch."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from weft import processor
from weft.deploy.onnx_runtime import import_onnx_runtime
from weft.errors import need

Infer = Callable[[np.ndarray], np.ndarray]  # from images (b c h w) to logits (b num_classes), float32
FILES = {
    "onnx": ("model.onnx",),
    "openvino": ("model.xml", "model.bin"),
    "torch": ("model.pt2",),
    "aotinductor": ("model.pt2",),
}
FIXED = 4  # number of batch sizes for which OpenVINO compiles a separate graph
LARGEST = 64  # largest batch where OpenVINO has no graph for any batch size
LINEAR_ONNX = ("Gemm", "MatMul")  # operators of a linear layer
AROUND_LINEAR = ("Add", "Cast", "QuantizeLinear", "DequantizeLinear")  # its bias, number formats
RUNTIMES = {"onnx": "onnxruntime", "openvino": "openvino"}


class LoadedGraph(Protocol):
    """The graph of an export, loaded by its runtime.

    Attributes:
        has_features: whether `run_with_features` works: it was requested, and the graph ends in a linear classifier.
    """

    has_features: bool

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Return logits (b num_classes) of images (b c h w), float32."""
        ...

    def run_with_attention(self, images: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return logits, and the outputs of all softmax nodes in order: the attention weights (b heads n m)."""
        ...

    def run_with_features(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return logits, and the inputs of the classifier (b features)."""
        ...


def run_file(
    path: Path,
    format: str,
    precision: str,
    threads: int | None = None,
    fixed: int = FIXED,
    *,
    features: bool = False,
) -> LoadedGraph:
    """Load the file of an export into its runtime.

    Args:
        path: the file; for OpenVINO the .xml.
        format: `onnx` or `openvino`.
        precision: number format to compute in; `bf16` also for a file in float32, where the runtime supports it.
        threads: number of threads of the runtime; None for `weft.processor.num_threads`.
        fixed: number of batch sizes for which OpenVINO may compile a separate graph.
        features: also output the inputs of the classifier, for `run_with_features`.
    """
    need(format, RUNTIMES[format])
    threads = threads or processor.num_threads()
    if format == "onnx":
        return OnnxGraph(path, threads, features)
    return OpenVinoGraph(path, precision, threads, fixed, features)


class OnnxGraph:
    """A graph in ONNX Runtime; the first call of `run_with_attention` creates a second session, with more outputs."""

    def __init__(self, path: Path, threads: int, features: bool = False) -> None:
        self.path, self.threads = path, threads
        graph = _onnx_with_features(path) if features else None
        self.has_features = graph is not None
        self.session = self._open_session(str(path) if graph is None else graph)
        self.input = self.session.get_inputs()[0].name
        self._with_attention: Any = None

    def __call__(self, images: np.ndarray) -> np.ndarray:
        return self.session.run(None, {self.input: images})[0]

    def run_with_attention(self, images: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return logits and attention weights, as `LoadedGraph.run_with_attention`."""
        if self._with_attention is None:
            need("onnx", "onnx")
            onnx = importlib.import_module("onnx")
            graph = onnx.load(str(self.path))
            for node in graph.graph.node:
                if node.op_type == "Softmax":
                    graph.graph.output.append(onnx.ValueInfoProto(name=node.output[0]))
            self._with_attention = self._open_session(graph.SerializeToString())
        logits, *weights = self._with_attention.run(None, {self.input: images})
        return logits, weights

    def run_with_features(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return logits and the inputs of the classifier, as `LoadedGraph.run_with_features`."""
        logits, features = self.session.run(None, {self.input: images})
        return logits, features

    def _open_session(self, graph: str | bytes) -> Any:
        runtime = import_onnx_runtime()
        options = runtime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = self.threads, 3
        return runtime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def _onnx_with_features(path: Path) -> bytes | None:
    """Return an ONNX file with the inputs of its classifier as second output; None without a linear classifier."""
    need("onnx", "onnx")
    model = importlib.import_module("onnx").load(str(path))
    made_by = {name: node for node in model.graph.node for name in node.output}
    name = model.graph.output[0].name
    while name in made_by and made_by[name].op_type in (*LINEAR_ONNX, *AROUND_LINEAR):
        node = made_by[name]
        name = next((given for given in node.input if given in made_by and not _is_weight(given, made_by)), "")
        if node.op_type in LINEAR_ONNX:
            while name in made_by and made_by[name].op_type in ("QuantizeLinear", "DequantizeLinear"):
                name = made_by[name].input[0]
            model.graph.output.append(type(model.graph.output[0])(name=name))
            return model.SerializeToString()
    return None


def _is_weight(name: str, made_by: dict[str, Any]) -> bool:
    """Return whether a value is computed from constants alone, such as a quantised weight."""
    return name not in made_by or (
        all(given not in made_by for given in made_by[name].input if given)
        and (made_by[name].op_type in ("DequantizeLinear", "Constant", "Transpose", "Cast"))
    )


def _openvino_features(graph: Any) -> Any:
    """Return the output of the inputs of the classifier of an OpenVINO model; None without a linear classifier."""
    output = graph.get_results()[0].input_value(0)
    while output.get_node().get_type_name() in ("Add", "Convert", "MatMul", "Multiply"):
        node = output.get_node()
        output = node.input_value(0)
        if node.get_type_name() == "MatMul":
            while output.get_node().get_type_name() == "FakeQuantize":
                output = output.get_node().input_value(0)
            return output
    return None


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


class OpenVinoGraph:
    """A model in OpenVINO: one graph for any batch size, and separate graphs for the first batch sizes that occur.

    OpenVINO removes layout conversions only if it knows the batch size. This saves up to a sixth of the time
    (benchmarks/speed/choices.csv), and costs 0.3 s and one more copy of the weights per graph.

    On CPUs with AMX, int8 with an unknown batch size crashes with a segmentation fault (OpenVINO 2026.1 to 2026.4,
    openvino issue 37577). There, no graph for any batch size is compiled: batches are padded to a power of two, and
    each such size has a separate graph.

    Args:
        path: the .xml file.
        precision: number format to compute in.
        threads: number of threads.
        max_fixed: maximum number of separate graphs next to the one for any batch size.

    Attributes:
        is_dynamic: whether a graph for any batch size is possible; False where it would crash.
        fixed: the separate graphs, by batch size.
    """

    def __init__(self, path: Path, precision: str, threads: int, max_fixed: int, features: bool = False) -> None:
        self.core, self.path, self.max_fixed = openvino_core(), path, max_fixed
        self.has_features = features and _openvino_features(self.core.read_model(str(path))) is not None
        self.hints = {
            "INFERENCE_PRECISION_HINT": "bf16" if precision in ("bf16", "int8") and processor.has_bf16() else "f32",
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
        }
        if threads < processor.available_cores():
            # every process pins its threads from the first core on, so that several would compute on the same cores
            self.hints["ENABLE_CPU_PINNING"] = False
        flags = processor.cpu_flags()
        self.is_dynamic = precision != "int8" or (bool(flags) and "amx_int8" not in flags)  # none known on Windows
        self.fixed: dict[int, Any] = {}
        self._with_attention: Any = None

    @functools.cached_property
    def dynamic(self) -> Any:
        """The graph for any batch size, which is compiled when it is needed first: one image does not need it."""
        return self.core.compile_model(self._read(), "CPU", self.hints)

    def __call__(self, images: np.ndarray) -> np.ndarray:
        return self._run(images)[0]

    def run_with_features(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return logits and the inputs of the classifier, as `LoadedGraph.run_with_features`."""
        logits, features = self._run(images)
        return logits, features

    def _read(self) -> Any:
        graph = self.core.read_model(str(self.path))
        if self.has_features:
            graph.add_outputs([_openvino_features(graph)])
        return graph

    def _run(self, images: np.ndarray) -> list[np.ndarray]:
        if not self.is_dynamic:
            chunks = [images[start : start + LARGEST] for start in range(0, len(images), LARGEST)]
            outputs = [self._run_padded(chunk) for chunk in chunks]
            return [np.concatenate(parts) for parts in zip(*outputs, strict=True)]
        size = len(images)
        graph = (
            self._fixed_graph(images.shape) if size in self.fixed or len(self.fixed) < self.max_fixed else self.dynamic
        )
        return _arrays(graph(images))

    def run_with_attention(self, images: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return logits and attention weights, image by image, with one more graph of batch size 1."""
        if self._with_attention is None:
            graph = self.core.read_model(str(self.path))
            graph.add_outputs([op.output(0) for op in graph.get_ordered_ops() if op.get_type_name() == "Softmax"])
            graph.reshape([1, *images.shape[1:]])
            self._with_attention = self.core.compile_model(graph, "CPU", self.hints)
        outputs = [self._with_attention(image[None]) for image in images]
        logits, *weights = (np.concatenate([row[i] for row in outputs]) for i in range(len(outputs[0])))
        return logits, weights

    def _run_padded(self, images: np.ndarray) -> list[np.ndarray]:
        padded = np.zeros((1 << (len(images) - 1).bit_length(), *images.shape[1:]), images.dtype)
        padded[: len(images)] = images
        return [rows[: len(images)] for rows in _arrays(self._fixed_graph(padded.shape)(padded))]

    def _fixed_graph(self, shape: tuple[int, ...]) -> Any:
        if shape[0] not in self.fixed:
            graph = self._read()
            graph.reshape(list(shape))
            self.fixed[shape[0]] = self.core.compile_model(graph, "CPU", self.hints)
        return self.fixed[shape[0]]


def _arrays(outputs: Any) -> list[np.ndarray]:
    """Copy the outputs of an inference request, whose memory is used again by the next."""
    return [np.array(outputs[number]) for number in range(len(outputs))]
