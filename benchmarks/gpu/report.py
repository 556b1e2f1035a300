"""Write README.md of a measurement on a GPU, and the rows of the GPU in weft's README, from the CSV files."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

from benchmarks.common.records import filled, read_csv
from cells import CELLS
from settings import DONE, HERE, IN_PROGRESS, MACHINE, ROOT, SCALES, Options, read_state

from weft.files import write_file

Row = dict[str, str]
HEADINGS = {
    "parity": "Difference from the recorded outputs of the released code",
    "tests": "Tests on the device (tests/gpu)",
    "resume": "Runs that were killed inside an epoch and resumed",
    "speed": "Inference",
    "other_ways": "Inference in other ways",
    "profile": "Kernels with the largest share of the time, eager",
    "choices": "Choices in folded networks on a GPU",
    "steps": "Training steps, random images in the memory of the device",
    "loop": "weft train on JPEGs of 500x375 pixels",
    "cifar10": "weft train --recipe cifar10",
    "failures": "Failed",
}
CASE = ("device", "torch", "run", "batch_size", "precision")  # columns of a comparison in weft's README


def write_pages(options: Options, *, publish: bool) -> None:
    """Write README.md next to the CSV files; with `publish`, also the table of weft's README."""
    if not any((options.out / f"{part}.csv").exists() for part in HEADINGS):
        return
    write_file(options.out / "README.md", page(options))
    if publish:
        spec = importlib.util.spec_from_file_location("figures", ROOT / "benchmarks" / "speed" / "figures.py")
        assert spec is not None
        assert spec.loader is not None
        figures = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(figures)
        front = ROOT / "README.md"
        write_file(front, filled(front.read_text(), "figures", figures.summary(figures.measured_folders()))[0])


def page(options: Options) -> str:
    """Return the Markdown of all CSV files of a folder, and of the cells that are open."""
    lines = ["# Measurements on a GPU", "", "`make gpu` writes this page and the CSV files next to it (see run.py)."]
    for part, heading in HEADINGS.items():
        rows = read_csv(options.out / f"{part}.csv")
        if rows:
            shown = _tests(rows) if part == "tests" else rows
            same, differing = _machines(rows)
            names = () if part == "failures" else ("cell",)  # elsewhere, other columns describe the cell
            columns = [key for key in shown[0] if key not in (*MACHINE, *names)] + differing
            lines += ["", f"## {heading}", "", same, "", _table(shown, columns)]
    return "\n".join([*lines, *_open(options)]) + "\n"


def _open(options: Options) -> list[str]:
    """Return the lines of a section on the cells that are not measured; none if there are no such cells."""
    lines = []
    for setup, state in read_state(options.out).items():
        rows = []
        for part, cells in CELLS.items():
            results = {cell: state.get(part, {}).get(cell) for cell in cells(options)}
            absent = [cell for cell, result in results.items() if result in (None, IN_PROGRESS)]
            failed = [cell for cell, result in results.items() if result not in (None, IN_PROGRESS, DONE)]
            if part != "compile" and (absent or failed):
                rows.append({"part": part, "not measured": ", ".join(absent), "failed or partial": ", ".join(failed)})
        if rows:
            lines += ["", f"{setup}:", "", _table(rows, list(rows[0]))]
    text = "Cells that are not measured. Rows above of such a cell are of an earlier commit, and will be replaced."
    return ["", "## Open", "", text, *lines] if lines else []


def _machines(rows: list[Row]) -> tuple[str, list[str]]:
    """Return a line with the columns of the machine that are the same in all rows, and the names of the others."""
    values = {key: list(dict.fromkeys(row.get(key, "") for row in rows)) for key in MACHINE}
    same = [f"{key} {texts[0]}" for key, texts in values.items() if len(texts) == 1 and texts[0]]
    return f"{', '.join(same)}." if same else "", [key for key, texts in values.items() if len(texts) > 1]


def _tests(rows: list[Row]) -> list[Row]:
    """Return a row per machine with the number of tests per result, and the rows of the tests that did not pass."""
    machines: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        machines.setdefault(tuple(row.get(key, "") for key in MACHINE), []).append(row)
    totals = []
    for same in machines.values():
        counts = Counter(row["result"] for row in same)
        text = ", ".join(f"{count} {result}" for result, count in counts.items())
        totals.append(same[0] | {"test": text, "result": "", "message": ""})
    return [*totals, *(row for row in rows if row["result"] in ("failure", "error"))]


def _table(rows: list[Row], columns: list[str]) -> str:
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    lines += [f"| {' | '.join(row.get(key, '').replace('|', ' ') for key in columns)} |" for row in rows]
    return "\n".join(lines)


def gpu_rows(folder: Path = HERE) -> str:
    """Return Markdown for weft's README: ratios to the fastest way of the peer; '' without measurements.

    A ratio is of rows of one call: of one part, device, version of PyTorch and commit.
    """
    measured = [row | {"part": part} for part in ("speed", "other_ways") for row in read_csv(folder / f"{part}.csv")]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in measured:
        if row["images_per_second"]:
            groups.setdefault(tuple(row[key] for key in (*CASE, "commit", "part")), []).append(row)
    if not groups:
        return ""
    full = SCALES["full"]
    cases = dict.fromkeys(
        (device, torch, model, str(batch), precision)
        for device, torch, precision in dict.fromkeys((key[0], key[1], key[4]) for key in groups)
        for model in full.models
        for batch in full.batches
    )
    lines = []
    for case in cases | dict.fromkeys(key[: len(CASE)] for key in groups):
        same = [group for key, group in groups.items() if key[: len(CASE)] == case]
        lines += [_compared(case, group) for group in same or [[]]]
    _, differing = _machines([row for group in groups.values() for row in group])
    columns = [key for key in lines[0] if key not in ("torch", "commit") or key in differing]
    head = [
        "On a GPU, the fastest measured way of each side in one call ([all rows](benchmarks/gpu/README.md)).",
        "`graphed`: compiled, and replayed as a CUDA graph. `-`: not measured.",
        "",
    ]
    failed = [f"{row['way']} {row['precision']} of {_name(row)}" for row in measured if row["error"]]
    tail = [f"Failed: {', '.join(dict.fromkeys(failed))}."] if failed else []
    for device in dict.fromkeys(row["device"] for row in measured):
        known = {row[key] for row in measured if row["device"] == device for key in ("precision", "way")}
        wanted = [*Options("cuda", "full", folder, None, 0).precisions, *full.ways, *full.other_ways]
        if absent := [name for name in wanted if name not in known]:
            tail.append(f"Not measured on {device}: {', '.join(absent)}.")
    return "\n".join([*head, _table(lines, columns), *(["", "\n".join(tail)] if tail else [])])


def _compared(case: tuple[str, ...], rows: list[Row]) -> Row:
    """Return the columns of a row of the README: the fastest way of each side, and the ratios of weft to the peer."""
    own, peers = ([row for row in rows if row["side"] == side] for side in ("weft", "peer"))
    best, peer = max(own, key=_speed, default=None), max(peers, key=_speed, default=None)
    eager, peer_eager = (next((row for row in side if row["way"] == "eager"), None) for side in (own, peers))
    device, torch, model, batch, precision = case
    return {
        "GPU": device,
        "torch": torch,
        "commit": rows[0]["commit"] if rows else "-",
        "model": model,
        "batch": batch,
        "precision": precision,
        "fastest of the peer, images/s": f"{_speed(peer):.0f} ({peer['model'].partition(' ')[0]}, {peer['way']})"
        if peer
        else "-",
        "eager to eager": _ratio(eager, peer_eager),
        "fastest to fastest": _ratio(best, peer),
        "fastest of weft, images/s": f"{_speed(best):.0f}, {best['way']}" if best else "-",
    }


def _ratio(row: Row | None, base: Row | None) -> str:
    return f"{_speed(row) / _speed(base):.2f}" if row and base else "-"


def _name(row: Row) -> str:
    """Return the network of a row with its side; a network that failed has the name of weft's on both sides."""
    return f"weft's {row['run']}" if row["side"] == "weft" else f"the peer of {row['run']}"


def _speed(row: Row) -> float:
    return float(row["images_per_second"])
