"""Process of a job: train, evaluate the best model, write the result.

    python -m weft.study.job_process FOLDER RESULT PARENT

FOLDER is that of the job, RESULT the name of the file to write, PARENT the number of the process that started this one.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from weft.errors import CheckpointError, StoppedError, WeftError
from weft.files import write_file
from weft.machine.memory import keep_memory
from weft.machine.system import hide_wandb, is_alive, peak_mib
from weft.runs.directory import read_metrics
from weft.study.jobs import REFERENCE, Result, is_reference


def run_job(folder: Path) -> Result:
    """Run the job of a folder in this process, or resume it."""
    from weft.bench.cost import cost
    from weft.checkpoints import load_model_dir
    from weft.train import evaluate, train

    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    run = folder / "run"
    common = {"stop_after": job["until"], "quiet": True}
    with contextlib.suppress(StoppedError):
        if _has_state(run):
            train(resume=run, **common)
        else:
            settings = {key: _with_model(value, folder.parent) for key, value in job["settings"].items()}
            train(job["data"], recipe=job["recipe"], settings=settings, out=run, force=run.exists(), **common)
    model, _ = load_model_dir(run / "best")
    channels, *size = model.pretrained_cfg["input_size"]
    counted = cost(model, (size[0], size[1]), channels)

    def letters(size: int | None) -> str:
        limit = job["settings"].get("data.limit")
        evaluation = evaluate(run, job["data"], img_size=size, limit=limit, quiet=True)
        return "".join("1" if is_correct else "0" for is_correct in evaluation.is_correct)

    history = read_metrics(run / "metrics.csv")
    return Result(
        job=job,
        correct=tuple((size, letters(size)) for size in job["test_sizes"]),
        curve=tuple((row.epoch, row.val_top1) for row in history if row.val_top1 == row.val_top1),
        params=counted.params,
        macs=counted.macs,
        megabytes=(run / "best" / "model.safetensors").stat().st_size / 1e6,
        seconds=sum(row.seconds for row in history),
        peak_mib=peak_mib(),
    )


def _has_state(run: Path) -> bool:
    """Return whether a run has a valid saved state, from which it can be resumed."""
    from weft.train.state import load_state

    try:
        load_state(run / "state")
    except CheckpointError:
        return False
    return True


def _with_model(value: Any, runs: Path) -> Any:
    """Return the value of a setting; in place of the name of a job, the path of its best model."""
    if not is_reference(value):
        return value
    return str((runs / value.removeprefix(REFERENCE) / "run" / "best").resolve())


def _end_with_parent(parent: int) -> None:
    """Exit when the process that started this one has ended; the saved state remains."""
    before = os.getppid()  # on Windows it stays the same, and is that of a launcher in a virtual environment
    while os.getppid() == before and is_alive(parent):
        time.sleep(1)
    os._exit(143)


if __name__ == "__main__":
    hide_wandb()
    keep_memory()
    threading.Thread(target=_end_with_parent, args=(int(sys.argv[3]),), daemon=True).start()
    try:
        result = run_job(Path(sys.argv[1]))
        write_file(Path(sys.argv[1]) / sys.argv[2], TypeAdapter(Result).dump_json(result))
    except WeftError as error:
        sys.exit(f"weft: {error}")
