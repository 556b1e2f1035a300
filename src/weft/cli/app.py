"""The command line: find the verb, run it, and turn its errors into exit codes."""

from __future__ import annotations

import argparse
import contextlib
import errno
import faulthandler
import importlib
import io
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any, NoReturn

from weft.cli.options import add_common
from weft.errors import StorageError, UsageError, WeftError, install_command, is_installed, unknown
from weft.memory import is_out_of_memory, keep_memory
from weft.processor import limit_threads
from weft.system import IS_WINDOWS, hide_wandb
from weft.text import one_line, reason_of
from weft.version import __version__

VERBS = (
    *("train", "evaluate", "predict", "compare", "study", "convert", "export", "bench", "explain", "serve"),
    *("embed", "similar", "label", "push", "data", "models", "recipes", "doctor"),
)
WITH_MODELS = frozenset(VERBS) - {"recipes", "doctor"}  # verbs that take `--plugin`

EXIT_CODES = """exit codes:
  0 success                 4 checkpoint refused      7 verification failed
  2 bad argument or recipe  5 training diverged       129 terminal closed (SIGHUP)
  3 data refused            6 disk full or read-only  130 interrupted (Ctrl-C), 143 terminated

example:
  weft train digits --out runs/digits
  weft predict runs/digits photo.png"""

_INTERRUPTED = 128 + signal.SIGINT
RETRY_S = 0.05  # after which a signal that came during an import is sent again


class Parser(argparse.ArgumentParser):
    """Argument parser that raises `UsageError` instead of exiting, and accepts no abbreviated options."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. See: {self.prog} --help")

    def option_names(self) -> list[str]:
        """Return the long options, sorted."""
        return sorted(name for name in self._option_string_actions if name.startswith("--"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; errors that the input causes are one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # for names that the terminal cannot show
            stream.reconfigure(encoding=_encoding_of(stream), errors="backslashreplace")
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)  # prints the Python stack if a library crashes
    try:
        with _signals_as_exit():
            keep_memory()
            return _run(list(sys.argv[1:] if argv is None else argv))
    except WeftError as error:
        return _complain(str(error), error.exit_code)
    except BrokenPipeError:  # the reader of the pipe has closed it, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        if is_installed("torch"):
            raise
        name = (error.name or "").partition(".")[0]  # an installation without torch (docs/deploy.md)
        text = f"This needs {name}, which is not installed. Run: {install_command()}"
        return _complain(text, UsageError.exit_code)
    except Exception as error:
        if IS_WINDOWS and isinstance(error, OSError) and error.errno == errno.EINVAL and error.filename is None:
            return 0  # a closed pipe there
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            return _complain(str(error), StorageError.exit_code)
        if not is_out_of_memory(error):
            raise
        text = f"There must be enough memory; there is not ({reason_of(error)}). Choose a smaller batch or image size."
        return _complain(text, WeftError.exit_code)
    except KeyboardInterrupt as stop:
        return _complain(str(stop) or "interrupted.", _INTERRUPTED)
    except SystemExit as stop:  # --help, --version, SIGTERM
        if isinstance(stop.code, str):
            return _complain(stop.code, 1)
        return stop.code or 0


def _encoding_of(stream: io.TextIOWrapper) -> str:
    """Return the encoding of an output: UTF-8 for files and pipes on Windows, whose default holds few letters."""
    return "utf-8" if IS_WINDOWS and not stream.isatty() else stream.encoding


def verb_module(verb: str) -> ModuleType:
    """Return the module of a verb."""
    return importlib.import_module(f"weft.cli.{verb}")


def verb_parser(verb: str) -> Parser:
    """Return the parser of a verb."""
    module = verb_module(verb)
    parser = Parser(prog=f"weft {verb}", description=module.HELP)
    module.add_arguments(parser)
    if verb in WITH_MODELS:
        add_common(parser, "--plugin")
    return parser


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if argv else UsageError.exit_code
    if argv[0] in ("-V", "--version"):
        print(f"weft {__version__}")
        return 0
    verb, *rest = argv
    if verb not in VERBS:
        kind, names = ("option", ("--help", "--version")) if verb.startswith("-") else ("verb", VERBS)
        raise unknown(kind, verb, names, "weft --help")
    parser = verb_parser(verb)
    args, extra = parser.parse_known_args(rest)
    for word in extra:
        if word.startswith("-"):
            raise unknown(f"option of weft {verb}", word.split("=")[0], parser.option_names(), f"weft {verb} --help")
        hint = f"A setting needs --set: --set {word}." if "=" in word else f"See: weft {verb} --help"
        raise UsageError(f"weft {verb} has no place for '{word}'. {hint}")
    hide_wandb()
    limit_threads()
    _check_temporary()
    for path in getattr(args, "plugin", ()):
        importlib.import_module("weft.models.families").load_plugin(path)
    is_quiet = getattr(args, "quiet", False)
    with importlib.import_module("weft.progress").quietly() if is_quiet else contextlib.nullcontext():
        return verb_module(verb).run(args)


def _check_temporary() -> None:
    """Check that there is a directory for temporary files: libraries look for one when they are imported.

    Raises:
        StorageError: there is no such directory.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise StorageError(
            f"There must be a directory for temporary files; {error.strerror}. Set TMPDIR to one that is writable."
        ) from None


def _overview() -> str:
    lines = [f"  {verb:<10}{verb_module(verb).HELP}" for verb in VERBS]
    return "\n".join(
        [
            "usage: weft VERB ...",
            "",
            "Image classification with CeiT, CvT and LeViT: train, evaluate, compare, export and serve models.",
            "",
            "verbs (details: weft VERB --help):",
            *lines,
            "",
            EXIT_CODES,
        ]
    )


def _complain(message: str, code: int) -> int:
    print(f"weft: {one_line(message)}", file=sys.stderr)
    return code


@contextlib.contextmanager
def _signals_as_exit() -> Iterator[None]:
    """Let SIGTERM, SIGHUP and Ctrl-Break unwind the stack as Ctrl-C does, so that temporary files are removed.

    While a library is imported, signals wait: an exception in the middle of its C++ code can abort the process.
    """
    waiting: list[threading.Timer] = []

    def leave(signum: int, frame: FrameType | None) -> None:
        if _is_importing(frame):
            waiting.append(threading.Timer(RETRY_S, _send, (signum,)))
            waiting[-1].daemon = True
            waiting[-1].start()
            return
        if signum == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + (signum if signum == getattr(signal, "SIGHUP", None) else signal.SIGTERM))

    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]  # as under nohup
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for timer in waiting:
            timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a frame is part of an import that the command line began."""
    while frame is not None and frame.f_code is not main.__code__:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _send(signum: int) -> None:
    """Send a signal to this process again."""
    if IS_WINDOWS:  # where `os.kill` ends a process
        signal.raise_signal(signum)
    else:
        os.kill(os.getpid(), signum)
