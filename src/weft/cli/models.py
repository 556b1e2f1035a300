"""`weft models`: what there is to choose from."""

from __future__ import annotations

import argparse

from weft.cli.options import add_common, example, print_json, table
from weft.errors import unknown
from weft.models import list_models
from weft.models.zoo import PRINTED, ZOO, Row

HELP = "list the models: size, parameters, multiply-adds, reported accuracy, licence of the weights"

HEADER = ("name", "size", "params", "MACs", "in print", "top-1", "source", "weights")

EXAMPLE = """
weft models "levit_128*"

name        size  params    MACs  top-1  source                weights
levit_128    224   9.21M  405.3M   78.6  LeViT paper, Table 3  apache-2.0
levit_128s   224   7.78M  304.7M   76.6  LeViT paper, Table 3  apache-2.0
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("pattern", nargs="?", default="*", metavar="PATTERN", help="such as 'ceit*'; all without one")
    add_common(parser, "--json")
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Prints the table."""
    names = list_models(args.pattern)
    if not names:
        raise unknown("model", args.pattern, ZOO, "weft models")
    rows = [_cells(name, ZOO[name]) for name in names]
    if args.json:
        print_json([_facts(name) for name in names])
    elif args.markdown:
        print("\n".join(f"| {' | '.join(row)} |" for row in [HEADER, ["---"] * len(HEADER), *rows]))
    else:
        print(table(HEADER, rows))
    return 0


def _facts(name: str) -> dict[str, object]:
    params, macs = PRINTED.get(name, (None, None))
    return {"name": name, **ZOO[name]._asdict(), "printed_params": params, "printed_macs": macs}


def _cells(name: str, row: Row) -> tuple[str, ...]:
    macs = f"{row.macs / 1e9:.2f}G" if row.macs >= 1e9 else f"{row.macs / 1e6:.1f}M"
    top1 = "-" if row.top1 is None else f"{row.top1:.1f}"
    return (
        name,
        str(row.size),
        f"{row.params / 1e6:.2f}M",
        macs,
        ", ".join(PRINTED.get(name, "-")),
        top1,
        row.top1_source or "-",
        row.weights_licence or "none",
    )
