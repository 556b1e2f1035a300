"""`weft predict`: classify images."""

from __future__ import annotations

import sys

from weft.cli import options as opt
from weft.cli.options import given, note_unreadable, one_format, print_csv, print_json, table
from weft.text import first_few


def predict(
    run: opt.Run,
    images: opt.ImageFiles,
    /,
    *,
    top_k: opt.Number = 5,
    tta: opt.Tta = False,
    reject_at_error: opt.Percent = None,
    csv: opt.Csv = False,
    inference: opt.Inference = opt.Inference(),
    machine: opt.Machine = opt.Machine(),
    shown: opt.Shown = opt.Shown(),
) -> int:
    """Classify images: the most probable classes of each.

    Args:
        top_k: number of classes per image (default: 5)

    Example:
        weft predict runs/photos holiday/ "shots/*.jpg" portrait.png --top-k 2 --csv > predictions.csv
        weft predict levit_256 cat.jpg

        The second line uses public weights, from the hub or its cache, with ImageNet's classes; names: weft models, or
        of timm, with or without a tag. A directory of the same name comes first.
        A folder means all images below it. Unreadable images are listed on stderr with the reason; the others are
        classified, and the exit code is then 3.
    """
    from weft.checkpoints.resolve import check_model
    from weft.inference.arguments import check_top_k, settings_of

    one_format(json=shown.json, csv=csv)
    check_top_k(top_k)
    settings_of(**given(inference))
    check_model(run)
    import weft.inference as library
    from weft.inference.prediction import all_missing
    from weft.progress import say

    # without loading the model, which can take seconds, if there is nothing to classify
    predictions = all_missing(images) or library.predict(
        run, images, top_k=top_k, tta=tta, reject_at_error=reject_at_error, **given(inference)
    )
    good = [prediction for prediction in predictions if prediction.error is None]
    rejects = reject_at_error is not None
    header = ("image", "rank", "class", "probability", *(["rejected"] if rejects else []))
    lines = [
        (row.image, rank, name, f"{probability:.4f}", *(["yes" if row.rejected else "no"] if rejects else []))
        for row in good
        for rank, (name, probability) in enumerate(row.top, start=1)
    ]
    if shown.json:
        print_json([prediction.as_dict() for prediction in predictions])
    elif csv:
        print_csv(header, lines)
    elif lines:
        print(table(header, lines))
    sys.stdout.flush()
    unknown = [prediction.image for prediction in good if prediction.unknown]
    if unknown and not shown.json:
        say(
            f"weft: {len(unknown)} of {len(good)} images resemble no training image; perhaps they show none of the"
            f" classes: {first_few(unknown)}. (--json: unknown)"
        )
    errors = [prediction.error for prediction in predictions if prediction.error is not None]
    return note_unreadable(errors, among=len(predictions))
