"""Record the choice of `weft export --format auto` for the instruction sets of two processors.

    python benchmarks/deploy/auto.py RUN PHOTOS --csv benchmarks/deploy/auto.csv     # five minutes on two quiet cores

ONEDNN_MAX_CPU_ISA=AVX2 makes OpenVINO run as on a processor without AVX-512, VNNI and bf16. It has no effect on ONNX
Runtime. Writes a row per candidate export.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.records import replace_rows

from weft.machine.processor import processor_class
from weft.recipes import load_recipe

LIMITS = ("", "AVX2")


def rows(run: Path, photos: Path, limit: str) -> list[dict[str, str]]:
    """Export with an instruction set limit ('' for none); return a row per candidate export."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "auto"
        environment = os.environ | {"WEFT_CACHE": folder} | ({"ONEDNN_MAX_CPU_ISA": limit} if limit else {})
        command = [
            sys.executable,
            "-m",
            "weft",
            "export",
            str(run),
            str(out),
            "--format",
            "auto",
            "--data",
            str(photos),
            "--json",
        ]
        done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE)
        report = json.loads(done.stdout)
    return [
        {
            "model": str(load_recipe(run / "recipe.yaml").model),
            "instruction_set": limit or processor_class(),
            "format": one["format"],
            "precision": one["precision"],
            **{
                f"images_per_second_{n}": f"{int(n) / one['seconds'][n]:.1f}" if one["seconds"] else ""
                for n in ("1", "16")
            },
            "difference": "" if one["difference"] is None else f"{one['difference']:.2g}",
            "top1": "" if one["top1"] is None else f"{one['top1']:.2f}",
            "chosen": str(all(one[key] == report[key] for key in ("format", "precision"))),
            "refused": one["refused"] or "",
            "processor_class": processor_class(),
        }
        for one in report["candidates"]
    ]


def rate(seconds: dict[str, float], size: str) -> str:
    """Return the images per second at a batch size; empty if it was not timed."""
    return f"{int(size) / seconds[size]:.1f}" if size in seconds else ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--csv", type=Path, required=True)
    args = parser.parse_args()
    limits = ("",) if processor_class() == "avx2" else LIMITS
    measured = [row for limit in limits for row in rows(args.run, args.photos, limit)]
    replace_rows(args.csv, measured, ("model", "processor_class"))
    print(json.dumps(measured, indent=1))
