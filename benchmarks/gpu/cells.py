"""Cells of the parts of a measurement on a GPU; a cell is the unit that is repeated after an interruption.

The cells depend on the options alone, not on the machine. At the scale `small`, a rehearsal of minutes, only the first
network is compiled, profiled, and measured in all precisions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from benchmarks.common.ways import COMPILED
from settings import ROOT, Options

SIDES = ("weft", "peer")


def _first(items: Sequence[str], options: Options) -> list[str]:
    """Return all items at the full scale, otherwise the first one."""
    return list(items if options.scale_name == "full" else items[:1])


def parity_cells(options: Options) -> list[str]:
    with np.load(ROOT / "tests" / "reference" / "golden.npz") as records:
        networks = sorted({key.split("/")[0] for key in records.files})
    return _first([f"{network} {precision}" for network in networks for precision in options.precisions], options)


def resume_cells(options: Options) -> list[str]:
    precisions = ("fp32", "bf16") if options.device == "cuda" else ("fp32",)
    cells = [f"{m} {p} {d}" for m in options.scale.families for p in precisions for d in ("true", "false")]
    return _first(cells, options)


def compile_cells(options: Options) -> list[str]:
    cells = [f"speed {cell}" for cell in speed_cells(options) if set(speed_ways(cell, options)) & set(COMPILED)]
    return _first([*cells, *(f"steps {cell}" for cell in steps_cells(options) if " compiled " in cell)], options)


def speed_cells(options: Options) -> list[str]:
    first, *others = options.precisions
    cells = [f"{model} {first}" for model in options.scale.models]
    return cells + [f"{model} {p}" for p in others for model in _first(options.scale.models, options)]


def speed_ways(cell: str, options: Options) -> list[str]:
    """Return the ways of a cell of the part speed."""
    compiles = cell in _first(speed_cells(options), options)
    return [way for way in options.scale.ways if compiles or way not in COMPILED]


def other_ways_cells(options: Options) -> list[str]:
    return _first(speed_cells(options), options)


def profile_cells(options: Options) -> list[str]:
    return _first([f"{model} {side}" for model in options.scale.models for side in SIDES], options)


def choices_cells(options: Options) -> list[str]:
    """Return one network of each family in each way that folds it, which is when the choices are made."""
    networks = {model.partition("_")[0]: model for model in options.scale.models}.values()
    ways = [way for way in options.scale.ways if way != "eager"]
    return _first([f"{network} {way}" for way in ways for network in networks], options)


def steps_cells(options: Options) -> list[str]:
    scale, precisions = options.scale, _first(options.precisions, options)
    return [f"{pair} {mode} {p}" for p in precisions for mode in scale.modes for pair in scale.pairs]


def loop_cells(options: Options) -> list[str]:
    """Return the network, the precision, and the share of the machine's cores that decode images."""
    precisions = ("fp32", "bf16") if options.device == "cuda" else ("fp32",)
    return _first([f"{options.scale.loop_model} {p} {cores}" for p in precisions for cores in ("half", "all")], options)


CELLS: dict[str, Callable[[Options], list[str]]] = {  # in the order of a call
    "parity": parity_cells,
    "tests": lambda options: ["tests/gpu"],
    "resume": resume_cells,
    "compile": compile_cells,
    "speed": speed_cells,
    "profile": profile_cells,
    "choices": choices_cells,
    "steps": steps_cells,
    "loop": loop_cells,
    "cifar10": lambda options: ["cifar10"],
    "other_ways": other_ways_cells,
}
