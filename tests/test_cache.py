"""Tables in the cache; a damaged one, and one that cannot be used: tests/inference/test_features.py."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from weft.cache import CacheTable
from weft.files import cache_dir


def rows_after(*new: str) -> list[str]:
    """Return the rows of a table after some were added."""
    table, rows = CacheTable("some.sqlite3", "name TEXT PRIMARY KEY", 1 << 20), list[str]()
    table.put([(name,) for name in new])
    table.use(lambda opened: rows.extend(name for (name,) in opened.execute("SELECT name FROM rows")))
    return rows


def test_a_table_that_another_process_writes_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    monkeypatch.setattr("weft.cache.LOCKED_SECONDS", 0)
    assert rows_after("one") == ["one"]
    with contextlib.closing(sqlite3.connect(cache_dir() / "some.sqlite3")) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert rows_after("two") == []
    assert rows_after() == ["one"]
