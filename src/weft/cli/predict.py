"""`weft predict`: classify images."""

from __future__ import annotations

import sys
from typing import Annotated

from weft.cli import options as opt
from weft.cli.options import given, note_unreadable, one_format, print_csv, print_json, table
from weft.text import first_few


def predict(
    run: opt.Run,
    /,
    *images: opt.ImageFiles,
    top_k: opt.Number = 5,
    tta: opt.Tta = False,
    reject_at_error: opt.Percent = None,
    out: opt.Out = None,
    csv: Annotated[bool, opt.as_csv("one line per image and class")] = False,
    inference: opt.Inference = opt.Inference(),
    machine: opt.Machine = opt.Machine(),
    output: opt.Output = opt.Output(),
) -> int:
    """Classify images: the most probable classes of each.

    Args:
        top_k: number of classes per image (default: 5)
        out: output directory: copies of the images by class, predictions.csv; or output file: .csv

    Example:
        weft predict runs/photos holiday/ "shots/*.jpg" portrait.png --top-k 2 --csv > predictions.csv
        weft predict runs/photos holiday/ --out sorted
        weft predict levit_256 cat.jpg

        The last line uses public weights, from the hub or its cache, with ImageNet's classes; names: weft models, or
        of timm, with or without a tag. A directory of the same name comes first.
        A folder means all images below it. Unreadable images are listed on stderr with the reason; the others are
        classified, and the exit code is then 3.
    """
    import weft.inference as library
    from weft.inference.prediction_files import table_of
    from weft.progress import say

    one_format(json=output.json, csv=csv)
    predictions = library.predict(
        run,
        images,
        top_k=top_k,
        tta=tta,
        reject_at_error=reject_at_error,
        out=out,
        force=output.force,
        **given(inference),
    )
    good = [prediction for prediction in predictions if prediction.error is None]
    header, lines = table_of(predictions)
    if output.json:
        print_json([prediction.as_dict() for prediction in predictions])
    elif csv:
        print_csv(header, lines)
    elif lines:
        print(table(header, lines))
    sys.stdout.flush()
    unknown = [prediction.image for prediction in good if prediction.unknown]
    if unknown and not output.json:
        say(
            f"weft: {len(unknown)} of {len(good)} images resemble no training image; perhaps they show none of the"
            f" classes: {first_few(unknown)}."
        )
    errors = [prediction.error for prediction in predictions if prediction.error is not None]
    return note_unreadable(errors, among=len(predictions))
