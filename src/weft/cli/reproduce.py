"""`weft reproduce`: reproduce the rows of a paper's tables."""

from __future__ import annotations

import argparse
from typing import Any

from weft.cli.options import RUN_OPTIONS, add_common, example, note, print_json, run_settings, table
from weft.errors import DataError, UsageError

HELP = "list what it takes to reproduce a paper's tables; evaluate or train one row"

EXAMPLE = """
weft reproduce levit                                       # every row: counts, public weights, recipe
weft reproduce ceit --row CeiT-T                           # one row with its commands and the training time here
weft reproduce levit --row LeViT-256 --data imagenet/ --run
weft reproduce ceit --row CeiT-T --data imagenet/ --run --weights ceit_tiny.pth
weft reproduce ceit --row CeiT-T --data imagenet/ --run --train

With --run, weft evaluates the public weights and prints the result next to the number of the paper. Without public
weights or ImageNet it counts the network. The training time is extrapolated from a few steps on random images.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.usage = "weft reproduce PAPER [--row NAME] [--data IMAGENET] [options]"
    parser.add_argument("paper", metavar="PAPER", help="ceit, cvt, levit or deit")
    parser.add_argument("--row", metavar="NAME", help="model as the paper calls it (default: all rows)")
    parser.add_argument("--data", metavar="IMAGENET", help="ImageNet, for --run: a folder, or any other data source")
    parser.add_argument("--measure", action="store_true", help="measure the training time of every row (minutes each)")
    parser.add_argument("--run", action="store_true", help="with --row: evaluate the weights, or count the network")
    parser.add_argument(
        "--weights",
        metavar="RUN_OR_FILE",
        help="with --run: weights to evaluate instead of the public ones; with --train: weights to fine-tune",
    )
    parser.add_argument("--train", action="store_true", help="with --run: train the network with the paper's recipe")
    add_common(parser, *RUN_OPTIONS)
    add_common(parser, "--out", out="with --train; default: runs/reproduce-PAPER-ROW")
    add_common(parser, "--force", "--json", "--quiet")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """List rows, show one, or evaluate, count or train one."""
    from weft.data.open import check_exists
    from weft.devices import check_device
    from weft.models.papers import rows_of
    from weft.recipes import load_recipe

    for option, needed in (("train", "run"), ("weights", "run"), ("run", "row")):
        if getattr(args, option) and not getattr(args, needed):
            raise UsageError(f"--{option} belongs to --{needed}; got no --{needed}. See: weft reproduce --help")
    if args.data is not None:
        check_exists(args.data)
    rows = rows_of(args.paper, args.row)
    check_device(load_recipe(None, list(run_settings(args).items())).device)
    from weft.progress import loading

    with loading(quiet=args.quiet):
        from weft.study.reproduce import find_imagenet, paper_studies, plan_row, with_speed

    data = args.data or find_imagenet()
    if args.run:
        return _run_row(args, rows, data)
    plans = []
    for name, row in rows:
        plan = plan_row(name, row, data)
        if plan.training and (args.measure or args.row):
            if not args.quiet:
                note(f"Measuring training steps of {row.model} ({plan.training.recipe}).")
            plan = with_speed(plan, args.device)
        plans.append(plan)
    studies = {} if args.row else paper_studies(args.paper)
    if args.json:
        print_json(
            {
                "rows": [plan.as_dict() for plan in plans],
                "studies": [
                    {"name": name, "title": s.title, "variants": len(s.variants), "command": f"weft study {name}"}
                    for name, s in studies.items()
                ],
            }
        )
        return 0
    if args.row:
        print("\n\n".join(_details(plan) for plan in plans))
        return 0
    header = ("table", "model", "size", "top-1", "count", "weights", "training", "hours", "note")
    print(table(header, [_cells(plan) for plan in plans]))
    if studies:
        shown = [(f"weft study {name}", len(s.variants), s.title) for name, s in studies.items()]
        print(f"\n{table(('ablation', 'variants', 'title'), shown)}")
    print(
        "\ncount: parameters and multiply-adds counted by weft, compared with the paper."
        f"\nImageNet: {data or 'not found; pass --data IMAGENET'}. Commands and training time of a row:"
        f" weft reproduce {args.paper} --row NAME. Training time of all rows: --measure."
    )
    return 0


def _run_row(args: argparse.Namespace, rows: list[Any], data: str | None) -> int:
    from weft.models.papers import TABLES
    from weft.study.plan import slug
    from weft.study.reproduce import count_row, evaluate_row, plan_row, train_row

    row = next((row for name, row in rows if name == TABLES[0]), None)
    if row is None:
        raise UsageError(f"--run needs a row of an ImageNet table; {args.row} is only fine-tuned. Use weft train.")
    if data is None and (args.weights or args.train):
        raise DataError("--run needs ImageNet for this; none was given or found. Pass --data IMAGENET.")
    settings = run_settings(args)
    if args.train:
        out = args.out or f"runs/reproduce-{row.paper.lower()}-{slug(row.model)}"
        result = train_row(
            row, str(data), weights=args.weights, settings=settings, out=out, force=args.force, quiet=args.quiet
        )
        if args.json:
            print_json({"action": "train", **result.as_dict(), "paper": row.top1})
        else:
            print(f"{row.model}: top-1 {result.top1:.2f} % of {result.count:,} images; paper: {_percent(row.top1)}")
            print(f"model:  {result.out / 'best'}")
        return 0
    plan = plan_row(TABLES[0], row, data)
    can_evaluate = args.weights or (plan.evaluation and plan.evaluation.status != "by hand")
    if can_evaluate and data is not None:
        given = {name: getattr(args, name) for name in ("batch_size", "device", "precision", "workers", "limit")}
        evaluation = evaluate_row(row, data, weights=args.weights, quiet=args.quiet, **given)
        if args.json:
            print_json({"action": "evaluate", **evaluation.as_dict()})
            return 0
        print(
            f"{row.model}, {evaluation.weights}, {evaluation.images:,} images of {data}\n"
            f"top-1 {evaluation.top1:.2f} % (95 % interval {evaluation.low:.2f} to {evaluation.high:.2f})\n"
            f"paper {_percent(row.top1)}"
            + ("" if evaluation.difference is None else f", difference {evaluation.difference:+.2f} points")
        )
        return 0
    counted = count_row(row)
    if counted is None:
        raise UsageError(f"{row.model} must be a network that weft or timm has; {plan.obstacle}. Choose another row.")
    reason = "no ImageNet; pass --data IMAGENET" if can_evaluate else "no public weights; pass --weights FILE"
    if not args.quiet:
        note(f"Counted, not evaluated: {reason}.")
    if args.json:
        action = {"action": "count", "reason": reason}
        print_json({"model": row.model, **action, **counted._asdict(), "params_m": row.params_m, "macs_g": row.macs_g})
    else:
        print(_count_text(counted, row.params_m, row.macs_g, plan.count))
    return 0


def _cells(plan: Any) -> tuple[str, ...]:
    row, training = plan.row, plan.training
    length = ""
    if training:
        length = f"{training.steps:,} steps" if training.steps else f"{training.epochs} epochs"
        length = f"{training.recipe}, {length}" + (f", {len(training.datasets)} runs" * (len(training.datasets) > 1))
    hours = f"{float(f'{training.speed.hours:.2g}'):,g}" if training and training.speed else "-"
    return (
        row.table,
        row.model,
        str(row.size),
        "-" if row.top1 is None else f"{row.top1:g}",
        _differences(plan.count),
        plan.evaluation.status if plan.evaluation else "-",
        length or "-",
        hours,
        "" if training else plan.obstacle,
    )


def _differences(count: Any) -> str:
    """Return how the counts differ from the paper's: equal, or the differences in percent."""
    if count is None:
        return "-"
    values = {"params": count.params_percent, "MACs": count.macs_percent}
    differences = [f"{name} {value:+.1f}%" for name, value in values.items() if value]
    has_print = any(value is not None for value in values.values())
    return ", ".join(differences) or ("equal" if has_print else "not printed")


def _details(plan: Any) -> str:
    row, lines = plan.row, []
    lines.append(f"{row.model} ({row.paper}, table {row.table}), {row.size} pixels")
    if plan.count:
        lines.append(f"count     {_count_text(plan.count, row.params_m, row.macs_g, plan.count)}")
    if plan.evaluation:
        one = plan.evaluation
        status = {"cached": "in the cache", "download": "downloaded on first use"}.get(one.status, "not on the hub")
        data = f"ImageNet: {one.data}" if one.data else "ImageNet: not found; pass --data IMAGENET"
        lines += [
            f"evaluate  {one.command}",
            f"          expected top-1 {_percent(one.top1)}; weights: {one.weights}, {status}; {data}",
        ]
    if plan.training:
        lines += _training_lines(plan.training)
    elsewhere = ", ".join(f"{name} {value:g} %" for name, value in row.elsewhere.items())
    lines += [f"paper     {elsewhere}"] if elsewhere else []
    lines += [f"not       {plan.obstacle}"] if plan.obstacle else []
    lines += [f"note      {row.note}"] if row.note and row.note != plan.obstacle else []
    return "\n".join(lines)


def _training_lines(one: Any) -> list[str]:
    length = f"{one.steps:,} steps" if one.steps else f"{one.epochs} epochs"
    runs = f" of {len(one.datasets)} runs ({', '.join(one.datasets)})" if len(one.datasets) > 1 else ""
    lines = [
        f"train     {one.command}",
        f"          {length}{runs}, batch {one.batch_size}, {one.images / 1e6:,.0f} M images",
    ]
    if one.speed:
        speed = one.speed
        lines.append(
            f"          {_duration(speed.hours)} on this {speed.device}: {speed.images_per_second:.1f} images/s,"
            f" measured at batch {speed.batch_size}, without loading images"
        )
    lines += [f"          paper: {one.paper_cost}"] if one.paper_cost else []
    lines += ["          WEIGHTS: run or file with trained weights to start from"] if one.is_finetuning else []
    return lines


def _duration(hours: float) -> str:
    if hours < 1:
        return f"about {60 * hours:.0f} minutes"
    days = f" ({float(f'{hours / 24:.2g}'):,.0f} days)" if hours >= 72 else ""
    return f"about {float(f'{hours:.2g}'):,.0f} hours{days}"


def _count_text(counted: Any, params_m: float | None, macs_g: float | None, count: Any) -> str:
    params = "not printed" if params_m is None else f"paper: {params_m:g} M"
    macs = "not printed" if macs_g is None else f"paper: {macs_g:g} G"
    return (
        f"parameters {counted.params / 1e6:.3f} M ({params}), multiply-adds {counted.macs / 1e9:.3f} G ({macs}):"
        f" {_differences(count)}"
    )


def _percent(value: float | None) -> str:
    return "not stated" if value is None else f"{value:g} %"
