"""Run exports: one class for all runtimes. No torch is imported; `weft.deploy.exported` has the interface of a model.

weft loads only formats that contain no code: ONNX with ONNX Runtime, and OpenVINO's format with OpenVINO. A `.pt2` file
can contain any code, so weft writes and verifies such files but never loads one from a directory.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from weft import processor
from weft.checkpoints.confidence import parse_confidence
from weft.checkpoints.config import PREPROCESSING, read_config
from weft.checkpoints.unknown import FILE as DETECTOR
from weft.checkpoints.unknown import UnknownDetector, read_detector
from weft.deploy import choosing
from weft.deploy.onnx_runtime import import_onnx_runtime
from weft.errors import CheckpointError, UsageError, WeftError, need
from weft.files import sha256_of
from weft.models.families import family_named
from weft.models.family import Family
from weft.progress import say
from weft.text import printable, reason_of

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
PRECISIONS = ("fp32", "fp16", "bf16", "int8")


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


class Export:
    """An export in its runtime: from images to logits, as NumPy arrays. Imports no torch.

    Args:
        graph: the loaded graph.
        config: config.json of the export.
        unknown: detector of unknown images, used if the graph gives features.

    Attributes:
        num_classes, pretrained_cfg: as in the model that was exported.
        label_names: the class names, or None if there are none.
        size: (channels, height, width) of the images.
        format, precision: of the export.
    """

    def __init__(self, graph: LoadedGraph, config: dict[str, Any], unknown: UnknownDetector | None = None) -> None:
        self.graph, self.config = graph, config
        self.num_classes = int(config["num_classes"])
        cfg = {key: config["pretrained_cfg"][key] for key in PREPROCESSING if key in config["pretrained_cfg"]}
        self.pretrained_cfg = {**cfg, "num_classes": self.num_classes}
        self.label_names: list[str] | None = config.get("label_names")
        self.size = tuple(config["artefact"]["input"])
        self.confidence = parse_confidence(config.get("confidence"))
        self.unknown = unknown if graph.has_features else None
        self.format, self.precision = config["artefact"]["format"], config["artefact"]["precision"]

    @property
    def family(self) -> Family | None:
        """Family of the network that was exported; None if it is not one of weft's networks."""
        return family_named(self.config["architecture"].removeprefix("weft_"))

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Return the logits (b num_classes) of images (b c h w).

        Raises:
            UsageError: the images have another size.
        """
        return self.graph(self._checked(images))

    def run_with_attention(self, images: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return logits and the attention weights (b heads n m) of every layer in order, from one forward pass.

        Raises:
            UsageError: the images have another size.
        """
        return self.graph.run_with_attention(self._checked(images))

    def run_with_features(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return logits, and the inputs of the classifier (b features), from one forward pass.

        Raises:
            UsageError: the images have another size.
        """
        logits, features = self.graph.run_with_features(self._checked(images))
        return logits, features.astype(np.float32)

    def _checked(self, images: np.ndarray) -> np.ndarray:
        if tuple(images.shape[1:]) != self.size:
            channels, height, width = self.size
            raise UsageError(
                f"The images must be {channels}x{height}x{width}, as the export was made for; got"
                f" {'x'.join(map(str, images.shape[1:]))}. For another size, export the model again."
            )
        return np.ascontiguousarray(images, np.float32)

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Check an input size; an export has exactly one.

        Raises:
            UsageError: `img_size` is not that of the export.
        """
        height_width = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
        if height_width != self.size[1:]:
            raise UsageError(
                f"img_size must be that of the export, {self.size[1]}x{self.size[2]}; got {height_width[0]}x"
                f"{height_width[1]}. For another size, export the model again."
            )


def open_export(
    path: Path, config: dict[str, Any], threads: int | None = None, *, is_fixed: bool = False, quiet: bool = False
) -> Export:
    """Load an export, and run it once; of a directory of format auto, the fastest export on this machine.

    Args:
        path: its directory.
        config: its config.json, which `weft.checkpoints.config.read_config` has checked.
        threads: number of threads; None for `weft.processor.num_threads`.
        is_fixed: of a directory of format auto, load the export in the directory itself.
        quiet: print no notes.

    Raises:
        CheckpointError: a file is missing, damaged, or of another version of weft.
        UsageError: the runtime of the export is not installed.
    """
    if (path / choosing.FILE).exists() and not is_fixed:
        export = _open_fastest(path, threads, quiet=quiet)
    else:
        export = _open_one(path, config, threads)
    if not quiet and (note := choosing.saturation_note(export.config)) is not None:
        say(note)
    return export


def _open_fastest(folder: Path, threads: int | None, *, quiet: bool) -> Export:
    """Open the fastest export of a directory of format auto; measure again on a machine that is not the recorded one.

    int8 exports whose sums saturate on this machine are opened only if no other export can be.

    Raises:
        CheckpointError: chosen.json is damaged, or no export can be opened.
    """
    choice = choosing.read_choice(folder)
    if choice.machine == choosing.machine(threads):
        return _open_one(folder, read_config(folder), threads)
    exports = choosing.exports_in(folder, choice)
    notes = {name: choosing.saturation_note(read_config(path)) for name, path in exports.items()}
    accurate = {name: path for name, path in exports.items() if notes[name] is None}
    settings = (choice.batch_sizes, threads or processor.num_threads())
    known = choosing.recall(exports.values(), *settings)
    if known in (accurate or exports):
        with contextlib.suppress(WeftError):  # damaged since then: measured again
            return _open_one(exports[known], read_config(exports[known]), threads)
    opened, errors = _open_all(accurate, threads)
    if not opened:
        rest = {name: path for name, path in exports.items() if name not in accurate}
        opened, others = _open_all(rest, threads)
        errors += others
    if not opened:
        raise errors[0]
    if not quiet:
        for error in errors:
            say(f"Not considered: {error}")
        for name, note in notes.items():
            if note is not None and name not in opened:
                say(f"Not considered: {name}. {note}")
    if len(opened) == 1:
        (name,) = opened
        seconds = {}
    else:
        try:
            seconds = choosing.time_calls({name: _call_of(one) for name, one in opened.items()}, choice.batch_sizes)
        except Exception as error:  # too little memory for a batch size; each runtime has its own exception types
            name = next((name for name in opened if exports[name] == folder), next(iter(opened)))
            if not quiet:
                text = f"The exports in {printable(str(folder))} cannot be timed here ({reason_of(error)})"
                say(f"{text}. weft uses {name}.")
            return opened[name]
        name = choosing.fastest(seconds)
    is_complete = not any(isinstance(error, CheckpointError) for error in errors)
    choosing.remember(name, exports.values(), *settings, is_final=is_complete)
    if seconds and not quiet:
        say(
            f"The export in {printable(str(folder))} was chosen on another machine or with other runtimes, so weft"
            f" measured again: {choosing.speeds_text(seconds)}. It uses {name}."
        )
    return opened[name]


def _open_all(exports: Mapping[str, Path], threads: int | None) -> tuple[dict[str, Export], list[WeftError]]:
    """Open exports; return those that can be opened, and the errors of the others."""
    opened: dict[str, Export] = {}
    errors: list[WeftError] = []
    for name, path in exports.items():
        try:
            opened[name] = _open_one(path, read_config(path), threads)
        except WeftError as error:  # its runtime is not installed here, or it is damaged
            errors.append(error)
    return opened, errors


def _call_of(model: Export) -> Callable[[int], object]:
    return lambda count: model.graph(np.zeros((count, *model.size), np.float32))


def _open_one(path: Path, config: dict[str, Any], threads: int | None) -> Export:
    try:
        return _opened(path, config, threads)
    except OSError as error:
        raise CheckpointError(
            f"The files in {printable(str(path))} must be readable; they are not ({reason_of(error)})."
        ) from error


def _opened(path: Path, config: dict[str, Any], threads: int | None) -> Export:
    artefact = config["artefact"]
    if artefact.get("format") not in FILES or artefact.get("version") != 1:
        raise CheckpointError(
            f"{path / 'config.json'} must describe an export of version 1 in {', '.join(FILES)}; got {artefact!r}."
            " It was made by another version of weft, or it is damaged. Export the model again."
        )
    if artefact.get("precision") not in PRECISIONS:
        raise CheckpointError(
            f"{path / 'config.json'} must name a precision of {', '.join(PRECISIONS)}; got"
            f" {artefact.get('precision')!r}. Export the model again."
        )
    if artefact["format"] not in RUNTIMES:
        raise CheckpointError(
            f"{path} contains a .pt2 file, which can contain any code, so weft does not load it. If you trust it, load"
            " it with torch.export.load (aotinductor: torch._inductor.aoti_load_package), or export to onnx or"
            " openvino."
        )
    for name in FILES[artefact["format"]]:
        if not (path / name).is_file() or sha256_of(path / name) != artefact["sha256"].get(name):
            raise CheckpointError(
                f"{path / name} must exist and have the sha256 that config.json states; it is missing or damaged."
                " Export the model again."
            )
    need(artefact["format"], RUNTIMES[artefact["format"]])
    file = path / FILES[artefact["format"]][0]
    detector = read_detector(path, config.get("unknown"))
    if detector is None and config.get("unknown") is not None:
        raise CheckpointError(
            f"{path / DETECTOR} must exist, as config.json states; it is missing. Copy it again, or export the model"
            " again."
        )
    try:
        graph = run_file(file, artefact["format"], artefact["precision"], threads, features=detector is not None)
        shape = graph(np.zeros((1, *artefact["input"]), np.float32)).shape
    except WeftError:  # a package is not installed
        raise
    except Exception as error:  # each runtime has its own exception types
        reason = reason_of(error).replace(str(path), "")
        raise CheckpointError(
            f"{file} must contain a graph that {artefact['format']} can run; it cannot ({type(error).__name__}:"
            f" {reason}). Export the model again."
        ) from error
    if shape != (1, config["num_classes"]):
        raise CheckpointError(
            f"{file} must return {config['num_classes']} logits per image, as config.json states; it returns {shape}."
            " Export the model again."
        )
    return Export(graph, config, detector)


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
        dynamic: the graph for any batch size; None where it would crash.
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
        is_unsafe = precision == "int8" and ("amx_int8" in flags or not flags)  # none are known on Windows
        self.dynamic = None if is_unsafe else self.core.compile_model(self._read(), "CPU", self.hints)
        self.fixed: dict[int, Any] = {}
        self._with_attention: Any = None

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
        if self.dynamic is None:
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
