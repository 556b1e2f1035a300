"""Kill points: call a function before every system call of weft's writers that changes the disk."""

from __future__ import annotations

import builtins
import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from weft import files

CALLS = ("open", "write", "fsync", "replace", "unlink")


class Killed(BaseException):
    """Stands for `kill -9`: nothing in weft catches it."""


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Run `work` up to its kill point `number`, from 0; return False where it has ended before."""
    passed: list[str] = []

    def fatal(name: str) -> None:
        passed.append(name)
        if len(passed) > number:  # also later calls: a dead process cleans nothing up
            raise Killed

    with contextlib.suppress(Killed), killpoints(fatal):
        work()
    return len(passed) > number


@contextlib.contextmanager
def killpoints(at: Callable[[str], None]) -> Iterator[None]:
    """Call `at` with one of CALLS before each open, write, fsync, replace and unlink of `weft.files` and `os`."""

    def before(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            at(name)
            return call(*args, **kwargs)

        return called

    class Writer:
        """A file whose writes are kill points."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            at("open")
            self.file = builtins.open(*args, **kwargs)

        def write(self, data: bytes) -> int:
            at("write")
            return self.file.write(data)

        def __enter__(self) -> Writer:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(files, "open", Writer, create=True))
        for name in CALLS[2:]:
            patches.enter_context(mock.patch.object(os, name, before(name, getattr(os, name))))
        yield
