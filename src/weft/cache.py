"""Tables in the cache on disk, which all processes share."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Sequence

from weft.files import cache_file

LOCKED_SECONDS = 30.0  # to wait for another process that writes


class CacheTable:
    """Table `rows` of an SQLite file in the cache directory.

    A damaged file is replaced; one that cannot be read or written costs only time. The journal is SQLite's default: the
    write-ahead log does not work on network disks, where home directories may be.

    Args:
        name: of the file.
        columns: of the table, in SQL.
        most: bytes of the file; above, the rows that were added first are dropped.
    """

    def __init__(self, name: str, columns: str, most: int) -> None:
        self.columns, self.most = columns, most
        self._path = cache_file(name)  # None where the cache cannot be used

    def use(self, work: Callable[[sqlite3.Connection], object], *, adds: bool = False) -> None:
        """Call `work` in a transaction; where the cache cannot be used, nothing happens, from then on.

        Args:
            work: reads or writes rows.
            adds: drop rows if there are too many afterwards.
        """
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.closing(sqlite3.connect(self._path, timeout=LOCKED_SECONDS)) as table, table:
                table.text_factory = lambda data: data.decode(errors="replace")  # also that of damaged rows
                table.execute(f"CREATE TABLE IF NOT EXISTS rows ({self.columns})")
                work(table)
                oldest = "SELECT rowid FROM rows ORDER BY rowid LIMIT 100"
                while adds and _size(table) > self.most:
                    if not table.execute(f"DELETE FROM rows WHERE rowid IN ({oldest})").rowcount:
                        break
        except (OSError, sqlite3.OperationalError, sqlite3.DataError):
            self._path = None  # a full or read-only disk, a lock that is not released, or a row that is too large
        except (
            sqlite3.DatabaseError,
            ValueError,
        ):  # damaged; the journal goes first, since SQLite would apply it to the next file
            with contextlib.suppress(OSError):
                self._path.with_name(f"{self._path.name}-journal").unlink(missing_ok=True)
                self._path.unlink(missing_ok=True)

    def put(self, rows: Sequence[tuple[object, ...]]) -> None:
        """Add rows, in place of those with the same key."""
        if rows:
            values = ", ".join("?" * len(rows[0]))
            self.use(lambda table: table.executemany(f"INSERT OR REPLACE INTO rows VALUES ({values})", rows), adds=True)


def _size(table: sqlite3.Connection) -> int:
    """Return the bytes in use of the file of a table."""
    pages, free, size = (
        table.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size
