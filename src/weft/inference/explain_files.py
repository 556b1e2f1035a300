"""`weft explain`: write a figure and an .npz file for each image."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.checkpoints.resolve import check_model
from weft.data import BadImage
from weft.files import check_output, new_directory, write_file
from weft.inference.arguments import (
    InferenceOptions,
    check_images,
    check_outside_images,
    image_files,
    note_values,
)
from weft.inference.inputs import class_number
from weft.inference.predictor import Predictor
from weft.machine.system import unused_name
from weft.progress import Work, loading, obeys_quiet
from weft.report import markup
from weft.report.notebook import ImageList, described
from weft.text import printable

if TYPE_CHECKING:
    from weft.interpret import Explanation

INDEX = "explanations.json"
MAX_KEPT = 1_000  # explanations with their images in memory


@dataclass(frozen=True)
class FileExplanation:
    """Explanation of one image file: predicted class, its probability, the files written to `folder`; or an error.

    `explanation` has the arrays; after the first 1,000 images it is None, and only the files have them.
    """

    image: str
    label: str | None = None
    probability: float | None = None
    panel: str | None = None
    arrays: str | None = None
    error: str | None = None
    folder: Path = Path()
    explanation: Explanation | None = field(default=None, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the dictionary that `--json` prints."""
        return {name: value for name, value in vars(self).items() if name not in ("folder", "explanation")}

    def __repr__(self) -> str:
        """Return the main values in one line."""
        share = None if self.probability is None else f"{self.probability:.3f}"
        values = [("image", repr(self.image)), ("label", self.label and repr(self.label)), ("probability", share)]
        panel = None if self.panel is None else repr(str(self.folder / self.panel))
        values += [("panel", panel), ("error", self.error and repr(self.error))]
        return described("FileExplanation", values)

    def _repr_html_(self) -> str:
        return markup.fragment(markup.gallery([self.card()]))

    def card(self) -> markup.Card:
        """Return the image, and the image under its maps, for a gallery."""
        if self.explanation is None:
            return markup.Card({}, [self.error or f"{self.label}: {self.folder / str(self.panel)}"], self.image)
        return self.explanation.card(str(self.label), self.image)


@obeys_quiet
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
    max_pixels: int | None = None,
    force: bool = False,
    quiet: bool = False,
) -> list[FileExplanation]:
    """Explain image files as `weft.explain` does, and write a figure and an .npz file for each.

    Args:
        run: a run directory, whose best model is loaded, a model directory, or the name of a public model; without
            Grad-CAM also an export.
        images: files, folders (with all images below them) or patterns such as 'x/*.png'.
        out: directory for the files, and for explanations.json, which lists them.
        label: name of the class to explain, for a public model also its WordNet id; None for the predicted class of
            each image.
        img_size, device, limit, max_pixels: as in `predict`.
        grad_cam: compute Grad-CAM.
        force: replace existing explanations.
        quiet: print no progress.

    Raises:
        UsageError: Grad-CAM of an export, an unknown class, a directory that is taken.
        CheckpointError: the model is missing or cannot be read.
    """
    options = InferenceOptions.of(locals())
    owned = [INDEX, *_written_before(Path(out))]
    check_outside_images(out, images)
    check_output(Path(out), owned, force=force)
    check_model(run)
    check_images(images)
    predictor = Predictor.load(run, fold=False, **options.of_model)
    with loading():  # for an export, which has not needed torch so far
        importlib.import_module("weft.interpret.explaining")
    names = predictor.classes
    predictor.check_gradients(grad_cam)
    number = None if label is None else class_number(label, names)
    paths = image_files(images)[: options.limit]

    note_values(paths, predictor.preprocessing.value_range, predictor.max_pixels)
    results = ImageList[FileExplanation]()
    used: set[str] = set()
    with (
        new_directory(Path(out), owned, force=force) as folder,
        Work("explaining", len(paths)) as work,
    ):
        for path in paths:
            work.advance(1)
            try:
                tensor = predictor.tensor([predictor.prepare(Path(path))])[0]
            except BadImage as error:
                results.append(FileExplanation(printable(path), error=str(error)))
                continue
            explanation = predictor.explain(tensor, number, grad_cam=grad_cam)
            stem = unused_name(Path(path).stem, used)
            _write(folder / stem, explanation, names, printable(Path(path).name))
            share = float(explanation.probabilities[explanation.label])
            files = f"{stem}.png", f"{stem}.npz"
            kept = explanation if len(results) < MAX_KEPT else None
            row = FileExplanation(printable(path), names[explanation.label], share, *files, None, Path(out), kept)
            results.append(row)
        write_file(folder / INDEX, json.dumps([row.as_dict() for row in results], indent=2) + "\n")
    return results


def _write(stem: Path, explanation: Explanation, names: Sequence[str], title: str) -> None:
    from weft.interpret.panels import panels  # matplotlib

    arrays: dict[str, Any] = {f"attention/{level}": fmap for level, fmap in explanation.attention.items()}
    for name in ("rollout", "depth", "grad_cam"):
        if (array := getattr(explanation, name)) is not None:
            arrays[name] = array
    arrays |= {"picture": explanation.image, "probabilities": explanation.probabilities}
    figure = panels(explanation, names, title)
    figure.savefig(stem.with_name(f"{stem.name}.png"), dpi=130, metadata={"Software": None})
    np.savez_compressed(stem.with_name(f"{stem.name}.npz"), **arrays)


def _written_before(folder: Path) -> list[str]:
    """Return the names of the files that an earlier call wrote."""
    try:
        rows = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        return [row[key] for row in rows for key in ("panel", "arrays") if row[key]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
