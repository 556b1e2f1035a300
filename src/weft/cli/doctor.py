"""`weft doctor`: check installed versions, and describe this machine."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from typing import Any

import psutil
from packaging.requirements import Requirement
from packaging.version import Version

from weft.cli.options import Shown, note, print_json, table
from weft.errors import DISTRIBUTION, is_installed
from weft.machine.processor import available_cores, cpu_flags, cpu_name, num_threads, processor_class
from weft.version import __version__

DEVELOPMENT = ("dev", "docs")  # extras for work on weft itself, which are not listed
# required packages that an installation without torch lacks (requirements-runtime.txt)
WITH_TORCH = {
    *("torch", "torchvision", "timm", "huggingface_hub"),
    *("scikit-learn", "threadpoolctl", "scipy", "matplotlib", "simplejpeg"),
}


def doctor(*, shown: Shown = Shown()) -> int:
    """Check installed versions, and describe this machine.

    Example:
        weft doctor

        package      installed  needed    state   extra
        torch        2.15.0     >=2.10    ok
        onnx         1.21.0     >=1.21    ok      deploy
        pillow-heif  -          >=1.1     absent  heic
        ...

        An absent package is optional. Install the packages of an extra, for example: pip install 'weft-vision[heic]'
        The exit code is 1 if a required package is missing, or any is too old.
    """
    packages = check_packages()
    if not shown.json:  # before torch is imported
        print(f"weft {__version__}, Python {platform.python_version()}\n")
        print(
            table(("package", "installed", "needed", "state", "extra"), [tuple(row.values()) for row in packages]),
            flush=True,
        )
    machine = describe_machine()
    if shown.json:
        print_json({"weft": __version__, "packages": packages, "machine": machine})
    else:
        print(
            "\n" + table(("machine", ""), [(name.replace("_", " "), _text(value)) for name, value in machine.items()])
        )
    if not packages:
        note("weft: the requirements are not known, because weft is not installed. Run: pip install -e .")
        return 1
    return int(any(row["state"] in ("missing", "too old") for row in packages))


def check_packages() -> list[dict[str, str]]:
    """Return required and optional packages with their state: ok, missing (required), absent (optional) or too old.

    Without torch, it and the packages that only serve with it are optional: predict and serve run exports.
    The list is empty if weft runs from a source tree and is not installed.
    """
    try:
        requirements = [Requirement(text) for text in importlib.metadata.requires(DISTRIBUTION) or []]
    except importlib.metadata.PackageNotFoundError:
        return []
    optional = set[str]() if is_installed("torch") else WITH_TORCH
    rows = []
    for need in sorted(requirements, key=lambda need: not _applies(need, "")):  # those that are required come first
        names = re.findall(r"extra == ['\"]([\w.-]+)['\"]", str(need.marker or ""))
        extras = [name for name in dict.fromkeys(names) if name not in DEVELOPMENT and _applies(need, name)]
        if _applies(need, ""):
            rows.append({**_check(need, if_absent="absent" if need.name in optional else "missing"), "extra": ""})
        elif extras and need.name != DISTRIBUTION:
            rows.append({**_check(need, if_absent="absent"), "extra": ", ".join(extras)})
    return rows


def _applies(need: Requirement, extra: str) -> bool:
    """Return whether a requirement applies to this system and Python, with an extra or without (an empty text)."""
    return need.marker is None or need.marker.evaluate({"extra": extra})


def _check(need: Requirement, if_absent: str) -> dict[str, str]:
    try:
        installed = importlib.metadata.version(need.name)
        state = "ok" if need.specifier.contains(Version(installed), prereleases=True) else "too old"
    except importlib.metadata.PackageNotFoundError:
        installed, state = "-", if_absent
    return {"package": need.name, "installed": installed, "needed": str(need.specifier), "state": state}


def describe_machine() -> dict[str, Any]:
    """Return system, processor, memory and GPUs."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": sys.version.split()[0],
        "cores": available_cores(),
        "threads": num_threads(),
        "processor": cpu_name(),
        "processor_class": processor_class(),
        "cpu_flags": list(cpu_flags()),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        **(_torch() if is_installed("torch") else {}),
    }


def _torch() -> dict[str, Any]:
    """Return the instruction set of torch, and the GPUs that it can use."""
    import torch

    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return {
        "torch_cpu_kernels": torch.backends.cpu.get_cpu_capability(),
        "gpus": [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus],
        "cuda": torch.version.cuda if gpus else None,
        "bf16_on_gpu": torch.cuda.is_bf16_supported() if gpus else None,
    }


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
