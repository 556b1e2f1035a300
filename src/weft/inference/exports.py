"""`weft export`: export the model of a run, verified on a dataset by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weft.checkpoints.resolve import check_model, find_model
from weft.data.folder import check_outside
from weft.data.open import check_exists
from weft.deploy.formats import AUTO, BATCH_SIZES, SUFFIXES, checked_format
from weft.errors import DataError, UsageError
from weft.files import refuse_taken
from weft.inference.arguments import InferenceOptions, recipe_of
from weft.inference.inputs import open_labelled, series_of
from weft.progress import loading, obeys_quiet

if TYPE_CHECKING:
    from weft.deploy import ExportReport


@obeys_quiet
def export_run(
    run: str | Path,
    out: str | Path,
    *,
    format: str | None = None,
    precision: str | None = None,
    data: str | Path | None = None,
    max_drop: float = 0.5,
    batch_sizes: Sequence[int] | None = None,
    limit: int | None = None,
    max_pixels: int | None = None,
    follow_links: bool | None = None,
    force: bool = False,
    quiet: bool = False,
) -> ExportReport:
    """Export the model of a run as `weft.export` does, with a dataset by name.

    Args:
        run: a run directory, whose best model is exported, a model directory, or the name of a public model.
        out, format, precision, max_drop, force: as in `weft.export`.
        data: a folder of images, any other source that `weft.data.open_data` reads, or 'digits'; split as in the run.
        batch_sizes: with format `auto`, numbers of images at which the exports are timed; None for 1 and 16.
        limit, max_pixels, follow_links: as in `train`.
        quiet: print no progress and no notes.

    Raises:
        UsageError, DataError, CheckpointError, VerificationError: as `weft.export` and `evaluate`.
    """
    checked_format(out, format, precision, max_drop, has_data=data is not None)
    if batch_sizes is not None and format != AUTO:
        raise UsageError("--batch-size belongs to --format auto, which times the exports. Omit it.")
    options = InferenceOptions.of({"limit": limit, "follow_links": follow_links, "max_pixels": max_pixels})
    if data is not None:
        check_outside(out, data)
    if not force and Path(out).suffix not in SUFFIXES:
        refuse_taken(Path(out), (), force=False)
    check_model(run)
    if data is not None:
        check_exists(str(data))
    with loading():
        from weft.checkpoints import load_model_dir
        from weft.checkpoints.hub import load_public
        from weft.deploy import export

    source = find_model(run)
    model, classes = load_public(source) if isinstance(source, str) else load_model_dir(source)
    splits = None
    if data is not None:
        splits = open_labelled(
            data, classes, model.num_classes, options, recipe_of(Path(run)), series=series_of(Path(run))
        )
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
        batch_sizes=batch_sizes or BATCH_SIZES,
        force=force,
    )
