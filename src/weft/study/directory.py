"""Directory of a study or comparison: locked while it is in use, and continued in place by the same command.

experiment.json  settings of the command, and the decisions that depend on the machine
series/          series of similar images of each dataset, where there are any
runs/            a folder for each job, with result.json, the only record of a finished run
runs.csv         all runs as a table
results.json     the result as JSON
report.html      the result as a page
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.data.folder import check_outside
from weft.data.open import check_exists
from weft.errors import UsageError
from weft.files import write_file
from weft.machine.system import file_name
from weft.reading import read_json
from weft.runs.directory import locked, make_dir, refuse_taken

FILE, SERIES = "experiment.json", "series"
CONTENTS = (FILE, "runs", "runs.csv", SERIES, "exports", "forms.json", "results.json", "report.html")


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

    def group_of(self, data: str, base: str | Path | None, settings: Mapping[str, Any]) -> str:
        """Return the setting `data.group` of all runs on a dataset, so that they hold out the same images; empty if the
        data or the user decide."""
        from weft.train.series import group_of_runs

        name = f"{file_name(Path(data).name)}-{zlib.crc32(os.fsencode(data)):08x}.csv"
        file = (self.path / SERIES / name).resolve()
        return self.decide(f"groups of {data}", lambda: group_of_runs(data, base, settings, file))

    def save(self) -> None:
        """Write experiment.json."""
        content = {"settings": self.settings, "decisions": self.decisions}
        write_file(self.path / FILE, json.dumps(content, indent=2).encode())


def check_request(places: Iterable[str], folder: Path, *, force: bool) -> None:
    """Check the arguments that `compare` and `run_study` share, before torch is imported.

    Args:
        places: of the datasets.
        folder: directory of the experiment.
        force: as in `run_study`.

    Raises:
        UsageError: a directory that is taken, or in a dataset.
        DataError: there is no such dataset.
    """
    for place in places:
        check_exists(place)
        check_outside(folder, place)
    if not force and not (folder / FILE).exists():
        refuse_taken(folder, (), force=False)


def refuse_other(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise UsageError if the results in a directory are of other settings; name those that differ.

    Args:
        path: the directory.
        before, now: settings of a command; those of its runs, which are in `settings`, are compared one by one.
    """
    before, now = ({**values, **(values.get("settings") or {}), "settings": None} for values in (before, now))
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if keys:
        old, new = (", ".join(f"{key}={values.get(key)}" for key in keys) for values in (before, now))
        raise UsageError(
            f"{path} has results of {old}; got {new}. Pass the same to continue them, or choose another --out."
            " --force replaces the results."
        )


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
    settings, file = json.loads(json.dumps(settings)), path / FILE
    if not file.exists():
        refuse_taken(path, CONTENTS, force=force)
    with locked(path):
        before = read_json(file, dict[str, dict[str, Any]], UsageError) if file.exists() else {}
        directory = Directory(path, settings, before.get("decisions", {}))
        if before.get("settings") != settings:
            if before and not force:
                refuse_other(path, before.get("settings", {}), settings)
            make_dir(path, CONTENTS, force=force)
            directory = Directory(path, settings)
            directory.save()
        try:
            yield directory
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"Stopped. Repeat the command to resume; finished runs are kept in {path}."
            ) from None
