"""`weft similar`: the images that are most similar to a query image."""

from __future__ import annotations

from typing import Annotated

from weft.cli import options as opt
from weft.cli.options import given, note_unreadable, one_format, print_csv, print_json, table
from weft.text import printable


def similar(
    run: opt.Model,
    query: str,
    /,
    *images: opt.ImageFiles,
    top_k: opt.Number = 10,
    csv: Annotated[bool, opt.as_csv("one line per image, with its similarity")] = False,
    inference: opt.Inference = opt.Inference(),
    machine: opt.Machine = opt.Machine(),
    shown: opt.Shown = opt.Shown(),
) -> int:
    """Find the images that are most similar to one image.

    Args:
        query: image file
        top_k: number of images to find (default: 10)

    Example:
        weft similar runs/photos query.jpg holiday/ --top-k 5
        weft similar tf_efficientnet_lite0 query.jpg holiday/ --json

        Similarity is the cosine of the features, from -1 to 1.
        Features are cached: a second query is fast. Unreadable images are listed on stderr, and the exit code is
        then 3.
    """
    import weft.inference as library

    one_format(json=shown.json, csv=csv)
    result, errors = library.similar(run, query, images, top_k=top_k, **given(inference))
    rows = [(rank, printable(row.image), f"{row.similarity:.4f}") for rank, row in enumerate(result, start=1)]
    if shown.json:
        print_json([row.as_dict() for row in result])
    elif csv:
        print_csv(("rank", "image", "similarity"), rows)
    else:
        print(table(("rank", "image", "similarity"), rows))
    return note_unreadable([message for _, message in errors])
