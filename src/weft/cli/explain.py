"""`weft explain`: attention maps and Grad-CAM of images."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from weft.cli import options as opt
from weft.cli.options import given, in_group, note_unreadable, print_json, table


def explain(
    run: opt.Run,
    /,
    *images: opt.ImageFiles,
    out: Annotated[str, in_group("Output", alias="-o", metavar="DIR")],
    label: Annotated[str | None, Parameter(metavar="CLASS")] = None,
    no_grad_cam: bool = False,
    of_images: opt.Images = opt.Images(),
    machine: opt.Machine = opt.Machine(),
    output: opt.Output = opt.Output(),
) -> int:
    """Explain predictions: attention maps, rollout, Grad-CAM.

    Args:
        out: output directory: a figure and an .npz file per image, explanations.json
        label: class to explain (default: the predicted class of each image)
        no_grad_cam: attention maps only; faster

    Example:
        weft explain runs/photos holiday/ portrait.png --out explained
        weft explain runs/photos portrait.png --out explained --label cat

        Writes a .png figure and a .npz with the arrays for each image: attention of each level, attention rollout, the
        share of each layer (CeiT), Grad-CAM. CeiT, CvT and LeViT have attention maps; other networks have Grad-CAM
        alone.
    """
    from weft.inference.explain_files import explain_run

    results = explain_run(
        run, images, out, label=label, grad_cam=not no_grad_cam, force=output.force, **given(of_images)
    )
    explained = [row for row in results if row.error is None]
    if output.json:
        print_json([row.as_dict() for row in results])
    elif explained:
        lines = [(row.image, row.label, f"{row.probability:.4f}", f"{out}/{row.panel}") for row in explained]
        print(table(("image", "class", "probability", "figure"), lines))
    return note_unreadable([row.error for row in results if row.error is not None], among=len(results))
