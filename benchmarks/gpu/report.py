"""Write README.md of a measurement on a GPU, and the rows of the GPU in weft's README, from the CSV files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from settings import HERE, ROOT

from weft.bench.records import filled, read_csv
from weft.files import write_text

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
MACHINE = ("device", "torch", "cuda", "timm", "transformers", "commit")


def write_pages(out: Path, *, publish: bool) -> None:
    """Write README.md next to the CSV files; with `publish`, also the table of weft's README."""
    if not any((out / f"{part}.csv").exists() for part in HEADINGS):
        return
    write_text(out / "README.md", page(out))
    if publish:
        spec = importlib.util.spec_from_file_location("figures", ROOT / "benchmarks" / "speed" / "figures.py")
        assert spec is not None
        assert spec.loader is not None
        figures = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(figures)
        front = ROOT / "README.md"
        write_text(front, filled(front.read_text(), "figures", figures.summary(figures.measured_folders()))[0])


def page(folder: Path) -> str:
    """Return the Markdown of all CSV files of a folder."""
    lines = ["# Measurements on a GPU", "", "`make gpu` writes this page and the CSV files next to it (see run.py)."]
    for part, heading in HEADINGS.items():
        rows = read_csv(folder / f"{part}.csv")
        if rows:
            shown = _tests(rows) if part == "tests" else rows
            hidden = MACHINE if part == "failures" else (*MACHINE, "cell")  # other columns describe the cell
            columns = [key for key in shown[0] if key not in hidden]
            lines += ["", f"## {heading}", "", *_machines(rows), "", _table(shown, columns)]
    return "\n".join(lines) + "\n"


def _machines(rows: list[Row]) -> list[str]:
    """Return a line per machine of the rows."""
    machines = dict.fromkeys(tuple(row[key] for key in MACHINE) for row in rows)
    return [
        ", ".join(f"{key} {value}" for key, value in zip(MACHINE, values, strict=True) if value) + "."
        for values in machines
    ]


def _tests(rows: list[Row]) -> list[Row]:
    """Return a row with the number of tests per result, and the rows of the tests that did not pass."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["result"]] = counts.get(row["result"], 0) + 1
    total = {"test": ", ".join(f"{count} {result}" for result, count in counts.items()), "result": "", "message": ""}
    return [total, *(row for row in rows if row["result"] in ("failure", "error"))]


def _table(rows: list[Row], columns: list[str]) -> str:
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    lines += [f"| {' | '.join(row.get(key, '').replace('|', ' ') for key in columns)} |" for row in rows]
    return "\n".join(lines)


def gpu_rows(folder: Path = HERE) -> str:
    """Return Markdown for weft's README: ratios to the fastest way of the peer; '' without measurements."""
    measured = [row for part in ("speed", "other_ways") for row in read_csv(folder / f"{part}.csv")]
    rows = [row for row in measured if row["images_per_second"]]
    lines = []
    for key in dict.fromkeys((row["device"], row["run"], row["batch_size"], row["precision"]) for row in rows):
        same = [row for row in rows if (row["device"], row["run"], row["batch_size"], row["precision"]) == key]
        own, peers = ([row for row in same if row["side"] == side] for side in ("weft", "peer"))
        if not (own and peers):
            continue
        best, peer = max(own, key=_speed), max(peers, key=_speed)
        eager, peer_eager = ([row for row in side if row["way"] == "eager"] for side in (own, peers))
        ratio = f"{_speed(eager[0]) / _speed(peer_eager[0]):.2f}" if eager and peer_eager else "-"
        lines.append(
            f"| {' | '.join(key)} | {_speed(peer):.0f} ({peer['model'].partition(' ')[0]}, {peer['way']}) | {ratio} |"
            f" {_speed(best) / _speed(peer):.2f} | {_speed(best):.0f}, {best['way']} |"
        )
    if not lines:
        return ""
    head = [
        "On a GPU, the fastest measured way of each side ([all rows](benchmarks/gpu/README.md)). `graphed`: compiled,",
        "and replayed as a CUDA graph.",
        "",
        "| GPU | model | batch | precision | fastest of the peer, images/s | eager to eager | fastest to fastest |"
        " fastest of weft, images/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    failed = [f"{row['way']} {row['precision']} of {_name(row)}" for row in measured if row["error"]]
    tail = ["", f"Failed: {', '.join(dict.fromkeys(failed))}."] if failed else []
    return "\n".join([*head, *lines, *tail])


def _name(row: Row) -> str:
    """Return the network of a row with its side; a network that failed has the name of weft's on both sides."""
    return f"weft's {row['run']}" if row["side"] == "weft" else f"the peer of {row['run']}"


def _speed(row: Row) -> float:
    return float(row["images_per_second"])
