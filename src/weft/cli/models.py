"""`weft models`: list the models."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import Parameter

from weft.cli.options import Plugins, Shown, note, print_json, table
from weft.errors import unknown
from weft.models.families import VARIANTS, check_name, family_named, is_model, list_models
from weft.models.papers import DATA_SETS, MACHINES, TABLES, Printed, printed_rows, row_of

HEADER = ("name", "size", "params", "MACs", "reported", "top-1", "source", "weights")


def models(
    pattern: str = "*",
    /,
    *,
    papers: Annotated[list[str] | None, Parameter(metavar="[PAPER]", consume_multiple=True)] = None,
    plugins: Plugins = Plugins(),
    shown: Shown = Shown(),
) -> int:
    """List models: size, parameters, multiply-adds, reported accuracy, weights.

    Args:
        pattern: part of a name, name of a family, model of timm, or shell pattern such as 'ceit*' (default: all of
            weft)
        papers: list the tables of ceit, cvt, levit or deit (default: all), with parameters and multiply-adds as counted
            by weft, public weights, and the commands that evaluate and train each row

    Example:
        weft models "levit_128*"

        name        size  params    MACs  reported    top-1  source                weights
        levit_128    224   9.21M  405.3M  9.2M, 406M   78.6  LeViT paper, Table 3  apache-2.0
        levit_128s   224   7.78M  304.7M  7.8M, 305M   76.6  LeViT paper, Table 3  apache-2.0

        weft models resnet50                 # a model of timm, counted; `weft models resnet` lists all that match
        weft models --papers levit           # all rows of a paper's tables, and the commands that evaluate and train
    """
    if papers is not None:
        return _papers([*papers, *([] if papers and pattern == "*" else [pattern])], as_json=shown.json)
    wanted = pattern.lower()
    if not any(character in wanted for character in "*?["):
        wanted = f"*{wanted.replace('-', '_')}*"
    names = list_models(wanted)
    records = [record_of(name) for name in names] if names else _of_timm(pattern, wanted)
    if shown.json:
        print_json(records)
    else:
        print(table(HEADER, [cells_of(record) for record in records]))
    return 0


def _of_timm(name: str, pattern: str) -> list[dict[str, Any]]:
    """Return the row of a model of timm, or the rows of all that match a pattern, without counts."""
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
    from timm.models import get_pretrained_cfg

    cfg: Any = get_pretrained_cfg(name)
    size = cfg.input_size[-1] if cfg else 224
    row = _counted(name, size) if counted else Printed(size=size)
    return _record(name, "timm", row, (cfg.license or "unknown") if cfg and cfg.has_weights else "")


def _papers(patterns: Sequence[str], *, as_json: bool) -> int:
    """Print both tables of papers or models, and the commands for their rows."""
    for pattern in patterns:
        if not any(printed_rows(name, pattern) for name in TABLES):
            papers = sorted({row.paper for row in printed_rows()})
            raise unknown("paper or model", pattern, papers, "weft models --papers")
    tables = {
        name: [row for row in printed_rows(name) if any(row in printed_rows(name, pattern) for pattern in patterns)]
        for name in TABLES
    }
    rows = [(name, row) for name, selected in tables.items() for row in selected]
    commands = [(evaluate_command(row), train_command(name, row)) for name, row in rows]
    if as_json:
        records = [
            {**dataclasses.asdict(row), "table_of": name, "evaluate": evaluate, "train": train}
            for (name, row), (evaluate, train) in zip(rows, commands, strict=True)
        ]
        print_json(records)
        return 0
    numbers = {id(row): f"[{number}]" for number, row in enumerate((row for _, row in rows if row.note), 1)}
    header = ("paper", "model", "size", "params", "(weft)", "MACs", "(weft)")
    if tables["imagenet"]:
        columns = ("top-1", "top-5", "ReaL", "V2", "V100", "Xeon", "Graviton2", "note")
        cells = [
            (
                *_printed(row),
                *map(_number, (row.top1, row.top5, row.real, row.v2)),
                *map(_number, (row.images_per_second.get(machine) for machine in MACHINES.values())),
                numbers.get(id(row), ""),
            )
            for row in tables["imagenet"]
        ]
        print(table((*header, *columns), cells) + "\n")
    if tables["transfer"]:
        elsewhere = [[_number(row.elsewhere.get(name)) for name in DATA_SETS.values()] for row in tables["transfer"]]
        cells = [(*_printed(row), *more) for row, more in zip(tables["transfer"], elsewhere, strict=True)]
        print(table((*header, *DATA_SETS.values()), cells) + "\n")
    print(
        "Parameters in millions and MACs in 10^9: as reported, and as counted by weft, which includes the matrix"
        " multiplications of attention. Reported throughput (images/s): V100; Xeon 6138 and Graviton2 with one thread."
    )
    for _, row in rows:
        if row.note:
            print(f"{numbers[id(row)]} {row.paper}, {row.model}: {row.note}.")
    shown = [
        (row.model, _weights(row) or "-", evaluate or "-", train or row.obstacle or "-")
        for (_, row), (evaluate, train) in zip(rows, commands, strict=True)
        if row.weights or train
    ]
    if shown:
        print("\n" + table(("model", "weights", "evaluate", "train"), shown))
    return 0


def _weights(row: Printed) -> str:
    """Return the repository of the public weights of a row, or how to get them; '' for none."""
    name = row.weights.partition(" ")[0]
    source = VARIANTS[row.builds].weights if name == "own" else None
    return (source.repo or source.by_hand) if source else name


def evaluate_command(row: Printed) -> str:
    """Return the command that evaluates the public weights of a row on ImageNet; '' if no name loads them."""
    name = row.builds if row.weights == "own" else row.weights.partition(" ")[0].removeprefix("timm/")
    return f"weft evaluate {name} imagenet/" if name and "/" not in name else ""


def train_command(table: str, row: Printed) -> str:
    """Return the command that trains a row, WEIGHTS being those of the row that is fine-tuned; '' without a recipe."""
    from weft.recipes import load_recipe, recipe_text  # imports pydantic

    if not row.recipe:
        return ""
    name, *settings = row.recipe.split()
    recipe = load_recipe(name)
    words = ["weft", "train", "imagenet" if table == "imagenet" else "DATA", "--recipe", name]
    if recipe.model != row.builds:
        words += ["--model", row.builds]
    for key, _, value in (setting.partition("=") for setting in settings):
        words += ["--set", f"{key}={value}"] if "." in key else [f"--{key}", value]
    own_size = VARIANTS[row.builds].size if row.builds in VARIANTS else row.size
    if row.size not in (own_size, recipe.img_size):
        words += ["--img-size", str(row.size)]
    return " ".join([*words, *(["--from", "WEIGHTS"] if "--from" in recipe_text(name) else [])])


def _printed(row: Printed) -> tuple[str, ...]:
    params = "-" if row.params is None else f"{row.params / 1e6:.2f}"
    macs = "-" if row.macs is None else f"{row.macs / 1e9:.3g}"
    return (row.paper, row.model, str(row.size), _number(row.params_m), params, _number(row.macs_g), macs)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def record_of(name: str) -> dict[str, Any]:
    """Return a row of the table, as `--json` prints it."""
    variant, family = VARIANTS[name], family_named(name)
    row = row_of(name) or _counted(name, variant.size)  # of a plugin
    return _record(name, family.name if family else "", row, variant.weights.licence if variant.weights else "")


def _counted(name: str, size: int) -> Printed:
    """Return a row with the parameters and multiply-adds of a model that no paper has."""
    from weft.bench.cost import cost
    from weft.models.building import create_model

    return Printed(size=size, **cost(create_model(name, device="meta"), size)._asdict())


def _record(name: str, family: str, row: Printed, licence: str) -> dict[str, Any]:
    macs = row.macs_g
    return {
        "name": name,
        "family": family,
        "size": row.size,
        "params": row.params,
        "macs": row.macs,
        "top1": row.top1,
        "top1_source": row.source,
        "weights_licence": licence,
        "printed_params": None if row.params_m is None else f"{row.params_m:g}M",
        "printed_macs": None if macs is None else f"{macs:g}G" if macs >= 1 else f"{macs * 1000:g}M",
    }


def cells_of(record: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a row under HEADER."""
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
