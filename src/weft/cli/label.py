"""`weft label`: images to label next, and proposed labels."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from weft.cli import options as opt
from weft.cli.options import given, note_unreadable, print_json, table
from weft.text import printable


def label(
    run: opt.Model,
    /,
    *images: opt.ImageFiles,
    num: opt.Number = 20,
    min_probability: Annotated[float, Parameter(metavar="P")] = 0.95,
    out: opt.Out = None,
    inference: opt.Inference = opt.Inference(),
    machine: opt.Machine = opt.Machine(),
    output: opt.Output = opt.Output(),
) -> int:
    """Choose the images to label next, and propose labels for the certain ones.

    Args:
        num: number of images to label next (default: 20)
        min_probability: smallest probability of a proposed label (default: 0.95)
        out: output directory: next.csv, proposed.csv, report.html

    Example:
        weft label runs/photos unlabelled/ --num 20 --out to-label
        weft train to-label/next.csv --recipe probe --out runs/photos-2     # after writing the labels into next.csv

        to-label/next.csv lists the images that a label helps most: uncertain and different from each other. Its labels
        are empty, for you to write. proposed.csv lists images with a probability of at least 0.95 and their labels.
        Both are tables that weft train reads. They also list the labelled images of the run, so that training uses all
        images; features are cached. report.html has the images to label. Your files are only read. The precision is
        that of the run by default; fp32 on a processor that emulates bf16.
        Unreadable images are listed on stderr with the reason, and the exit code is then 3.
    """
    import weft.train as library

    result = library.label(
        run, images, num=num, min_probability=min_probability, out=out, force=output.force, **given(inference)
    )
    if output.json:
        print_json(result.as_dict())
    else:
        rows = [
            (rank, printable(row.image), row.label, f"{row.probability:.3f}")
            for rank, row in enumerate(result.next, start=1)
        ]
        print(table(("label next", "image", "most probable class", "probability"), rows))
        print(
            f"proposed labels: {len(result.proposed):,} images with a probability of at least {min_probability:g};"
            f" others: {len(result.rest):,}"
        )
        if result.labelled:
            print(f"left out: {result.labelled:,} images of the run")
        if result.check:
            print(result.check)
        if out is not None:
            print(f"tables: {out}/next.csv, {out}/proposed.csv; images: {out}/report.html")
    return note_unreadable([message for _, message in result.errors])
