"""Open exports: check their files, load them into their runtimes, and choose the fastest one. No torch is imported.

weft loads only formats that contain no code: ONNX with ONNX Runtime, and OpenVINO's format with OpenVINO. A `.pt2` file
can contain any code, so weft writes and verifies such files but never loads one from a directory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from weft import processor
from weft.checkpoints.config import PREPROCESSING, read_config
from weft.checkpoints.unknown import UnknownDetector, read_detector
from weft.deploy import choosing
from weft.deploy.runtimes import FILES, RUNTIMES, LoadedGraph, run_file
from weft.errors import CheckpointError, UsageError, WeftError, need
from weft.files import sha256_of
from weft.models.families import family_named
from weft.models.family import Family
from weft.progress import Work, say
from weft.text import printable, reason_of

PRECISIONS = ("fp32", "fp16", "bf16", "int8")


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
        self.confidence = config.get("confidence")
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


def open_export(path: Path, config: dict[str, Any], threads: int | None = None, *, is_fixed: bool = False) -> Export:
    """Load an export, and run it once; of a directory of format auto, the fastest export on this machine.

    Args:
        path: its directory.
        config: its config.json, which `weft.checkpoints.config.read_config` has checked.
        threads: number of threads; None for `weft.processor.num_threads`.
        is_fixed: of a directory of format auto, load the export in the directory itself.

    Raises:
        CheckpointError: a file is missing, damaged, or of another version of weft.
        UsageError: the runtime of the export is not installed.
    """
    if (path / choosing.FILE).exists() and not is_fixed:
        export = _open_fastest(path, threads)
    else:
        export = _open_one(path, config, threads)
    if (note := choosing.saturation_note(export.config)) is not None:
        say(note)
    return export


def _open_fastest(folder: Path, threads: int | None) -> Export:
    """Open the fastest export of a directory of format auto; measure again on a machine that is not the recorded one.

    int8 exports whose sums saturate on this machine are opened only if no other export can be.

    Raises:
        CheckpointError: chosen.json is damaged, or no export can be opened.
    """
    choice, config = choosing.read_choice(folder), read_config(folder)
    others = {one.name for one in choice.candidates} - {choice.chosen}  # at the top instead of the chosen one
    if choice.machine == choosing.machine(threads) and choosing.kind_of(config) not in others:
        return _open_one(folder, config, threads)
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
    for error in errors:
        say(f"Not considered: {error}")
    for name, note in notes.items():
        if note is not None and name not in opened:
            say(f"Not considered: {name}. {note}")
    if len(opened) == 1:
        (name,) = opened
        seconds = {}
    else:
        reasons: dict[int, str] = {}
        with Work("timing the exports"):
            seconds = choosing.time_sizes(
                {name: _call_of(one) for name, one in opened.items()},
                choice.batch_sizes,
                reasons.__setitem__,
                choosing.MAX_SECONDS,
            )
        if not all(seconds.values()):
            name = next((name for name in opened if exports[name] == folder), next(iter(opened)))
            text = f"The exports in {printable(str(folder))} cannot be timed here ({next(iter(reasons.values()))})"
            say(f"{text}. weft uses {name}.")
            return opened[name]
        name = choosing.fastest(seconds)
    is_complete = not any(isinstance(error, CheckpointError) for error in errors)
    choosing.remember(name, exports.values(), *settings, is_final=is_complete)
    if seconds:
        say(
            f"The export in {printable(str(folder))} was chosen on another machine, with other runtimes or with another"
            f" number of threads, so weft measured again: {choosing.speeds_text(seconds)}. It uses {name}."
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
