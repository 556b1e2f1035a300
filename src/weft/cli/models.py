"""`weft models`: list the models."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from weft.cli.options import add_common, example, note, print_json, table
from weft.errors import unknown
from weft.models.families import VARIANTS, check_name, family_named, is_model, list_models
from weft.models.papers import DATA_SETS, MACHINES, TABLES, Printed, printed_rows, row_of

HELP = "list models: size, parameters, multiply-adds, reported accuracy, weights"

HEADER = ("name", "size", "params", "MACs", "reported", "top-1", "source", "weights")

EXAMPLE = """
weft models "levit_128*"

name        size  params    MACs  reported    top-1  source                weights
levit_128    224   9.21M  405.3M  9.2M, 406M   78.6  LeViT paper, Table 3  apache-2.0
levit_128s   224   7.78M  304.7M  7.8M, 305M   76.6  LeViT paper, Table 3  apache-2.0

weft models resnet50                 # a model of timm, counted; `weft models resnet` lists all that match
weft models --papers                 # all rows of the papers' tables, also ResNet, EfficientNet, DeiT, T2T-ViT, PVT
weft models CvT --papers transfer    # fine-tuning on other datasets
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.add_argument(
        "pattern",
        nargs="?",
        default="*",
        metavar="PATTERN",
        help="part of a name, name of a family, model of timm, or shell pattern such as 'ceit*' (default: all of weft)",
    )
    parser.add_argument(
        "--papers",
        choices=TABLES,
        nargs="?",
        const=TABLES[0],
        help="list the papers' tables, with parameters and multiply-adds as counted by weft (default: imagenet)",
    )
    add_common(parser, "--json")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    if args.papers is not None:
        return _papers(args)
    pattern = args.pattern.lower()
    if not any(character in pattern for character in "*?["):
        pattern = f"*{pattern.replace('-', '_')}*"
    names = list_models(pattern)
    records = [_record(name) for name in names] if names else _of_timm(args.pattern, pattern)
    if args.json:
        print_json(records)
    else:
        print(table(HEADER, [_cells(record) for record in records]))
    return 0


def _of_timm(name: str, pattern: str) -> list[dict[str, Any]]:
    """Return the row of a model of timm, or the rows of all that match a pattern, without counts.

    Raises:
        UsageError: neither weft nor timm has such a model.
    """
    import timm  # takes seconds

    matching = timm.list_models(pattern)
    exact = name if timm.is_model(name.partition(".")[0]) else pattern.strip("*")
    if exact not in matching and (matching and "." not in name):
        if len(matching) > 1:
            note(f"These models are timm's. Parameters and MACs of one of them: weft models {matching[0]}")
        return [_timm_record(known, counted=len(matching) == 1) for known in matching]
    check_name(exact if is_model(exact) else name)
    return [_timm_record(exact, counted=True)]


def _timm_record(name: str, *, counted: bool) -> dict[str, Any]:
    """Return a row of a model of timm, with the keys of `_record`."""
    from timm.models import get_pretrained_cfg

    cfg: Any = get_pretrained_cfg(name)
    size = cfg.input_size[-1] if cfg else 224
    params = macs = None
    if counted:
        from weft.bench.cost import cost
        from weft.models.building import create_model

        params, macs = cost(create_model(name, device="meta"), size)
    return {
        "name": name,
        "family": "timm",
        "size": size,
        "params": params,
        "macs": macs,
        "top1": None,
        "top1_source": "",
        "weights_licence": (cfg.license or "unknown") if cfg and cfg.has_weights else "",
        "printed_params": None,
        "printed_macs": None,
    }


def _papers(args: argparse.Namespace) -> int:
    selected = printed_rows(args.papers, args.pattern)
    if not selected:
        papers = sorted({row.paper for row in printed_rows(args.papers)})
        raise unknown("paper or model", args.pattern, papers, f"weft models --papers {args.papers}")
    if args.json:
        print_json([dataclasses.asdict(row) for row in selected])
        return 0
    notes = [row for row in selected if row.note]
    numbers = {id(row): f"[{number}]" for number, row in enumerate(notes, 1)}
    if args.papers == "imagenet":
        speeds = ("V100", "Xeon", "Graviton2")
        header = ("paper", "model", "size", "params", "(weft)", "MACs", "(weft)", "top-1", "top-5", "ReaL", "V2")
        rows = [
            (
                *_printed(row),
                *map(_number, (row.top1, row.top5, row.real, row.v2)),
                *map(_number, (row.images_per_second.get(machine) for machine in MACHINES.values())),
                numbers.get(id(row), ""),
            )
            for row in selected
        ]
        print(table((*header, *speeds, "note"), rows))
    else:
        header = ("paper", "model", "size", "params", "(weft)", "MACs", "(weft)", *DATA_SETS.values())
        rows = [
            (*_printed(row), *(_number(row.elsewhere.get(name)) for name in DATA_SETS.values())) for row in selected
        ]
        print(table(header, rows))
    print(
        "\nParameters in millions and MACs in 10^9: as reported, and as counted by weft, which includes the matrix"
        " multiplications of attention."
    )
    if args.papers == "imagenet":
        print("Reported throughput (images/s): V100; Xeon 6138 and Graviton2 with one thread.")
    for row in notes:
        print(f"{numbers[id(row)]} {row.paper}, {row.model}: {row.note}.")
    return 0


def _printed(row: Printed) -> tuple[str, ...]:
    params = "-" if row.params is None else f"{row.params / 1e6:.2f}"
    macs = "-" if row.macs is None else f"{row.macs / 1e9:.3g}"
    return (row.paper, row.model, str(row.size), _number(row.params_m), params, _number(row.macs_g), macs)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _record(name: str) -> dict[str, Any]:
    """Return a row of the table, as `--json` prints it."""
    variant, family, row = VARIANTS[name], family_named(name), row_of(name)
    if row is None:  # of a plugin
        from weft.bench.cost import cost
        from weft.models.building import create_model

        row = Printed(size=variant.size, **cost(create_model(name, device="meta"), variant.size)._asdict())
    macs = row.macs_g
    return {
        "name": name,
        "family": family.name if family else "",
        "size": variant.size,
        "params": row.params,
        "macs": row.macs,
        "top1": row.top1,
        "top1_source": row.source,
        "weights_licence": variant.weights.licence if variant.weights else "",
        "printed_params": None if row.params_m is None else f"{row.params_m:g}M",
        "printed_macs": None if macs is None else f"{macs:g}G" if macs >= 1 else f"{macs * 1000:g}M",
    }


def _cells(record: dict[str, Any]) -> tuple[str, ...]:
    params, macs, top1, printed = (record[key] for key in ("params", "macs", "top1", "printed_params"))
    return (
        record["name"],
        str(record["size"]),
        "-" if params is None else f"{params / 1e6:.2f}M",
        "-" if macs is None else f"{macs / 1e9:.2f}G" if macs >= 1e9 else f"{macs / 1e6:.1f}M",
        "-" if printed is None else f"{printed}, {record['printed_macs'] or '-'}",
        "-" if top1 is None else f"{top1:.1f}",
        record["top1_source"] or "-",
        record["weights_licence"] or "none",
    )
