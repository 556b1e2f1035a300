"""The tables of docs/studies.md, from the results of the studies and comparisons in this folder.

    python benchmarks/studies/tables.py

Each folder here is what `weft study` or `weft compare` left: results.json, the report in Markdown with its pictures,
runs.csv.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weft.bench.records import filled

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "studies.md"


def studies() -> str:
    """Markdown: every variant of every study, the paper's effect beside ours."""
    parts = []
    for facts in _found("study"):
        minutes = facts["seconds"] / 60
        settings = ", ".join(f"{key}={value}" for key, value in facts["settings"].items())
        lines = [
            f"**{facts['study']}** ({facts['source']}). In the paper: {facts['claim']}"
            f" Here: {facts['data']}, {settings}; {facts['seeds']} seeds, {minutes:.0f} minutes of one core.",
            "",
            "| variant | paper % | paper, effect | here % (95 %) | here, effect (95 %) | says |",
            "|---|---|---|---|---|---|",
        ]
        for row in facts["variants"]:
            paper = f"{_number(row['paper'])} | {_number(row['paper_effect'], '+')}"
            here = f"{_interval(row['mean'])} | {_interval(row['effect'], '+')}"
            lines.append(f"| {row['variant']} | {paper} | {here} | {row['verdict']} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def comparisons() -> str:
    """Markdown: every comparison."""
    parts = []
    for facts in _found("entries"):
        lines = [
            "| model | top-1 % (95 %) | to the best (95 %) | float img/s | int8 img/s | int8 top-1 % | MB |",
            "|---|---|---|---|---|---|---|",
        ]
        for entry in facts["entries"]:
            stopped = f", stopped after epoch {entry['stopped_after']}" if entry["stopped_after"] else ""
            forms = {form["name"]: form for form in entry["forms"]}
            speeds = [f"{forms[name]['images_per_second']:.0f}" if name in forms else "" for name in ("float", "int8")]
            int8 = f"{forms['int8']['top1']:.2f}" if "int8" in forms else ""
            accuracy = entry["error"] or _interval(entry["accuracy"])
            cells = (accuracy, _interval(entry["to_best"], "+"), *speeds, int8, f"{entry['megabytes']:.1f}")
            lines.append(f"| {entry['name']}{stopped} | {' | '.join(cells)} |")
        parts.append(f"**{facts['data']}**: {facts['protocol']}\n\n" + "\n".join(lines) + f"\n\n{facts['advice']}")
    return "\n\n".join(parts)


def _found(key: str) -> list[dict[str, Any]]:
    files = sorted(HERE.glob("*/results.json"))
    return [facts for file in files if key in (facts := json.loads(file.read_text()))]


def _number(value: float | None, sign: str = "") -> str:
    return "" if value is None else f"{value:{sign}g}"


def _interval(estimate: list[float] | None, sign: str = "") -> str:
    if estimate is None:
        return ""
    value, low, high = estimate
    return f"{value:{sign}.2f} ({low:{sign}.2f} to {high:{sign}.2f})"


TABLES = (("studies", studies), ("comparisons", comparisons))

if __name__ == "__main__":
    text = PAGE.read_text()
    for name, made in TABLES:
        text = filled(text, name, made())[0]
    PAGE.write_text(text)
