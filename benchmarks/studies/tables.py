"""Write the tables and the figure of docs/studies.md from the results in this folder.

    python benchmarks/studies/tables.py

Each folder here is the output of `weft study` or `weft compare`: results.json, runs.csv, and the report in Markdown
with its figures. costs.csv has the training time of the variants that were not run (costs.py).
"""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.records import filled, read_csv

from weft.files import write_file
from weft.report.pages import series_style
from weft.study.plan import ResolvedVariant, Study, read_study
from weft.study.statistics import Estimate

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "studies.md"
FIGURE = HERE / "effects.png"
LINEAR = 2.0  # percentage points around 0 where the axes of the figure are linear
IMAGES = 50_000  # training images of CIFAR-10
OLD_KEYS = {"variant": "name", "accuracy": "mean", "to_best": "effect"}  # of recorded rows -> today's

EXPERIMENTS = (  # paper, place in the paper, experiment, study (a command if it is no study, '' for none)
    ("CeiT", "main table", "ImageNet-1k at 224 pixels", "weft models --papers ceit"),
    ("CeiT", "main table", "fine-tuning at 384 pixels", "finetune-384"),
    ("CeiT", "transfer table", "seven datasets after ImageNet-1k", "transfer"),
    ("CeiT", "ablation", "image-to-tokens", "ceit-i2t"),
    ("CeiT", "ablation", "convolution in the feed-forward layer", "ceit-leff"),
    ("CeiT", "ablation", "attention over class tokens", "ceit-lca"),
    ("CeiT", "section on convergence", "a third of the epochs", "ceit-convergence"),
    ("CvT", "table 3", "ImageNet-1k at 224 pixels, ImageNet-22k", "weft models --papers cvt"),
    ("CvT", "table 3", "fine-tuning at 384 pixels", "finetune-384"),
    ("CvT", "table 4", "four datasets after ImageNet-22k", "transfer"),
    ("CvT", "table 5", "position embeddings", "cvt-position"),
    ("CvT", "table 6", "convolutional token embedding", "cvt-embedding"),
    ("CvT", "table 7", "stride of keys and values", "cvt-kv-stride"),
    ("CvT", "table 8", "convolutional projection", "cvt-projection"),
    ("LeViT", "table 1", "convolution, then attention", "levit-grafting"),
    ("LeViT", "tables 3 and 4", "ImageNet-1k", "weft models --papers levit"),
    ("LeViT", "table 3", "speed", "python benchmarks/speed/protocol.py"),
    ("LeViT", "table 5", "ablation A1 to A7", "levit-ablation"),
    ("LeViT", "table 6 (supplement)", "time of the parts of a block", "python benchmarks/speed/levit_block.py"),
    ("DeiT", "table 3", "hard and soft labels of a teacher", "distillation"),
    ("all papers", "a claim without a table", "few training images", "data-efficiency"),
    ("weft", "in no paper", "training at one size, evaluation at another", "resolution"),
)
PAPER_SCALE = {  # (paper, study): parts of the experiment that only the scale `paper` includes
    ("CeiT", "ceit-convergence"): "CeiT-S and CeiT-B",
    ("CeiT", "transfer"): "the start from ImageNet; Flowers, Pets, Cars, iNaturalist 2018 and 2019; CeiT-S",
    ("CvT", "transfer"): "the start from ImageNet-22k; Flowers, Pets; CvT-21",
    ("CeiT", "finetune-384"): "ImageNet, from 224 to 384 pixels",
    ("CvT", "finetune-384"): "ImageNet, from 224 to 384 pixels",
}


def studies() -> str:
    """Return Markdown of every variant of every study, with the effects in the paper and here."""
    parts = []
    for fields in _results(is_comparison=False):
        minutes = fields["seconds"] / 60
        settings = ", ".join(f"{key}={value}" for key, value in fields["settings"].items())
        lines = [
            f"**{fields['study']}** ({fields['source']}). In the paper: {fields['claim']}"
            f" Here: {fields['data']}, {settings}; {_seeds(fields)} seeds, {minutes:.0f} minutes of one core.",
            "",
            "| variant | compared with | paper % | paper, effect | here % (95 %) | here, effect (95 %) | result |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in fields["rows"]:
            paper = f"{_number(row['paper'])} | {_number(row['paper_effect'], '+')}"
            here = f"{_interval(row['mean'])} | {_interval(row['effect'], '+')}"
            result = row["verdict"].partition(" (for ")[0]  # recorded runs name a number of seeds there
            lines.append(f"| {row['name']} | {row['against'] or ''} | {paper} | {here} | {result} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def experiments() -> str:
    """Return Markdown with a row per experiment of the papers: its result, or its command and cost."""
    lines = [
        "| paper | experiment | study | effects here, against those of the paper | not run |",
        "|---|---|---|---|---|",
    ]
    results = {fields["study"]: fields for fields in _results(is_comparison=False)}
    for paper, where, what, name in EXPERIMENTS:
        head = f"| {paper}, {where} | {what} | `{name}`"
        if name.partition(" ")[0] in ("weft", "python"):
            lines.append(f"{head} | {_not_a_study(name)} |")
            continue
        study = read_study(name)
        only = f"{paper}, " if name == "transfer" else paper if name == "finetune-384" else ""
        variants = study.at_scale("small")
        variants = [v for v in variants if v.name.startswith(only) and v.seeds is None]  # without teachers
        rows = {row["name"]: row for row in results.get(name, {"rows": []})["rows"] if row["top1"]}
        run = Counter(_outcome(row) for v in variants if (row := rows.get(v.name)) and row["effect"])
        missing = [variant for variant in variants if variant.name not in rows]
        shown = ", ".join(f"{count} {outcome}" for outcome, count in sorted(run.items())) or "**not run**"
        parts = [_missing(study, missing, rows, len(missing) == len(variants))] if missing else []
        if more := PAPER_SCALE.get((paper, name)):
            parts.append(f"{more}: `weft study {name} --scale paper`")
        lines.append(f"{head} | {shown} | {'<br>'.join(parts)} |")
    return "\n".join(lines)


def _not_a_study(command: str) -> str:
    """Return the cells of an experiment that is not repeated by `weft study` but by another command."""
    if "bench" in command:
        name = "levit-protocol.csv" if "protocol" in command else "levit_block.csv"
        measured = (HERE.parent / "speed" / name).is_file()
        return f"measured: [{name}](../benchmarks/speed/{name}) |" if measured else "**not run** |"
    return "**not run**: training needs ImageNet and GPUs | the command lists each row with its cost"


def _outcome(row: dict[str, Any]) -> str:
    """Return the result of a variant in a few words."""
    for sign in ("as in the paper", "against the paper", "no effect in the paper"):
        if row["verdict"].endswith(sign):
            return sign.replace("no effect", "with no effect")
    return "not significant" if "no difference" in row["verdict"] else "without a value in the paper"


def _missing(study: Study, variants: list[ResolvedVariant], finished: Collection[str], is_complete: bool) -> str:
    """Return the command for variants that were not run, and its duration; variants that share a run count once."""
    only = "" if is_complete else " --only " + " ".join(f'"{variant.name}"' for variant in variants)
    costs = {(row["study"], row["variant"]): row for row in read_csv(HERE / "costs.csv")}
    seconds, seeds = 0.0, study.scales["small"].seeds
    done = {variant.run_key for variant in study.at_scale("small") if variant.name in finished}
    runs = {variant.run_key: variant for variant in variants if variant.run_key not in done}
    for variant in runs.values():
        recipe, cost = variant.recipe, costs.get((study.name, variant.name))
        if cost is None:
            return f"`weft study {study.name}{only}`"
        images = IMAGES * float(recipe.data.train_fraction or 1)
        seconds += float(cost["seconds_per_1000"]) * images / 1000 * (recipe.epochs or 1) * seeds
    return f"`weft study {study.name}{only}`: {seconds / 3600:.1f} hours of one core"


def effects() -> Figure:
    """Draw the effect in the paper against the effect here, with intervals, for all studies."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(0, color="0.6", linewidth=1)
    axes.axvline(0, color="0.6", linewidth=1)
    axes.set_xscale("symlog", linthresh=LINEAR)
    axes.set_yscale("symlog", linthresh=LINEAR)
    for number, (name, points) in enumerate(_effects()):
        colour, marker = series_style(number)
        axes.plot([], [], marker, color=colour, label=name)
        for paper, effect in points:
            is_shown = not effect.low <= 0 <= effect.high
            axes.errorbar(
                paper,
                effect.value,
                yerr=[[effect.value - effect.low], [effect.high - effect.value]],
                fmt=marker,
                color=colour,
                markerfacecolor=colour if is_shown else "white",
                capsize=3,
                linewidth=1,
            )
    low, high = -25, 25
    axes.fill_between([0, high], 0, high, color="0.95", zorder=0)
    axes.fill_between([low, 0], low, 0, color="0.95", zorder=0)
    ticks = [-20, -10, -5, -2, -1, 0, 1, 2, 5, 10, 20]
    axes.set_xticks(ticks, labels=[f"{tick:+d}" if tick else "0" for tick in ticks])
    axes.set_yticks(ticks, labels=[f"{tick:+d}" if tick else "0" for tick in ticks])
    axes.minorticks_off()
    axes.set(xlim=(low, high), ylim=(low, high))
    axes.set_xlabel("effect in the paper, ImageNet (percentage points of top-1)")
    axes.set_ylabel("effect here, CIFAR-10 (percentage points, 95 % interval)")
    axes.set_title("Filled: the interval excludes 0. Grey: the same sign as in the paper.", fontsize="medium")
    axes.legend(frameon=False, fontsize="small", loc="upper left")
    return figure


def _effects() -> Iterator[tuple[str, list[tuple[float, Estimate]]]]:
    """Yield each study with the effects that are also in the paper: in the paper, and here."""
    for fields in _results(is_comparison=False):
        rows = [row for row in fields["rows"] if row["paper_effect"] is not None and row["effect"] is not None]
        points = [(row["paper_effect"], Estimate(*row["effect"])) for row in rows if None not in row["effect"]]
        if points:
            yield fields["study"], points


def comparisons() -> str:
    """Return Markdown of every comparison."""
    parts = []
    for fields in _results(is_comparison=True):
        lines = [
            "| model | top-1 % (95 %) | difference to best (95 %) | float img/s | int8 img/s | int8 top-1 % | MB |",
            "|---|---|---|---|---|---|---|",
        ]
        for entry in fields["rows"]:
            stopped = f", stopped after epoch {entry['stopped_after']}" if entry["stopped_after"] else ""
            forms = {form["name"]: form for form in entry["forms"]}
            speeds = [f"{forms[name]['images_per_second']:.0f}" if name in forms else "" for name in ("float", "int8")]
            int8 = f"{forms['int8']['top1']:.2f}" if "int8" in forms else ""
            accuracy = _interval(entry["mean"]) or "failed"
            megabytes = f"{forms['float']['megabytes']:.1f}" if "float" in forms else ""
            cells = (accuracy, _interval(entry["effect"], "+"), *speeds, int8, megabytes)
            lines.append(f"| {entry['name']}{stopped} | {' | '.join(cells)} |")
        parts.append(f"**{fields['data']}**: {fields['protocol']}\n\n" + "\n".join(lines) + f"\n\n{fields['advice']}")
    return "\n\n".join(parts)


def _results(*, is_comparison: bool) -> list[dict[str, Any]]:
    """Return the results of all studies, or of all comparisons, in this folder."""
    results = [json.loads(file.read_text()) for file in sorted(HERE.glob("*/results.json"))]
    for fields in results:  # those recorded before studies and comparisons had one form of result
        rows = fields.pop("variants", None) or fields.pop("entries", None) or fields["rows"]
        fields["rows"] = [{OLD_KEYS.get(key, key): value for key, value in row.items()} for row in rows]
    return [fields for fields in results if bool(fields.get("advice")) == is_comparison]


def _seeds(fields: dict[str, Any]) -> str:
    counts = sorted({len(row["top1"]) for row in fields["rows"] if row["top1"]})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _number(value: float | None, sign: str = "") -> str:
    return "" if value is None else f"{value:{sign}g}"


def _interval(estimate: list[float] | None, sign: str = "") -> str:
    if estimate is None:
        return ""
    value, low, high = estimate
    return f"{value:{sign}.2f} ({low:{sign}.2f} to {high:{sign}.2f})"


TABLES = (("experiments", experiments), ("studies", studies), ("comparisons", comparisons))

if __name__ == "__main__":
    text = PAGE.read_text()
    for name, table in TABLES:
        text = filled(text, name, table())[0]
    PAGE.write_text(text)
    image = io.BytesIO()
    effects().savefig(image, format="png", dpi=110)
    write_file(FIGURE, image.getvalue())
