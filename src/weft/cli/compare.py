"""`weft compare`: compare models by accuracy and speed on your images and your machine."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from weft.cli import options as opt
from weft.cli.study import shared_arguments, show


def compare(
    data: str,
    /,
    *,
    models: Annotated[opt.Words, Parameter(alias="-m", metavar="NAME")] = None,
    budget: opt.Duration = None,
    seeds: opt.Positive = 1,
    max_latency: opt.Latency = None,
    max_size: opt.Size = None,
    recipe: opt.Recipe = None,
    settings: opt.Settings = None,
    out: opt.Out = None,
    sweep: opt.Sweep = opt.Sweep(),
    plugins: opt.Plugins = opt.Plugins(),
    output: opt.Output = opt.Output(),
) -> int:
    """Train several models under one protocol, and recommend one.

    Args:
        data: folder of images, or any other source that `weft train` accepts
        models: models to compare (default: five of similar cost)
        budget: time limit for everything (approximate), for example 2h
        seeds: training runs per model (default: 1)
        max_latency: limit on the latency of one image, for example 10ms
        max_size: limit on the file size, for example 20MB
        settings: recipe setting, for example optim.lr=3e-4; may be repeated (all: `weft recipes settings`)
        out: output directory: report.html, results.json (default: runs/compare-DATA)

    Example:
        weft compare photos/                                   # one model per family, DeiT and ResNet
        weft compare photos/ --budget 2h --max-latency 10ms --max-size 20MB
        weft compare photos/ --models levit_256 cvt_13 resnet50 --seeds 3 --out runs/compare

        Repeat the command to resume after a stop; finished runs are kept. Report: runs/compare-photos/report.html
    """
    import weft.study as library

    result = library.compare(
        data,
        models=models or (),
        budget=budget,
        seeds=seeds,
        recipe=recipe,
        max_latency=max_latency,
        max_size=max_size,
        **shared_arguments(settings, out, sweep, output),
    )
    show(result, as_json=output.json)
    return 0
