"""Class names and preprocessing in the files next to third-party weights, as transformers, timm and weft write them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from weft.checkpoints.config import CONFIG, PREPROCESSING
from weft.reading import read_json

PROCESSOR = "preprocessor_config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # of transformers and timm; the first that exists is read
RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers
LEVIT_SCALE = 256 / 224  # LevitImageProcessor resizes to this multiple of `shortest_edge`
SQUASH_FROM = 384  # pixels from which ConvNextImageProcessor, also that of CvT, does not crop


def weights_in(source: Path) -> Path:
    """Return the file of weights of a folder that transformers or timm wrote; any other path is unchanged."""
    return next((source / name for name in WEIGHTS if source.is_dir() and (source / name).is_file()), source)


def read_metadata(folder: Path) -> tuple[list[str] | None, dict[str, Any], tuple[str, ...]]:
    """Read the class names and the preprocessing next to weights.

    Returns:
        Class names in the order of the logits, or None; entries of timm's `pretrained_cfg`; names of the files used.

    Raises:
        CheckpointError: a file is not a JSON object.
    """
    config, processor = (
        read_json(folder / name, dict[str, Any]) if (folder / name).is_file() else {} for name in (CONFIG, PROCESSOR)
    )
    cfg = config.get("pretrained_cfg")
    cfg = cfg if isinstance(cfg, dict) else {}
    names = _names(config.get("label_names") or cfg.get("label_names") or config.get("id2label"))
    of_processor = _preprocessing(processor)
    values = of_processor or {key: cfg[key] for key in PREPROCESSING if key in cfg}
    used = {CONFIG: bool(names or (values and not of_processor)), PROCESSOR: bool(of_processor)}
    return names, values, tuple(name for name, is_used in used.items() if is_used)


def _names(found: Any) -> list[str] | None:
    """Return class names from a list, or from transformers' `id2label`; None for placeholders such as LABEL_0."""
    if isinstance(found, dict) and found.keys() == {str(i) for i in range(len(found))}:
        found = [found[str(i)] for i in range(len(found))]
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        return None
    if found == [f"LABEL_{i}" for i in range(len(found))]:
        return None
    counts = Counter(found)  # ImageNet has two classes `crane`
    return [name if counts[name] == 1 else f"{name} ({i})" for i, name in enumerate(found)]


def _preprocessing(processor: dict[str, Any]) -> dict[str, Any]:
    """Return the preprocessing of transformers' image processor under timm's keys."""
    mean, std = processor.get("image_mean"), processor.get("image_std")
    values: dict[str, Any] = {}
    if isinstance(mean, list) and isinstance(std, list) and processor.get("do_normalize", True):
        values |= {"mean": mean, "std": std}
    if (interpolation := RESAMPLE.get(processor.get("resample", -1))) is not None:
        values["interpolation"] = interpolation
    height, width, is_short = _sides(processor.get("size"))
    if not height:
        return values
    kind = str(processor.get("image_processor_type") or processor.get("feature_extractor_type") or "")
    crop_height, crop_width, _ = _sides(processor.get("crop_size") if processor.get("do_center_crop") else None)
    mode, share = "center" if is_short else "squash", 1.0
    if kind.startswith("ConvNext") and is_short and height >= SQUASH_FROM:
        mode = "squash"
    elif kind.startswith("ConvNext") and is_short:
        share = float(processor.get("crop_pct", 224 / 256))
    elif crop_height:
        share = crop_height / int(height * (LEVIT_SCALE if kind.startswith("Levit") else 1))
        height, width = crop_height, crop_width
    size = [len(mean) if isinstance(mean, list) else 3, height, width]
    return values | {"input_size": size, "crop_pct": share, "crop_mode": mode}


def _sides(size: Any) -> tuple[int, int, bool]:
    """Return height and width, and whether they are the shorter side of the image; zeros for anything else."""
    match size:
        case int(short) | {"shortest_edge": int(short)}:
            return short, short, True
        case {"height": int(height), "width": int(width)}:
            return height, width, False
    return 0, 0, False
