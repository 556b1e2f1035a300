"""`weft info`: what a run, a model directory, an export or a public model is."""

from __future__ import annotations

from weft.cli import options as opt
from weft.cli.options import print_json


def info(run: opt.Run, /, *, plugins: opt.Plugins = opt.Plugins(), shown: opt.Shown = opt.Shown()) -> int:
    """Describe a run or a model: data, recipe, accuracy, files, exports, licence of the weights.

    Example:
        weft info runs/photos
        weft info levit_256 --json
    """
    import weft.inference as library

    found = library.info(run)
    if shown.json:
        print_json(found.as_dict())
    else:
        print("\n".join(f"{name}: {value}" for name, value in found.lines()))
    return 0
