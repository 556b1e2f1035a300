"""`weft embed`: features of images."""

from __future__ import annotations

from typing import Annotated

from weft.cli import options as opt
from weft.cli.options import given, in_group, note_unreadable, print_json


def embed(
    run: opt.Model,
    /,
    *images: opt.ImageFiles,
    out: Annotated[str, in_group("Output", alias="-o", metavar="FILE")],
    normalize: bool = False,
    inference: opt.Inference = opt.Inference(),
    machine: opt.Machine = opt.Machine(),
    output: opt.Output = opt.Output(),
) -> int:
    """Write the features of images (inputs of the classifier) to a file.

    Args:
        out: output file: .npy, or .parquet with pyarrow
        normalize: scale the features of each image to unit L2 norm

    Example:
        weft embed runs/photos holiday/ --out features.npy
        weft embed tf_efficientnet_lite0 holiday/ "shots/*.jpg" --out features.parquet --normalize

        features.npy has one row of float32 numbers per image; features.csv next to it has the paths in the same order.
        features.parquet has both, in the columns image and features. The second line uses public weights.
        Features are cached (docs/few-images.md). Unreadable images have no row; they are listed on stderr with the
        reason, and the exit code is then 3.
    """
    import weft.inference as library

    result = library.embed(run, images, out=out, normalize=normalize, force=output.force, **given(inference))
    if output.json:
        print_json({"out": out, **result.as_dict()})
    else:
        print(f"{out}: {result.features.shape[1]:,} features of {len(result.images):,} images")
    return note_unreadable([message for _, message in result.errors])
