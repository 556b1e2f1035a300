"""Directory of a study or comparison: locked while it is in use, and continued in place by the same command.

experiment.json  settings of the command, and the decisions that depend on the machine
runs/            a folder for each job, with result.json, the only record of a finished run
runs.csv         all runs as a table
results.json     the result as JSON
report.html      the result as a page
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.data.folder import check_outside
from weft.data.open import check_exists
from weft.errors import UsageError
from weft.files import write_file
from weft.reading import read_json
from weft.runs.directory import locked, make_dir, refuse_taken

FILE = "experiment.json"
CONTENTS = (FILE, "runs", "runs.csv", "exports", "forms.json", "results.json", "report.html")


@dataclass
class Directory:
    """Directory of a study or comparison, and content of experiment.json.

    Attributes:
        path: the directory.
        settings: of the command; another command with the same ones continues.
        decisions: JSON values by name, decided once for all runs.
    """

    path: Path
    settings: dict[str, Any]
    decisions: dict[str, Any] = field(default_factory=dict)

    def decide(self, name: str, choose: Callable[[], Any]) -> Any:
        """Return a decision of an earlier call, or choose and keep one."""
        if name not in self.decisions:
            self.decisions[name] = choose()
            self.save()
        return self.decisions[name]

    def save(self) -> None:
        """Write experiment.json."""
        content = {"settings": self.settings, "decisions": self.decisions}
        write_file(self.path / FILE, json.dumps(content, indent=2).encode())


def can_continue(path: Path) -> bool:
    """Return whether a directory has a study or comparison, which the same command continues."""
    return (path / FILE).exists()


def check_request(places: Iterable[str], out: str | Path | None, *, force: bool) -> None:
    """Check the arguments that `compare` and `run_study` share, before torch is imported.

    Args:
        places: of the datasets.
        out, force: as in `run_study`.

    Raises:
        UsageError: a directory that is taken, or in a dataset.
        DataError: there is no such dataset.
    """
    for place in places:
        check_exists(place)
        if out is not None:
            check_outside(out, place)
    if out is not None and not force and not can_continue(Path(out)):
        refuse_taken(Path(out), (), force=False)


def refuse_other(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise UsageError if the results in a directory are of other settings; name those that differ."""
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if keys:
        old, new = (", ".join(f"{key}={values.get(key)}" for key in keys) for values in (before, now))
        raise UsageError(
            f"{path} has results of {old}; got {new}. Pass the same to continue them, or choose another --out."
            " --force replaces the results."
        )


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a command and those of its runs in one dictionary."""
    own = {key: value for key, value in settings.items() if key != "settings"}
    return {**own, **(settings.get("settings") or {})}


@contextlib.contextmanager
def opened(path: Path, settings: dict[str, Any], *, force: bool) -> Iterator[Directory]:
    """Lock the directory of a new experiment, or of one that has the same settings.

    Args:
        path: the directory.
        settings: of the command, JSON values; None for those without a value. `settings` in it are those of the runs.
        force: replace an experiment with other settings.

    Raises:
        UsageError: the directory is in use, or holds another experiment or other files.
    """
    settings = json.loads(json.dumps(settings))
    if not can_continue(path):
        refuse_taken(path, CONTENTS, force=force)
    with locked(path):
        before = read_json(path / FILE, dict[str, dict[str, Any]], UsageError) if can_continue(path) else {}
        directory = Directory(path, settings, before.get("decisions", {}))
        if before.get("settings") != settings:
            if before and not force:
                refuse_other(path, _flat(before.get("settings", {})), _flat(settings))
            make_dir(path, CONTENTS, force=force)
            directory = Directory(path, settings)
            directory.save()
        try:
            yield directory
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"Stopped. Repeat the command to resume; finished runs are kept in {path}."
            ) from None
