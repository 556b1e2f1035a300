"""`weft explain`: write a figure and an .npz file for each image."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weft.data import BadImage, eval_transform, open_image
from weft.durable import writing
from weft.errors import unknown
from weft.interpret import Explanation, explain
from weft.interpret.explaining import check_explainable
from weft.text import printable
from weft.train.apply import expanded, opened, options_of
from weft.train.build import preprocessing
from weft.train.progress import counting
from weft.train.rundir import make_dir, write_text

INDEX = "explanations.json"


@dataclass(frozen=True)
class Explained:
    """One picture: what it was called, with which probability, and the files; or why there are none."""

    image: str
    label: str | None = None
    probability: float | None = None
    panel: str | None = None
    arrays: str | None = None
    error: str | None = None


def explain_run(
    run: str | Path,
    images: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    label: str | None = None,
    img_size: int | tuple[int, int] | str | None = None,
    device: str | None = None,
    grad_cam: bool = True,
    limit: int | None = None,
    force: bool = False,
    quiet: bool = False,
) -> list[Explained]:
    """`weft.explain` for a run or model directory and for many pictures.

    Args:
        run: a run directory, whose best model is taken, or a model directory; or, without Grad-CAM, an export.
        images: files, folders (every image below them) or patterns such as 'x/*.png'.
        out: a directory for a .png and a .npz of every picture, and explanations.json, which lists them.
        label: name of the class to explain; None for the likeliest of each picture.
        img_size, device, limit: as in `predict`.
        grad_cam: compute it, by captum.
        force: take the place of explanations that are there.
        quiet: no progress.

    Raises:
        UsageError: Grad-CAM of an export, an unknown class, a directory that is taken, captum is not installed.
        CheckpointError: no model there, or one that cannot be read.
    """
    options = options_of(None, img_size, device, None, None, limit)
    model, names, _ = opened(run, options)
    check_explainable(model, grad_cam)  # before anything is written
    names = names or [str(number) for number in range(model.num_classes)]
    if label is not None and label not in names:
        raise unknown("class", label, names, "config.json of the model")
    number = None if label is None else names.index(label)
    transform: Any = eval_transform(preprocessing(model))
    paths = list(expanded([images] if isinstance(images, (str, Path)) else images))[: options.data.limit]
    folder = Path(out)
    make_dir(folder, [INDEX, *_written_before(folder)], force=force)

    found: list[Explained] = []
    taken: set[str] = set()
    with counting(len(paths), quiet=quiet) as advance:
        for path in paths:
            try:
                tensor = transform(open_image(Path(path)))
            except BadImage as error:
                found.append(Explained(printable(path), error=str(error)))
                continue
            explanation = explain(model, tensor, label=number, grad_cam=grad_cam)
            stem = _free(Path(path).stem, taken)
            _write(folder / stem, explanation, names, printable(Path(path).name))
            share = float(explanation.probabilities[explanation.label])
            found.append(Explained(printable(path), names[explanation.label], share, f"{stem}.png", f"{stem}.npz"))
            advance(1)
    write_text(folder / INDEX, json.dumps([vars(row) for row in found], indent=2) + "\n")
    return found


def _write(stem: Path, found: Explanation, names: Sequence[str], title: str) -> None:
    from weft.interpret.panels import panels  # matplotlib

    arrays: dict[str, Any] = {f"attention/{level}": fmap for level, fmap in found.attention.items()}
    for name in ("rollout", "depth", "grad_cam"):
        if (array := getattr(found, name)) is not None:
            arrays[name] = array
    with writing(stem.parent):
        panels(found, names, title).savefig(stem.with_name(f"{stem.name}.png"), dpi=130, metadata={"Software": None})
        np.savez_compressed(
            stem.with_name(f"{stem.name}.npz"), picture=found.picture, probabilities=found.probabilities, **arrays
        )


def _free(stem: str, taken: set[str]) -> str:
    """A name for files that no other picture has."""
    stem = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in stem)[:80] or "picture"
    name, number = stem, 1
    while name.lower() in taken:
        number += 1
        name = f"{stem}-{number}"
    taken.add(name.lower())
    return name


def _written_before(folder: Path) -> list[str]:
    """Names of the files that an earlier call left there."""
    try:
        rows = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        return [row[key] for row in rows for key in ("panel", "arrays") if row[key]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
