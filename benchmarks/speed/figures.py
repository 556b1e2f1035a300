"""Measure the inference speed of weft's networks and their peers, and write the tables and plots of the results.

    python benchmarks/speed/figures.py                   # one hour on two cores
    python benchmarks/speed/figures.py --threads 1 --ways eager folded openvino --allocators default
    python benchmarks/speed/figures.py --tables          # only write the tables again

Writes figures.csv (a row per way to run a network), machine.json and figures.png to a folder named after the class of
the processor (see `weft doctor`), then the tables of the README in this folder and of weft's README. With
ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2, the folder is avx2_emulated. A class that
is measured for the first time gets a section in the README of this folder. All rows of a network in one precision are
from one run, in which the processes of weft and of its peers take turns with equal settings: threads, precision, batch
and allocator. Both allocators are measured on both sides.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.peers import peers_of
from benchmarks.common.records import filled, read_csv, write_csv
from benchmarks.common.ways import settings_of, worker
from benchmarks.speed.plot import plot_speed

from weft.bench.speed import measure as measured_rows
from weft.bench.worker_process import WorkerProcess
from weft.errors import UsageError
from weft.machine.processor import cpu_name, has_bf16, limits, onednn_flags, processor_class

Row = dict[str, str]
MODELS = ("levit_128s", "levit_256", "ceit_tiny_patch16_224", "cvt_13")
WAYS = ("eager", "folded", "compiled", "openvino")
BATCHES = (1, 16)
PACKAGES = ("torch", "timm", "transformers", "vit-pytorch", "openvino", "nncf", "onnxruntime")
HERE = Path(__file__).parent
GPU = HERE.parent / "gpu"
CLASSES = {  # processor class (and name of its folder): name in the tables
    "avx2": "AVX2",
    "avx2_emulated": "AVX2, emulated",
    "avx2_vnni": "AVX2, VNNI",
    "avx512": "AVX-512",
    "avx512_vnni": "AVX-512, VNNI",
    "avx512_bf16_vnni": "AVX-512, VNNI, bf16",
    "amx": "AMX",
    "neon": "Neon",
    "sve": "SVE",
    "unknown": "unknown",
}
FURTHER = {  # additional table of a class: text before it, in a section that this script adds
    "targets": "Ratios to the peers, and the targets:",
    "allocators": "Effect of `weft.keep_memory()`: throughput with it, relative to throughput without it:",
}
EAGER, FOLDED, BEST, INT8 = 1.0, 1.25, 1.1, 1.0  # targets of the ratio to the peers
NEAR_PEAK = 90  # percent of the machine's peak: where the hardware is the limit, no ratio is required
NOT_MEASURED = "-"  # on this class
DETAILS = "<details><summary>All measurements</summary>"
PEAK_SIDE = 2048  # side of the square matrices that are multiplied to measure the peak
PEAK_SECONDS = 2.0  # after which the peak is measured no longer: emulated bf16 is slow
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def machine() -> dict[str, Any]:
    """Return processor, threads, peak speed and package versions of this machine."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    precisions = ("fp32", "bf16") if has_bf16() else ("fp32",)
    return {
        "processor": cpu_name() or platform.processor(),
        "class": processor_class(onednn_flags()),
        "instructions": onednn_flags(),
        "limits": limits(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "system": platform.system(),
        **{f"peak_gmacs_{precision}": round(matrix_peak(precision) / 1e9) for precision in precisions},
        **versions,
    }


def matrix_peak(precision: str, threads: int | None = None) -> float:
    """Return this machine's multiply-adds per second in a large matrix multiplication in fp32 or bf16.

    It is the best of ten multiplications, or of fewer if they take PEAK_SECONDS.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    left, right = (torch.randn(PEAK_SIDE, PEAK_SIDE).to(DTYPES[precision]) for _ in range(2))
    times = [_timed(lambda: left @ right)]
    while len(times) < 10 and sum(times) < PEAK_SECONDS:
        times.append(_timed(lambda: left @ right))
    torch.set_num_threads(before)
    return PEAK_SIDE**3 / min(times)


def _timed(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def precisions_of() -> tuple[str, ...]:
    """Return the precisions to measure: bf16 only if the processor supports it."""
    return ("fp32", "bf16", "int8") if has_bf16() else ("fp32", "int8")


class Case:
    """Rows of a network and its peers for one batch size and number of threads."""

    def __init__(self, rows: list[Row], run: str, batch_size: str, threads: str) -> None:
        self.run, self.batch_size, self.threads = run, batch_size, threads
        self.rows = [row for row in rows if _key(row) == (run, batch_size, threads)]

    def find(self, way: str, precision: str = "fp32", allocator: str = "default", *, peer: bool = False) -> Row | None:
        """Return the fastest row of weft, or of all peers, for given settings; None if not measured."""
        key = (way, precision, allocator)
        rows = [
            row
            for row in self.rows
            if (row["model"] != self.run) == peer and (row["way"], row["precision"], row["allocator"]) == key
        ]
        return max(rows, key=_speed, default=None)

    def best(self, *, precisions: tuple[str, ...], peer: bool = False) -> Row | None:
        """Return the fastest row of weft, or of all peers, in any way with the default allocator."""
        rows = [
            row
            for row in self.rows
            if (row["model"] != self.run) == peer and row["precision"] in precisions and row["allocator"] == "default"
        ]
        return max(rows, key=_speed, default=None)

    def eager_peer(self, allocator: str = "default") -> Row | None:
        """Return the row of the first peer, eager, in fp32: the base of all ratios."""
        return next((r for r in self.rows if r["model"] != self.run and _is(r, "eager", "fp32", allocator)), None)


def cases(rows: list[Row], threads: str | None = None) -> list[Case]:
    """Return all networks, batch sizes and numbers of threads; with `threads`, those of that number alone."""
    keys = dict.fromkeys(_key(row) for row in rows if threads in (None, row["threads"]))
    runs = list(dict.fromkeys(row["run"] for row in rows))
    return [Case(rows, *key) for key in sorted(keys, key=lambda key: (runs.index(key[0]), -int(key[2])))]


def _key(row: Row) -> tuple[str, str, str]:
    return row["run"], row["batch_size"], row["threads"]


def most_threads(rows: list[Row]) -> str:
    """Return the largest number of threads that was measured."""
    return max((row["threads"] for row in rows), key=int)


def _is(row: Row, way: str, precision: str, allocator: str) -> bool:
    return (row["way"], row["precision"], row["allocator"]) == (way, precision, allocator)


def _speed(row: Row) -> float:
    return float(row["images_per_second"])


def ratio(row: Row | None, base: Row | None) -> str:
    """Return the throughput of a row relative to that of another row; `-` if one was not measured."""
    return NOT_MEASURED if row is None or base is None else f"{_speed(row) / _speed(base):.2f}"


def table(rows: list[Row]) -> str:
    """Return Markdown of all rows with the most threads; ratios are to the eager peer with the same allocator."""
    lines = [
        "| model | batch | way | allocator | img/s | to eager peer | p95 ms | peak % | differs |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in cases(rows, most_threads(rows)):
        for row in case.rows:
            peak = f"{float(row['peak_percent']):.0f}" if row["peak_percent"] else ""
            differs = f"{float(row['difference']):.0e}" if row["difference"] else ""
            lines.append(
                f"| {row['model']} | {row['batch_size']} | {row['way']} {row['precision']} | {row['allocator']} |"
                f" {_speed(row):.1f} | {ratio(row, case.eager_peer(row['allocator']))} | {float(row['p95_ms']):.1f} |"
                f" {peak} | {differs} |"
            )
    return "\n".join(lines)


def summary(folders: list[Path]) -> str:
    """Return Markdown for weft's README: ratios under equal settings, a group of rows per processor class."""
    lines = [
        "| processor | model | batch | eager peer, images/s | eager | folded | folded, both keep memory"
        " | OpenVINO fp32 | OpenVINO bf16 | OpenVINO int8 | fastest of weft, images/s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for folder in folders:
        rows = read_csv(folder / "figures.csv")
        for case in cases(rows, most_threads(rows)):
            base = case.eager_peer()
            assert base is not None, case.run
            best = max((row for row in case.rows if row["model"] == case.run), key=_speed)
            cells = [
                ratio(case.find("eager"), base),
                ratio(case.find("folded"), base),
                ratio(case.find("folded", allocator="keep"), case.eager_peer("keep")),
                *(
                    ratio(case.find("openvino", precision), case.find("openvino", precision, peer=True))
                    for precision in ("fp32", "bf16", "int8")
                ),
                f"{_speed(best):.0f}, {best['way']} {best['precision']}",
            ]
            peer = f"{_speed(base):.0f} ({base['model'].partition(' ')[0]})"
            lines.append(f"| {CLASSES[folder.name]} | {case.run} | {case.batch_size} | {peer} | {' | '.join(cells)} |")
    gpu = _gpu_rows()
    return "\n".join([*lines, *(["", gpu] if gpu else [])])


def _gpu_rows() -> str:
    """Return Markdown of the measurements on a GPU; '' without any."""
    sys.path.insert(0, str(GPU))
    try:
        return importlib.import_module("report").gpu_rows()
    finally:
        sys.path.remove(str(GPU))


def allocators(rows: list[Row]) -> str:
    """Return Markdown of the effect of `weft.keep_memory` on each side: throughput with it relative to without it."""
    lines = ["| model | batch | eager peer | weft eager | weft folded |", "|---|---|---|---|---|"]
    for case in cases(rows, most_threads(rows)):
        pairs = [
            (case.eager_peer("keep"), case.eager_peer()),
            *((case.find(way, allocator="keep"), case.find(way)) for way in ("eager", "folded")),
        ]
        lines.append(f"| {case.run} | {case.batch_size} | {' | '.join(ratio(*pair) for pair in pairs)} |")
    return "\n".join(lines)


def targets(rows: list[Row]) -> str:
    """Return Markdown of the ratios to the peers that have targets; those that reach theirs are bold."""
    lines = [
        f"| model | batch | threads | eager ({EAGER}) | folded ({FOLDED}) | fp32 ({BEST}) | bf16 ({BEST})"
        f" | int8 ({INT8}) | int8 to eager peer |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in cases(rows):
        keep = case.eager_peer("keep")
        cells = [
            ", ".join(
                _reached(case.find(way, allocator=allocator), base, target)
                for allocator, base in (("default", case.eager_peer()), *([("keep", keep)] if keep else []))
            )
            for way, target in (("eager", EAGER), ("folded", FOLDED))
        ]
        for precision, target in (("fp32", BEST), ("bf16", BEST), ("int8", INT8)):
            own, peer = (case.best(precisions=(precision,), peer=is_peer) for is_peer in (False, True))
            cells.append(_reached(own, peer, target))
        cells.append(ratio(case.best(precisions=("int8",)), case.eager_peer()))
        lines.append(f"| {case.run} | {case.batch_size} | {case.threads} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _reached(row: Row | None, base: Row | None, target: float) -> str:
    """Return a ratio with the percentage of the machine's peak; bold if either reaches its target."""
    text = ratio(row, base)
    if row is None or base is None:
        return text
    peak = float(row["peak_percent"] or 0)
    is_reached = _speed(row) >= target * _speed(base) or peak >= NEAR_PEAK
    text = f"**{text}**" if is_reached else text
    return f"{text} ({peak:.0f} %)" if target == BEST and peak else text


def corrected(rows: list[Row]) -> str:
    """Return Markdown of the ratios to the eager peer, as published earlier and under equal settings."""
    lines = [
        "| model | batch | way | published | weft keeps memory, the peer does not (here) | neither keeps | both keep |",
        "|---|---|---|---|---|---|---|",
    ]
    old = {(row["model"], row["batch_size"], row["way"]): row["ratio"] for row in read_csv(HERE / "published.csv")}
    for case in cases(rows):
        for way in ("eager", "folded", "compiled"):
            default, keep = case.find(way), case.find(way, allocator="keep")
            lines.append(
                f"| {case.run} | {case.batch_size} | {way} | {old[case.run, case.batch_size, way]} |"
                f" {ratio(keep, case.eager_peer())} | {ratio(default, case.eager_peer())} |"
                f" {ratio(keep, case.eager_peer('keep'))} |"
            )
    return "\n".join(lines)


def shares(rows: list[Row]) -> str:
    """Return Markdown of shares.csv: a row per processor class, network, program and precision, in percent."""
    kinds = {
        "matrix multiplications": ("matrix multiplications",),
        "attention, fused": ("attention, fused",),
        "convolutions": ("convolutions", "depthwise convolutions"),
        "activations, sums": ("activations and sums",),
        "copies, layouts": ("copies and layouts",),
        "norms": ("norms",),
        "rest": ("softmax", "optimiser", "other"),
    }
    names = ("processor_class", "model", "program", "precision")
    lines = [f"| processor | model | program | ms | {' | '.join(kinds)} |", "|---|---|---|---|" + "---|" * len(kinds)]
    for key in dict.fromkeys(tuple(row[name] for name in names) for row in rows):
        same = {row["kind"]: row for row in rows if tuple(row[name] for name in names) == key}
        processor = CLASSES.get(key[0], "not recorded")
        percent = {
            column: sum(float(same[kind]["percent"]) for kind in members if kind in same)
            for column, members in kinds.items()
        }
        total = sum(float(row["milliseconds"]) for row in same.values())
        cells = [f"{value:.0f}" if value >= 0.5 else "" for value in percent.values()]
        lines.append(f"| {processor} | {key[1]} | {key[2]} {key[3]} | {total:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def runtimes(rows: list[Row]) -> str:
    """Return Markdown of runtimes.csv: a row per class, model and batch size, images per second of each runtime."""
    ways = list(dict.fromkeys(f"{row['way']} {row['precision']}" for row in rows))
    lines = [f"| processor | model | batch | {' | '.join(ways)} |", "|---|---|---|" + "---|" * len(ways)]
    columns = ("processor_class", "model", "batch_size")
    for key in dict.fromkeys(tuple(row[column] for column in columns) for row in rows):
        same = [row for row in rows if tuple(row[column] for column in columns) == key]
        speeds = {f"{row['way']} {row['precision']}": f"{_speed(row):.0f}" for row in same}
        cells = [CLASSES[key[0]], *key[1:], *(speeds.get(way, NOT_MEASURED) for way in ways)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def int8_linear(rows: list[Row]) -> str:
    """Return Markdown of int8_linear.csv: a row per network, batch size, and instructions of a processor."""
    ways = ("fp32", "fp32 convolutions", "int8 matrix multiplications", "int8 convolutions", "int8, attention in fp32")
    lines = [f"| model | batch | instructions | {' | '.join(ways)} |", "|---|---|---|" + "---|" * len(ways)]
    names = {"AVX512_CORE_VNNI": "AVX-512, VNNI", "AVX2": "AVX2"}  # of ONEDNN_MAX_CPU_ISA
    for row in rows:
        own, limit = CLASSES[row["processor_class"]], row["instruction_set"]
        instructions = f"{names[limit]} (on {own})" if limit in names else own
        cells = [f"{float(row[way]):.0f}" if row[way] else NOT_MEASURED for way in ways]
        lines.append(f"| {row['model']} | {row['batch_size']} | {instructions} | {' | '.join(cells)} |")
    return "\n".join(lines)


def attempts(rows: list[Row]) -> str:
    """Return Markdown of attempts.csv: a row per idea, with a column per batch size."""
    sizes = sorted({row["batch_size"] for row in rows}, key=int)
    names = ("processor_class", "model", "precision", "way", "idea")
    titles = " | ".join(f"batch {size}" for size in sizes)
    lines = [f"| processor | model | way | idea | {titles} |", "|---|---|---|---|" + "---|" * len(sizes)]
    for key in sorted(dict.fromkeys(tuple(row[name] for name in names) for row in rows), key=lambda key: key[:2]):
        cells = {row["batch_size"]: row for row in rows if tuple(row[name] for name in names) == key}
        column = "to_base" if key[4] else "images_per_second"
        values = [(cells[size][column] or "failed") if size in cells else NOT_MEASURED for size in sizes]
        lines.append(f"| {CLASSES[key[0]]} | {key[1]} | {key[3]} {key[2]} | {key[4]} | {' | '.join(values)} |")
    return "\n".join(lines)


def training(rows: list[Row]) -> str:
    """Return Markdown of step.csv, without compilation: a row per pair and processor class, relative to the peer."""
    pairs = {
        "cvt_13": "CvT-13 to transformers' (1.4, 1.4)",
        "levit_256": "LeViT-256 to timm's (1.15, 1.15)",
        "ceit_tiny_patch16_224": "CeiT-T to timm's DeiT-T (0.85, 0.95)",
    }
    columns = [(precision, allocator) for precision in ("fp32", "bf16") for allocator in ("default", "keep")]
    titles = [f"{precision}{', both keep memory' if kept == 'keep' else ''}" for precision, kept in columns]
    lines = [
        f"| pair (targets in fp32, bf16) | processor | {' | '.join(titles)} | memory fp32, bf16 |",
        "|---|---|" + "---|" * (len(titles) + 1),
    ]
    for model, text in pairs.items():
        own = [row for row in rows if row["mode"] == "eager" and row["ours"] == f"weft {model}"]
        for device in dict.fromkeys(row["device"] for row in own):
            cells = {(row["precision"], row["allocator"]): row for row in own if row["device"] == device}
            ratios = [f"{float(cells[key]['ratio']):.2f}" if key in cells else NOT_MEASURED for key in columns]
            memory = [
                f"{int(row['ours_peak_mib']) / int(row['peer_peak_mib']):.2f}"
                for precision in ("fp32", "bf16")
                if (row := cells.get((precision, "default")))
            ]
            lines.append(f"| {text} | {CLASSES[device]} | {' | '.join(ratios)} | {', '.join(memory)} |")
            text = ""
    return "\n".join(lines)


def measured_folders() -> list[Path]:
    """Return the folders of the processor classes that were measured."""
    return [HERE / name for name in CLASSES if (HERE / name / "figures.csv").exists()]


def tables() -> list[tuple[Path, str, str]]:
    """Return every generated table: page, name in its markers, Markdown."""
    page, front, changelog = HERE / "README.md", HERE.parents[1] / "README.md", HERE.parents[1] / "CHANGELOG.md"
    generated = [(front, "figures", summary(measured_folders()))]
    for folder in measured_folders():
        rows = read_csv(folder / "figures.csv")
        generated += [(page, folder.name, table(rows)), (page, f"{folder.name} targets", targets(rows))]
        if any(row["allocator"] == "keep" for row in rows):
            generated.append((page, f"{folder.name} allocators", allocators(rows)))
    published = corrected(read_csv(HERE / "avx512_vnni" / "figures.csv"))
    generated += [(page, "avx512_vnni corrected", published), (changelog, "corrected", published)]
    generated.append((page, "shares", shares(read_csv(HERE / "shares.csv"))))
    steps = read_csv(HERE.parent / "training" / "step.csv")
    generated.append((HERE.parent / "README.md", "training", training(steps)))
    generated.append((page, "attempts", attempts(read_csv(HERE / "attempts.csv"))))
    generated.append((page, "runtimes", runtimes(read_csv(HERE / "runtimes.csv"))))
    generated.append((page, "int8_linear", int8_linear(read_csv(HERE / "int8_linear.csv"))))
    return generated


def with_markers(page: str, name: str) -> str:
    """Add the markers of a table to a page that lacks them, with a section if the processor class has none.

    Args:
        page: text of the page, with the section of at least one class, and a section after those of the classes.
        name: name in the markers. For a table that is not of a class, the page is returned unchanged.
    """
    folder, _, kind = name.partition(" ")
    if folder not in CLASSES or f"<!-- begin {name} -->" in page:
        return page
    last = max(page.rfind(f"<!-- end {other} ") for other in ([folder] if kind else CLASSES))
    position = page.index("\n## ", last) + 1
    markers = f"<!-- begin {name} -->\n\n<!-- end {name} -->\n\n"
    if kind:
        text = f"{FURTHER[kind]}\n\n{markers}"
    else:
        figure = f"![Images per second against multiply-adds]({folder}/figures.png)\n\n"
        targets = f"{FURTHER['targets']}\n\n<!-- begin {folder} targets -->\n\n<!-- end {folder} targets -->\n\n"
        title = f"## {CLASSES[folder]} (`{folder}/machine.json`)\n\n"
        text = f"{title}{targets}{figure}{DETAILS}\n\n{markers}</details>\n\n"
    return page[:position] + text + page[position:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="default: the folder of this machine's class, next to this script")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--precision", nargs="+", default=precisions_of())
    parser.add_argument("--allocators", nargs="+", default=("default", "keep"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tables", action="store_true", help="only write the tables again")
    args = parser.parse_args()
    if not args.tables:
        out = args.out or HERE / (processor_class(onednn_flags()) + ("_emulated" if limits() else ""))
        options = dict(ways=args.ways, allocators=args.allocators, threads=args.threads, rounds=args.rounds)
        measure(out, args.models, args.precision, options)
    if args.out is None:
        for page, name, text in tables():
            page.write_text(filled(with_markers(page.read_text(), name), name, text)[0])


def measure(out: Path, models: list[str], precisions: list[str], options: dict[str, Any]) -> None:
    """Measure networks, and replace their rows of the same precisions and number of threads in figures.csv.

    Args:
        out: folder of figures.csv.
        models: names of the networks.
        precisions: fp32, bf16 and int8, one after the other: all at once need more memory than many machines have.
        options: ways, allocators, threads, rounds.
    """
    out.mkdir(parents=True, exist_ok=True)
    file, threads = out / "figures.csv", str(options["threads"])
    (out / "machine.json").write_text(json.dumps(machine(), indent=2) + "\n")
    rows: list[Any] = list(read_csv(file))
    for name in models:
        measured = [row for precision in precisions for row in speed(name, precision, **options)]
        new = {(name, threads, precision) for precision in precisions}
        rows = [row for row in rows if (row["run"], row["threads"], row["precision"]) not in new]
        rows += [{"run": name, **{k: _short(v) for k, v in row.items()}} for row in measured]
        write_csv(file, rows)  # after every model, so that an interruption loses no finished one
        print(table([row for row in rows if row["run"] == name]), flush=True)
    drawn = [row for row in read_csv(file) if row["model"] == row["run"] and row["allocator"] == "default"]
    if drawn:  # with --allocators keep, none is
        plot_speed([row for row in drawn if row["threads"] == most_threads(rows)], out / "figures.png")


def speed(
    model: str,
    precision: str,
    *,
    ways: Sequence[str],
    allocators: Sequence[str],
    threads: int,
    rounds: int,
    batch_sizes: Sequence[int] = BATCHES,
) -> list[dict[str, Any]]:
    """Return rows of `weft.bench` for a network and its peers, with allocator, peak_percent, params and macs.

    All processes take turns. A way that fails for a peer is left out with a warning.
    """
    peak = None if precision == "int8" else matrix_peak(precision, threads)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))

        def started(way: str, precision: str, **more: Any) -> WorkerProcess | None:
            process = stack.enter_context(worker(model, way, precision, folder=folder, threads=threads, **more))
            try:
                process.build()
            except UsageError as error:
                if more["peer"] is None:
                    raise
                warnings.warn(f"One way of a peer is left out. {error}", stacklevel=2)
                return None
            print(f"ready: {process.name}, allocator {more['allocator']}", flush=True)
            return process

        reference = started("eager", "fp32", peer=None, peers=True, allocator="default")
        processes: list[tuple[WorkerProcess, WorkerProcess | None]] = []
        columns: list[dict[str, Any]] = []
        for settings in settings_of(model, ways, (precision,), allocators):
            if (process := started(**settings)) is not None:
                peer = settings["peer"]
                is_same = peer is None or (peer == 0 and peers_of(model)[0].same_weights)
                processes.append((process, reference if is_same else None))
                columns.append({"allocator": settings["allocator"], **(process.subject.more or {})})
        rows = []
        for batch_size in batch_sizes:
            for row, more in zip(measured_rows(processes, batch_size, rounds), columns, strict=True):
                percent = None if peak is None else 100 * more["macs"] * row.images_per_second / peak
                rows.append({**row.as_dict(), **more, "peak_percent": percent})
        return rows


def _short(value: Any) -> str:
    return "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
