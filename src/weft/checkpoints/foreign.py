"""Opening a file that names foreign classes: in a process of its own, with bounded memory, tensors handed back.

The stand-ins of `pickles` run nothing; the process bounds what a file can cost. It answers with a safetensors file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file

from weft.checkpoints.files import Contents, pick
from weft.checkpoints.pickles import load_pickle
from weft.errors import CheckpointError

_EXTRA_BYTES = 2 << 30  # beyond four times the file: torch's own needs
_SECONDS = 600


def load_in_child(path: Path, which: str | None) -> Contents:
    """Reads the state dict of a pickle in a child process.

    Raises:
        CheckpointError: what the child says, or that it did not survive.
    """
    with tempfile.TemporaryDirectory(prefix="weft-") as folder:
        weights = Path(folder) / "weights.safetensors"
        task = json.dumps({"path": str(path), "which": which, "weights": str(weights)})
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
        try:
            child = subprocess.run(
                [sys.executable, "-m", "weft.checkpoints.foreign", task],
                env=environment, capture_output=True, text=True, timeout=_SECONDS,
            )  # fmt: skip
            answer = json.loads(child.stdout)
        except (subprocess.TimeoutExpired, json.JSONDecodeError):
            raise CheckpointError(
                f"{path} could not be opened within bounded memory and time. It is damaged or made to exhaust them."
            ) from None
        if "error" in answer:
            raise CheckpointError(answer["error"])
        return Contents(load_file(weights), answer["part"], answer["others"])


def _bound_memory(path: Path) -> None:
    """Bounds the address space of this process, torch already loaded, where the system can."""
    try:
        import resource
    except ImportError:  # Windows
        return
    pages = Path("/proc/self/statm")
    loaded = int(pages.read_text().split()[0]) * resource.getpagesize() if pages.exists() else 0
    limit = loaded + 4 * path.stat().st_size + _EXTRA_BYTES
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = limit if soft == resource.RLIM_INFINITY else min(limit, soft)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    except (ValueError, OSError):  # macOS takes no such limit
        return


def _answer(path: Path, which: str | None, weights: Path) -> dict[str, object]:
    _bound_memory(path)
    try:
        state, part, others = pick(load_pickle(path, import_foreign=True), path, which)
        save_file({name: tensor.clone().contiguous() for name, tensor in state.items()}, weights)
    except CheckpointError as error:
        return {"error": str(error)}
    except (MemoryError, RuntimeError, OSError) as error:
        return {"error": f"{path} could not be opened within bounded memory ({type(error).__name__}). It is damaged."}
    return {"part": part, "others": others}


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    print(json.dumps(_answer(Path(task["path"]), task["which"], Path(task["weights"]))))
