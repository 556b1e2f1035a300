"""`weft export`: export the model of a run, verified on a dataset by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weft.checkpoints import load_model_dir
from weft.checkpoints.hub import load_public
from weft.checkpoints.resolve import find_model
from weft.data.folder import check_outside
from weft.deploy import ExportReport, export
from weft.errors import DataError
from weft.inference.inputs import open_labelled, recipe_of, settings_of
from weft.progress import obeys_quiet


@obeys_quiet
def export_run(
    run: str | Path,
    out: str | Path,
    *,
    format: str | None = None,
    precision: str | None = None,
    data: str | Path | None = None,
    max_drop: float = 0.5,
    batch_sizes: Sequence[int] = (1, 16),
    limit: int | None = None,
    max_pixels: int | None = None,
    follow_links: bool | None = None,
    force: bool = False,
    quiet: bool = False,
) -> ExportReport:
    """Export the model of a run as `weft.export` does, with a dataset by name.

    Args:
        run: a run directory, whose best model is exported, a model directory, or the name of a public model.
        out, format, precision, max_drop, batch_sizes, force: as in `weft.export`.
        data: a folder of images, any other source that `weft.data.open_data` reads, or 'digits'; split as in the run.
        limit, max_pixels, follow_links: as in `train`.
        quiet: print no progress and no notes.

    Raises:
        UsageError, DataError, CheckpointError, VerificationError: as `weft.export` and `evaluate`.
    """
    settings = settings_of(None, None, "cpu", None, None, limit, follow_links, max_pixels)
    if data is not None:
        check_outside(out, data)
    source = find_model(run)
    model, classes = load_public(source) if isinstance(source, str) else load_model_dir(source)
    splits = None
    if data is not None:
        splits = open_labelled(data, classes, model.num_classes, settings, recipe_of(Path(run)))
        if len(splits.val) == 0:
            raise DataError(
                f"An export is verified on held-out images; {data} has none. Give every class two images or more, or"
                " leave out the data."
            )
    return export(
        model,
        out,
        format=format,
        precision=precision,
        data=splits,
        label_names=classes,
        max_drop=max_drop,
        batch_sizes=batch_sizes,
        force=force,
    )
