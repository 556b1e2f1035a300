"""The command line: one file per verb. A verb parses, calls the library, prints; torch is imported inside `run` only.

Each verb's module has `HELP` (one line), `add_arguments(parser)` and `run(args) -> int` (the exit code).
"""

from __future__ import annotations

from weft.cli.app import main

__all__ = ["main"]
