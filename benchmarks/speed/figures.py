"""How fast weft answers beside its peers: the tables, the picture, and the machine that they are from.

    python benchmarks/speed/figures.py --out benchmarks/speed                    # an hour on two cores
    python benchmarks/speed/figures.py --out benchmarks/speed/gpu --device cuda  # with one command on a GPU
    python benchmarks/speed/figures.py --out benchmarks/speed --tables           # from what was measured

Writes figures.csv (one line per way of running a model), machine.json and figures.png into OUT; and where OUT is this
folder, the tables of the README here and of weft's own. Every line is from the same run as those of the same model;
ratios are to the eager peer in it (for CeiT, timm's DeiT of its size).
"""

from __future__ import annotations

import argparse
import json
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from weft.bench.plot import plot_speed
from weft.bench.records import filled, read_csv, write_csv
from weft.bench.speed import SpeedRow, matrix_peak, speed

MODELS = ("levit_128s", "levit_256", "ceit_tiny_patch16_224", "cvt_13")
WAYS = {"cpu": ("eager", "folded", "compiled", "openvino"), "cuda": ("eager", "folded", "compiled", "graphed")}
PRECISIONS = {"cpu": ("fp32", "bf16", "int8"), "cuda": ("fp32", "bf16")}
BATCHES = {"cpu": (1, 16), "cuda": (1, 256)}
PACKAGES = ("torch", "timm", "transformers", "vit-pytorch", "openvino", "nncf", "onnxruntime")
README = Path(__file__).parent / "README.md"
RELEASED_CEIT = 0.61  # of the speed of timm's DeiT-T, both eager at batch 16: nobody publishes it as a package
AIMS = (  # model, batch, ours, to what of theirs, ratio aimed at
    ("levit_128s", 1, "int8", "eager peer", 8.5),
    ("levit_128s", 16, "folded", "eager peer", 1.25),
    ("levit_128s", 16, "best float", "best float of peers", 1.1),
    ("levit_128s", 16, "int8", "eager peer", 3.5),
    ("levit_256", 1, "int8", "eager peer", 4.5),
    ("levit_256", 16, "folded", "eager peer", 1.25),
    ("levit_256", 16, "best float", "best float of peers", 1.1),
    ("levit_256", 16, "int8", "eager peer", 5.0),
    ("cvt_13", 16, "folded", "eager peer", 1.4),
    ("cvt_13", 16, "best float", "eager peer", 3.5),
    ("cvt_13", 16, "int8", "eager peer", 4.5),
    ("ceit_tiny_patch16_224", 1, "int8", "released CeiT", 5.5),
    ("ceit_tiny_patch16_224", 16, "folded", "released CeiT", 1.3),
    ("ceit_tiny_patch16_224", 16, "best float", "released CeiT", 3.3),
    ("ceit_tiny_patch16_224", 16, "int8", "released CeiT", 4.5),
)


def machine(device: str) -> dict[str, Any]:
    """What ran it."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    flags = set(re.findall(r"\b(avx2|avx512f|avx512_bf16|avx512_vnni|avx_vnni|amx_bf16|amx_int8)\b", info))
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "processor": found[1] if found else platform.processor(),
        "instructions": sorted(flags),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "system": platform.system(),
        **{f"peak_gmacs_{precision}": round(matrix_peak(precision, device) / 1e9) for precision in ("fp32", "bf16")},
        **versions,
    }


def peer_of(rows: list[dict[str, str]], row: dict[str, str]) -> dict[str, str]:
    """The eager fp32 line of the first peer in the same run."""
    return next(
        other
        for other in rows
        if (other["run"], other["batch_size"]) == (row["run"], row["batch_size"])
        and other["model"] != row["run"]
        and (other["way"], other["precision"]) == ("eager", "fp32")
    )


def table(rows: list[dict[str, str]]) -> str:
    """Markdown: images per second, ratios to the eager peer, share of the peak."""
    lines = [
        "| model | batch | way | img/s | to eager peer | p95 ms | peak % | differs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = float(row["images_per_second"]) / float(peer_of(rows, row)["images_per_second"])
        peak = f"{float(row['peak_percent']):.0f}" if row["peak_percent"] else ""
        differs = f"{float(row['difference']):.0e}" if row["difference"] else ""
        lines.append(
            f"| {row['model']} | {row['batch_size']} | {row['way']} {row['precision']} |"
            f" {float(row['images_per_second']):.1f} | {ratio:.2f} | {float(row['p95_ms']):.1f} | {peak} | {differs} |"
        )
    return "\n".join(lines)


def chosen(rows: list[dict[str, str]], run: str, batch_size: str) -> dict[str, dict[str, str] | None]:
    """The lines of one model and batch that pages tell of."""
    same = [row for row in rows if (row["run"], row["batch_size"]) == (run, batch_size)]
    ours, theirs = ([row for row in same if (row["model"] == run) == own] for own in (True, False))
    return {
        "eager peer": peer_of(rows, same[0]),
        "best float of peers": _best(theirs, is_float=True),
        "folded": next(row for row in ours if (row["way"], row["precision"]) == ("folded", "fp32")),
        "best float": _best(ours, is_float=True),
        "int8": _best(ours, is_float=False),
    }


def _best(rows: list[dict[str, str]], is_float: bool) -> dict[str, str] | None:
    chosen = [row for row in rows if (row["precision"] != "int8") == is_float]
    return max(chosen, key=_speed, default=None)


def _speed(row: dict[str, str]) -> float:
    return float(row["images_per_second"])


def summary(rows: list[dict[str, str]]) -> str:
    """Markdown: a line per model and batch, the best of theirs beside ours, in images per second."""
    lines = [
        "| model | batch | eager peer | best float of peers | weft folded | best float of weft | weft int8 |",
        "|---|---|---|---|---|---|---|",
    ]
    for run, batch_size in dict.fromkeys((row["run"], row["batch_size"]) for row in rows):
        peer, *others = chosen(rows, run, batch_size).values()
        assert peer is not None
        cells = ["" if row is None else f"{_speed(row):.0f} ({_speed(row) / _speed(peer):.2f})" for row in others]
        first = f"{_speed(peer):.0f} ({peer['model'].partition(' ')[0]})"
        lines.append(f"| {run} | {batch_size} | {' | '.join([first, *cells])} |")
    return "\n".join(lines)


def aims(rows: list[dict[str, str]]) -> str:
    """Markdown: what was aimed at, and what was reached."""
    lines = ["| model | batch | ours | to | reached | aimed at |", "|---|---|---|---|---|---|"]
    for run, batch_size, ours, theirs, aim in AIMS:
        lines_of = chosen(rows, run, str(batch_size))
        row, base = lines_of[ours], lines_of["eager peer" if theirs == "released CeiT" else theirs]
        assert row is not None
        assert base is not None
        ratio = _speed(row) / _speed(base) / (RELEASED_CEIT if theirs == "released CeiT" else 1)
        lines.append(f"| {run} | {batch_size} | {ours} | {theirs} | {ratio:.2f} | {aim:g} |")
    return "\n".join(lines)


def shares(rows: list[dict[str, str]]) -> str:
    """Markdown: a line per network, program and precision of shares.csv, in percent of its time."""
    kinds = {
        "products": ("products",),
        "attention, fused": ("attention, fused",),
        "convolutions": ("convolutions", "depthwise convolutions"),
        "activations, sums": ("activations and sums",),
        "copies, layouts": ("copies and layouts",),
        "norms": ("norms",),
        "rest": ("softmax", "optimiser", "other"),
    }
    lines = [f"| model | program | ms | {' | '.join(kinds)} |", "|---|---|---|" + "---|" * len(kinds)]
    for key in dict.fromkeys((row["model"], row["program"], row["precision"]) for row in rows):
        same = {row["kind"]: row for row in rows if (row["model"], row["program"], row["precision"]) == key}
        percent = {
            kind: sum(float(same[word]["percent"]) for word in words if word in same) for kind, words in kinds.items()
        }
        whole = sum(float(row["milliseconds"]) for row in same.values())
        cells = [f"{value:.0f}" if value >= 0.5 else "" for value in percent.values()]
        lines.append(f"| {key[0]} | {key[1]} {key[2]} | {whole:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def runtimes(rows: list[dict[str, str]]) -> str:
    """Markdown: a line per model and batch of runtimes.csv, images per second of each runtime."""
    ways = list(dict.fromkeys(f"{row['way']} {row['precision']}" for row in rows))
    lines = [f"| model | batch | {' | '.join(ways)} |", "|---|---|" + "---|" * len(ways)]
    for key in dict.fromkeys((row["model"], row["batch_size"]) for row in rows):
        found = {f"{row['way']} {row['precision']}": row for row in rows if (row["model"], row["batch_size"]) == key}
        lines.append(f"| {key[0]} | {key[1]} | {' | '.join(f'{_speed(found[way]):.0f}' for way in ways)} |")
    return "\n".join(lines)


TABLES = (
    (README, "figures", "figures.csv", table),
    (README, "aims", "figures.csv", aims),
    (README, "shares", "shares.csv", shares),
    (README, "runtimes", "runtimes.csv", runtimes),
    (README.parents[2] / "README.md", "figures", "figures.csv", summary),
)


def plot(rows: list[dict[str, str]], file: Path) -> None:
    kinds = {"params": int, "macs": int, "batch_size": int, "calls": int, "threads": int}
    words = {"model": str, "way": str, "precision": str, "device": str}
    typed = [
        SpeedRow(
            **{
                key: None if text == "" else ({**kinds, **words}.get(key, float))(text)
                for key, text in row.items()
                if key != "run"
            }
        )
        for row in rows
        if row["model"] == row["run"]
    ]
    plot_speed(typed, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "figures.csv"
    rows: list[dict[str, Any]] = list(read_csv(file))
    if not args.tables:
        (args.out / "machine.json").write_text(json.dumps(machine(args.device), indent=2) + "\n")
        for name in args.models:
            measured = speed(
                [name],
                ways=WAYS[args.device],
                precisions=PRECISIONS[args.device],
                batch_sizes=BATCHES[args.device],
                rounds=args.rounds,
                peers=True,
                device=args.device,
            )
            rows = [row for row in rows if row["run"] != name]
            rows += [{"run": name, **{k: _short(v) for k, v in row.as_dict().items()}} for row in measured]
            write_csv(file, rows)  # after every model: an hour is long
            print(table([row for row in rows if row["run"] == name]), flush=True)
    rows = read_csv(file)
    plot(rows, args.out / "figures.png")
    if args.out.resolve() == README.parent.resolve():
        for page, name, source, made in TABLES:
            page.write_text(filled(page.read_text(), name, made(read_csv(args.out / source)))[0])


def _short(value: Any) -> str:
    return "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
