"""Run exports: one class for all runtimes, used like a model.

Only formats that hold no code are opened: ONNX by ONNX Runtime, OpenVINO's own by OpenVINO. A `.pt2` can hold
any code, so weft writes it and checks it, and leaves loading it to those who made it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from weft import processor
from weft.checkpoints import load_model_dir
from weft.checkpoints.model_dir import PREPROCESSING, more_arguments, read_config
from weft.durable import sha256_of
from weft.errors import CheckpointError, UsageError, need
from weft.models.families import VARIANTS
from weft.models.registry import build_described

Answer = Callable[[np.ndarray], np.ndarray]
FILES = {
    "onnx": ("model.onnx",),
    "openvino": ("model.xml", "model.bin"),
    "torch": ("model.pt2",),
    "aotinductor": ("model.pt2",),
}
FIXED = 4  # batch sizes that have a graph of their own in OpenVINO
LARGEST = 64  # batch where OpenVINO cannot be asked for any size
RUNTIMES = {"onnx": "onnxruntime", "openvino": "openvino"}


class OpenFile(Protocol):
    """An export in its runtime."""

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Logits (b num_classes) of images (b c h w), float32."""
        ...

    def run_with_attention(self, images: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """The same, and what every softmax of the network gave: the weights of its attentions, in their order."""
        ...


class ExportedModel(nn.Module):
    """An export that answers like the model it was made from: images (b c h w) in, logits (b num_classes) out.

    Args:
        answer: from an array of images to one of logits, and to attention.
        config: of the artefact's directory.

    Attributes:
        num_classes, pretrained_cfg, default_cfg: as those of the model.
        size: (channels, height, width) of the images.
        format, precision: of the export.
    """

    def __init__(self, answer: OpenFile, config: dict[str, Any]) -> None:
        super().__init__()
        self.answer = answer
        self.num_classes = int(config["num_classes"])
        cfg = {key: config["pretrained_cfg"][key] for key in PREPROCESSING if key in config["pretrained_cfg"]}
        self.pretrained_cfg = self.default_cfg = {**cfg, "num_classes": self.num_classes}
        self.size = tuple(config["artefact"]["input"])
        self.config = config
        self.format, self.precision = config["artefact"]["format"], config["artefact"]["precision"]

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images on the CPU.

        Raises:
            UsageError: images of another size.
        """
        return torch.from_numpy(self.answer(self._checked(x)))

    def run_with_attention(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Logits, and the weights (b heads n m) of every attention in its order, of one and the same pass.

        Raises:
            UsageError: images of another size.
        """
        logits, weights = self.answer.run_with_attention(self._checked(x))
        return torch.from_numpy(logits), [torch.from_numpy(weight) for weight in weights]

    @functools.cached_property
    def network(self) -> nn.Module | None:
        """The architecture it was made of, without memory for weights: what its attention means. None where that is
        not one of weft's."""
        name = self.config["architecture"].removeprefix("weft_")
        if name not in VARIANTS:
            return None
        with torch.device("meta"):
            return build_described(name, self.config["model_args"], **more_arguments(self.config)).eval()

    def _checked(self, x: Tensor) -> np.ndarray:
        if tuple(x.shape[1:]) != self.size:
            channels, height, width = self.size
            raise UsageError(
                f"This export takes images of {channels}x{height}x{width}; got {'x'.join(map(str, x.shape[1:]))}."
                " Export once more for another size."
            )
        return np.ascontiguousarray(x.detach().cpu().float().numpy())

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """An export has one size.

        Raises:
            UsageError: it is another.
        """
        height_width = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
        if height_width != self.size[1:]:
            raise UsageError(
                f"img_size must be that of the export, {self.size[1]}x{self.size[2]}; got {height_width[0]}x"
                f"{height_width[1]}. Export once more for another size."
            )


def open_model(path: str | Path, threads: int | None = None) -> tuple[Any, list[str] | None]:
    """The model of a directory, whether of weights or an export, and the names of its classes if it has any.

    Args:
        path: the directory.
        threads: with how many an export computes; None for as many as torch has now. Weights compute with torch's.

    Raises:
        CheckpointError: something is missing, damaged, or of another version.
        UsageError: what runs the export is not installed.
    """
    path = Path(path)
    config = read_config(path)
    if "artefact" not in config:
        return load_model_dir(path)
    facts = config["artefact"]
    if not isinstance(facts, dict) or facts.get("format") not in FILES or facts.get("version") != 1:
        raise CheckpointError(
            f"{path / 'config.json'} must describe an export of version 1 in {', '.join(FILES)}; got {facts!r}."
            " It is of another version of weft, or damaged. Export once more."
        )
    if facts["format"] not in RUNTIMES:
        raise CheckpointError(
            f"{path} holds a .pt2, which could hold any code, so weft does not load it. Load it with"
            " torch.export.load (aotinductor: torch._inductor.aoti_load_package) if you trust it, or export to onnx"
            " or openvino."
        )
    for name in FILES[facts["format"]]:
        if not (path / name).is_file() or sha256_of(path / name) != facts["sha256"].get(name):
            raise CheckpointError(
                f"{path / name} must be there with the sha256 that config.json states; it is missing or damaged."
                " Export once more."
            )
    need("deploy", RUNTIMES[facts["format"]])
    file = path / FILES[facts["format"]][0]
    try:
        answer = run_file(file, facts["format"], facts["precision"], threads)
        shape = answer(np.zeros((1, *facts["input"]), np.float32)).shape
    except Exception as error:  # a runtime's own kinds, for a graph that it cannot read or run
        reason = str(error).partition("\n")[0].replace(str(path), "")[:200]
        raise CheckpointError(
            f"{file} must hold a graph that {facts['format']} can run; it cannot ({type(error).__name__}: {reason})."
            " Export once more."
        ) from error
    if shape != (1, config["num_classes"]):
        raise CheckpointError(
            f"{file} must give {config['num_classes']} logits for an image, as config.json states; it gives {shape}."
            " Export once more."
        )
    return ExportedModel(answer, config).eval(), config.get("label_names")


def run_file(path: Path, format: str, precision: str, threads: int | None = None, fixed: int = FIXED) -> OpenFile:
    """A runtime with an export in it.

    Args:
        path: the file, of OpenVINO the .xml.
        format: `onnx` or `openvino`.
        precision: in which to compute: `bf16` where the file has float32 and the runtime offers it.
        threads: of the runtime; None for as many as torch has.
        fixed: for how many batch sizes OpenVINO may prepare a graph of their own.
    """
    need("deploy", RUNTIMES[format])
    threads = threads or torch.get_num_threads()
    return InOnnxRuntime(path, threads) if format == "onnx" else InOpenVino(path, precision, threads, fixed)


class InOnnxRuntime:
    """ONNX Runtime; a second session gives the attention as well, made when it is first asked for."""

    def __init__(self, path: Path, threads: int) -> None:
        self.path, self.threads = path, threads
        self.session = self._opened(str(path))
        self.input = self.session.get_inputs()[0].name
        self._with_attention: Any = None

    def __call__(self, images: np.ndarray) -> np.ndarray:
        return self.session.run(None, {self.input: images})[0]

    def run_with_attention(self, images: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """As `OpenFile.run_with_attention`."""
        if self._with_attention is None:
            need("deploy", "onnx")
            onnx = importlib.import_module("onnx")
            graph = onnx.load(str(self.path))
            for node in graph.graph.node:
                if node.op_type == "Softmax":
                    graph.graph.output.append(onnx.ValueInfoProto(name=node.output[0]))
            self._with_attention = self._opened(graph.SerializeToString())
        logits, *weights = self._with_attention.run(None, {self.input: images})
        return logits, weights

    def _opened(self, graph: str | bytes) -> Any:
        runtime = importlib.import_module("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = self.threads, 3
        return runtime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


@functools.cache
def openvino_core() -> Any:
    """OpenVINO's core, one for the life of the process.

    Each core lays a stack for signals under the thread that loads its CPU plugin, and puts back the one before when
    it goes. Where two go in the order they came, the one put back is gone: the next signal, be it Ctrl-C, ends
    the process with a segmentation fault (OpenVINO 2026.4).
    """
    core = importlib.import_module("openvino").Core()
    core.get_versions("CPU")  # loads the plugin now
    return core


class InOpenVino:
    """OpenVINO with a graph for batches of any size, and one more for each of the first sizes that come.

    OpenVINO drops changes of layout only where it knows the batch: up to a sixth of the time (benchmarks/speed/
    choices.csv), for 0.3 s of preparing and one more copy of the weights.

    On CPUs with AMX, int8 of an unknown batch dies by segmentation fault (OpenVINO 2026.1 to 2026.4, its issue 37577).
    There is no such graph there: batches are filled up to a power of two, each of which has a graph of its own.

    Attributes:
        fixed: the graphs of one batch size each; at most `most` beside one for any size.
    """

    def __init__(self, path: Path, precision: str, threads: int, most: int) -> None:
        self.core, self.path, self.most = openvino_core(), path, most
        self.hints = {
            "INFERENCE_PRECISION_HINT": "bf16" if precision in ("bf16", "int8") and processor.has_bf16() else "f32",
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
        }
        is_unsafe = precision == "int8" and "amx_int8" in processor.cpu_flags()
        self.of_any_size = None if is_unsafe else self.core.compile_model(str(path), "CPU", self.hints)
        self.fixed: dict[int, Any] = {}
        self._with_attention: Any = None

    def __call__(self, images: np.ndarray) -> np.ndarray:
        if self.of_any_size is None:
            pieces = [images[start : start + LARGEST] for start in range(0, len(images), LARGEST)]
            return np.concatenate([self._filled_up(piece) for piece in pieces])
        size = len(images)
        graph = self._of(images.shape) if size in self.fixed or len(self.fixed) < self.most else self.of_any_size
        return np.array(graph(images)[0])

    def run_with_attention(self, images: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """As `OpenFile.run_with_attention`, image by image, in one more graph with a batch size of one."""
        if self._with_attention is None:
            graph = self.core.read_model(str(self.path))
            graph.add_outputs([op.output(0) for op in graph.get_ordered_ops() if op.get_type_name() == "Softmax"])
            graph.reshape([1, *images.shape[1:]])
            self._with_attention = self.core.compile_model(graph, "CPU", self.hints)
        found = [self._with_attention(image[None]) for image in images]
        logits, *weights = (np.concatenate([one[i] for one in found]) for i in range(len(found[0])))
        return logits, weights

    def _filled_up(self, images: np.ndarray) -> np.ndarray:
        full = np.zeros((1 << (len(images) - 1).bit_length(), *images.shape[1:]), images.dtype)
        full[: len(images)] = images
        return np.array(self._of(full.shape)(full)[0][: len(images)])

    def _of(self, shape: tuple[int, ...]) -> Any:
        if shape[0] not in self.fixed:
            graph = self.core.read_model(str(self.path))
            graph.reshape(list(shape))
            self.fixed[shape[0]] = self.core.compile_model(graph, "CPU", self.hints)
        return self.fixed[shape[0]]
