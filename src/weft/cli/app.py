"""The command line: find the verb, run it, and turn its errors into exit codes."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import functools
import importlib
import inspect
import io
import itertools
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, get_args

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    Group,
    MissingArgumentError,
    Parameter,
    Token,
    UnusedCliTokensError,
    ValidationError,
)
from cyclopts.argument import ArgumentCollection
from cyclopts.exceptions import UnknownCommandError, UnknownOptionError

from weft.cli.options import PANELS, Machine, Plugins, Shown, typed
from weft.errors import StorageError, UsageError, WeftError, install_command, is_installed, unknown
from weft.machine.memory import keep_memory, known_error
from weft.machine.processor import limit_threads, set_num_threads
from weft.machine.system import IS_WINDOWS, hide_wandb
from weft.text import one_line
from weft.version import __version__

GROUPS = {  # heading of the help -> verbs
    "Train": ("train", "compare", "data", "recipes"),
    "Use a model": ("predict", "evaluate", "explain", "embed", "similar", "label", "info"),
    "Deploy": ("export", "serve", "bench", "convert", "push", "doctor"),
    "Research": ("study", "models"),
}
VERBS = tuple(verb for verbs in GROUPS.values() for verb in verbs)
WITH_COMMANDS = ("data", "recipes")  # verbs with commands of their own, in an `App` of their module

EXIT_CODES = """exit codes:
  0 success                 4 checkpoint refused      7 verification failed
  2 bad argument or recipe  5 training diverged       129 terminal closed
  3 data refused            6 disk full or read-only  130 interrupted (Ctrl-C)
                                                      143 terminated"""
EXAMPLE = """example:
  weft train digits --out runs/digits
  weft predict runs/digits photo.png"""

TYPES = {int: "a whole number", float: "a number"}
_INTERRUPTED = 128 + signal.SIGINT
RETRY_S = 0.05  # after which a signal that came during an import is sent again


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; errors that the input causes are one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # for names that the terminal cannot show
            is_file = IS_WINDOWS and not stream.isatty()  # the default for files and pipes there holds few letters
            stream.reconfigure(encoding="utf-8" if is_file else stream.encoding, errors="backslashreplace")
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)  # prints the Python stack if a library crashes
    try:
        with _signals_as_exit():
            keep_memory()
            return _run(list(sys.argv[1:] if argv is None else argv))
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
        if (known := known_error(error)) is None:
            raise
        return _complain(str(known), known.exit_code)
    except KeyboardInterrupt as stop:
        return _complain(str(stop) or "interrupted.", _INTERRUPTED)
    except SystemExit as stop:  # --help, --version, SIGTERM
        if isinstance(stop.code, str):
            return _complain(stop.code, 1)
        return stop.code or 0


def command_line() -> App:
    """Return the command line with all verbs, whose modules are not imported yet."""
    app = App(
        name="weft",
        help="Image classification with CeiT, CvT and LeViT: train, evaluate, compare, export and serve models.",
        help_epilogue=f"{EXIT_CODES}\n\n{EXAMPLE}",
        help_format="plaintext",
        usage="Usage: weft VERB ...",
        version=f"weft {__version__}",
        version_flags=("--version", "-V"),
        group_commands=Group("Options", sort_key=len(GROUPS)),
        **PANELS,
        default_parameter=Parameter(
            converter=typed, negative=(), show_default=False, show_choices=False, allow_repeating=True, json_list=False
        ),
        exit_on_error=False,
        print_error=False,
        result_action="return_value",
    )
    app.register_install_completion_command(help="Let the shell complete verbs, options and their values.")
    for number, (heading, verbs) in enumerate(GROUPS.items()):
        group = Group(heading, sort_key=number)
        for place, verb in enumerate(verbs):
            home = f"weft.cli.{verb}:{'app' if verb in WITH_COMMANDS else verb}"
            app.command(home, name=verb, group=group, sort_key=place)
    return app


def commands() -> list[str]:
    """Return the names of all verbs and of their commands, such as `train` and `data check`."""
    app, names = command_line(), list[str]()
    for verb in VERBS:
        names += [verb] if app[verb].default_command is not None else []
        names += [f"{verb} {name}" for name in app[verb] if not name.startswith("-")]
    return names


def find(name: str, app: App | None = None) -> App:
    """Return the verb or command of a name, with its usage."""
    app = app or command_line()
    for word in name.split():
        app = app[word]
    if app.default_command is not None:
        places = map(_place, inspect.signature(app.default_command, eval_str=True).parameters.values())
        app.usage = " ".join(["Usage: weft", name, *filter(None, places), "[options]"])
    return app


def example_of(command: App) -> str:
    """Return the worked example of a verb or command, from its docstring."""
    if command.default_command is None:
        return command.help_epilogue or ""
    example = inspect.cleandoc(command.default_command.__doc__ or "").partition("\nExample:\n")[2]
    return "example:\n" + "\n".join(line.removeprefix("  ") for line in example.rstrip().splitlines())


def _place(parameter: inspect.Parameter) -> str:
    """Return how a positional argument is written in a usage; '' for an option."""
    is_several = parameter.kind is parameter.VAR_POSITIONAL
    if not is_several and parameter.kind is not parameter.POSITIONAL_ONLY:
        return ""
    is_needed = any(each.required for each in getattr(parameter.annotation, "__metadata__", ()))
    text = parameter.name.upper() + "..." * is_several
    return text if is_needed or (parameter.default is parameter.empty and not is_several) else f"[{text}]"


def arguments(name: str, app: App | None = None) -> ArgumentCollection:
    """Return the arguments and options of a verb or command, without the dataclasses of options themselves."""
    app = app or command_line()
    chain = app.parse_commands(name.split())[1]
    with app.app_stack(chain):
        found = chain[-1].assemble_argument_collection(parse_docstring=True)
    return ArgumentCollection([argument for argument in found if argument.name != "*"])


def option_names(name: str) -> list[str]:
    """Return the options of a verb or command, sorted, with their short forms."""
    return sorted(option for argument in arguments(name) for option in argument.names if option.startswith("-"))


def parse(words: Sequence[str]) -> tuple[Any, inspect.BoundArguments]:
    """Return the function of a command line, and its arguments; nothing is run.

    Raises:
        UsageError: an unknown verb or option, a value that is missing or has another type.
    """
    app = command_line()
    name = " ".join(word for word in app.parse_commands(words)[0] if not word.startswith("-"))
    try:
        _check_options(words, name, app)
        function, bound, _ = app.parse_args(words)
    except CycloptsError as error:
        raise _refusal(error, f"weft {name}".rstrip()) from None
    bound.apply_defaults()
    return functools.partial(_help, app, name) if function == app.help_print else function, bound


def _check_options(words: Sequence[str], name: str, app: App) -> None:
    """Refuse what cyclopts accepts: underscores in the name of an option, and a flag with a value."""
    for word in itertools.takewhile(lambda word: word != "--", words):
        option, equals, value = word.partition("=")
        if not option.startswith("-") or not (equals or "_" in option) or find(name, app).default_command is None:
            continue
        known, token = arguments(name, app), Token(keyword=option, value=value)
        argument = next((each for each in known if option in each.names), None)
        if argument is None and option.startswith("--"):
            raise UnknownOptionError(token=token, argument_collection=known)
        if argument is not None and equals and argument.resolved_hint is bool:
            raise CoercionError(token=token, argument=argument, target_type=bool)


def _help(app: App, name: str, *words: Any, **options: Any) -> None:
    """Print the help of a verb, or of `weft`; the example is printed as it is, so that its lines can be copied."""
    if not name:
        for verb in VERBS:
            _ = app[verb]  # imports its module, which has its help
    command = find(name, app)
    example, command.help_epilogue = example_of(command), ""
    app.help_print(*words, **options)
    print(f"\n{example}")


def _refusal(error: CycloptsError, name: str) -> WeftError:
    """Return the error of weft for one of cyclopts."""
    see = f"See: {name} --help"
    if isinstance(error.__cause__, WeftError):
        return error.__cause__
    verb = name.partition(" ")[2]
    is_command = isinstance(error, UnknownCommandError) or (
        isinstance(error, UnusedCliTokensError) and verb in WITH_COMMANDS
    )
    if is_command:
        word = (error.unused_tokens or [""])[0]
        if name != "weft":
            known = [each for each in find(verb) if not each.startswith("-")]
            return unknown(f"command of {name}", word, known, f"{name} --help")
        kind, known = ("option", ("--help", "--version")) if word.startswith("-") else ("verb", VERBS)
        return unknown(kind, word, known, "weft --help")
    if isinstance(error, UnknownOptionError):
        word = (error.token.keyword or error.token.value).partition("=")[0]
        known = [option for argument in error.argument_collection for option in argument.names if option[0] == "-"]
        return unknown(f"option of {name}", word, known, f"{name} --help")
    if isinstance(error, UnusedCliTokensError):
        word = (error.unused_tokens or [""])[0]
        hint = f"A setting needs --set: --set {word}." if "=" in word else see
        return UsageError(f"{name} has no place for '{word}'. {hint}")
    option = error.argument.name if error.argument is not None else ""
    option = option if option.startswith("-") else option.upper()
    if isinstance(error, MissingArgumentError) and error.keyword:
        return UsageError(f"{option} needs a value; got none. {see}")
    if isinstance(error, MissingArgumentError):
        return UsageError(f"{name} needs {option}; got none. {find(verb).usage}. {see}")
    if isinstance(error, ValidationError):
        must = error.exception_message[:1].lower() + error.exception_message[1:].rstrip(".")
        given = " ".join(token.value for token in error.argument.tokens) if error.argument is not None else ""
        return UsageError(f"{option} {must}; got {given}. {see}")
    if isinstance(error, CoercionError) and error.token is not None and error.argument is not None:
        choices = error.argument.get_choices(force=True) or ()
        kinds = [TYPES[kind] for kind in (error.target_type, *get_args(error.target_type)) if kind in TYPES]
        must = f"one of {', '.join(choices)}" if choices else " or ".join(kinds) or "given without a value"
        return UsageError(f"{option} must be {must}; got '{error.token.value}'. {see}")
    return UsageError(f"{error}. {see}")


def _run(words: list[str]) -> int:
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    function, bound = parse(words or ["--help"])
    hide_wandb()
    limit_threads()
    _check_temporary()
    records = bound.arguments.values()
    for record in records:
        for path in record.plugin or () if isinstance(record, Plugins) else ():
            importlib.import_module("weft.models.families").load_plugin(path)
        if isinstance(record, Machine) and record.threads is not None:
            set_num_threads(record.threads)
    is_quiet = any(isinstance(record, Shown) and record.quiet for record in records)
    with importlib.import_module("weft.progress").quietly() if is_quiet else contextlib.nullcontext():
        code = function(*bound.args, **bound.kwargs)
    is_help = isinstance(function, functools.partial)  # which is no success where a verb is missing
    return UsageError.exit_code if is_help and not {"-h", "--help"} & set(words) else code or 0


def _check_temporary() -> None:
    """Check that there is a directory for temporary files: libraries look for one when they are imported."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise StorageError(
            f"There must be a directory for temporary files; {error.strerror}. Set TMPDIR to one that is writable."
        ) from None


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
