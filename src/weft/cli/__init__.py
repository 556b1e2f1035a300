"""The command line: one file per verb. A verb calls the library and prints; torch is imported inside its function only.

The signature of the function is the options of the verb, its docstring the help; it returns the exit code.
"""

from __future__ import annotations

from weft.cli.app import main

__all__ = ["main"]
