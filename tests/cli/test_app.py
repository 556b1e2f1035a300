"""The frame around the verbs: help, parsing, exit codes, signals. What is refused: tests/contract/test_refusals.py."""

from __future__ import annotations

import errno
import functools
import importlib
import inspect
import re
import signal
import subprocess
import sys
import time
from typing import get_args, get_origin

import pytest

import weft
from weft import errors
from weft.cli import app
from weft.cli.app import VERBS, _signals_as_exit, arguments, command_line, commands, find, main, option_names, parse
from weft.cli.options import given
from weft.errors import UsageError
from weft.serve.settings import Settings


def test_every_command_has_one_form():
    """Title, options, and the help of outputs. Its example: tests/contract/test_startup.py."""
    for command in commands():
        title = (find(command).default_command.__doc__ or "").splitlines()[0]
        assert title[0].isupper(), command
        assert title.endswith("."), command
        assert option_names(command), command
        for argument in arguments(command):
            if argument.name in ("--out", "OUT"):
                assert re.match(r"output (directory|file): ", argument.parameter.help or ""), command


def test_the_overview_the_version_and_help_as_a_verb(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert [verb for verb in VERBS if f"\n│ {verb} " not in shown] == []
    assert main([]) == 2
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.endswith(f"weft {weft.__version__}\n")
    for words, same in ((["help"], ["--help"]), (["help", "data", "check"], ["data", "check", "--help"])):
        assert main(words) == main(same) == 0
        shown = capsys.readouterr().out
        assert shown[: len(shown) // 2] == shown[len(shown) // 2 :]


@functools.cache
def shortest(command: str) -> list[str]:
    """Return the words of a command with its required arguments."""
    needed = [argument for argument in arguments(command) if argument.required]
    named = [[argument.name, "x"] if argument.name.startswith("-") else ["x"] for argument in needed]
    return [*command.split(), *(word for words in named for word in words)]


@pytest.mark.parametrize("command", commands())
def test_options_may_stand_between_arguments(command):
    """A list in the signature would end at the option; the values of an argument in the plural do not."""
    found = arguments(command)
    places = [argument for argument in found if not argument.name.startswith("-")]
    assert list not in [get_origin(place.resolved_hint) for place in places]
    several = [place for place in places if place.field_info.kind is inspect.Parameter.VAR_POSITIONAL]
    words = [str(number) for number in range(len(places) + 2 * len(several))]
    needed = [word for each in found if each.required and each not in places for word in (each.name, "x")]
    options = [*needed, next(each for each in option_names(command) if each in ("--quiet", "--source", "--no-token"))]
    expected = parse([*command.split(), *words, *options])[1].arguments
    assert [len(expected[place.field_info.name]) for place in several] == [3] * len(several)
    for place in range(1, len(words), 2):
        assert parse([*command.split(), *words[:place], *options, *words[place:]])[1].arguments == expected


WHOLE = ("2.7", "2.0", "0x2", "1_0", "\u0663", " 3", "", "[1,2]")


@pytest.mark.parametrize(
    ("words", "values", "must"),
    [
        ("predict run x.png --top-k", WHOLE, "a whole number"),
        ("label run x.png --min-probability", ("nan", "inf", "1e999", "1_0", "0x2"), "a number"),
        *(
            (f"compare photos {option}", ("1_0", "1_0s", "\u0663s", "1_0MB"), "a (duration|size) such as .*")
            for option in ("--budget", "--max-latency", "--max-size")
        ),
        ("predict run x.png -q=", ("false", "1", "none", ""), "given without a value"),
    ],
)
def test_numbers_are_decimal_and_finite_and_flags_have_no_value(words, values, must):
    *start, option = words.split()
    for value in values:
        last = [option + value] if option.endswith("=") else [option, value]
        with pytest.raises(UsageError, match=rf"^--[\w-]+ must be {must}; got '{re.escape(value)}'"):
            parse([*start, *last])


WRONG = {
    int: (["1_0"], r"must be .*; got '1_0'\."),
    float: (["1_0"], r"must be .*; got '1_0'\."),
    bool: (["=true"], "must be given without a value; got 'true'"),
    list: ([], r"needs a value; got none\."),
}


@pytest.mark.parametrize("command", commands())
def test_every_option_holds_to_its_type(command):
    for argument in arguments(command):
        hint = argument.resolved_hint
        for kind in {hint, get_origin(hint), *get_args(hint)} & WRONG.keys():
            value, message = WRONG[kind]
            words = [argument.name + value[0]] if kind is bool else [argument.name, *value]
            if argument.name.startswith("-") and argument.name != "--papers":  # which alone lists all
                with pytest.raises(UsageError, match=f"^{argument.name} {message}"):
                    parse([*shortest(command), *words])


@pytest.mark.parametrize("command", commands())
def test_options_have_one_spelling_and_threads_one_range(command):
    names = [option for option in option_names(command) if "-" in option.lstrip("-")]
    for option in names[:1] + names[-1:]:
        other = f"--{option[2:].replace('-', '_')}"
        with pytest.raises(UsageError, match=rf"Unknown option of weft {command} '{other}'\. Nearest: {option}"):
            parse([*shortest(command), other, "1"])
    if "--threads" in option_names(command):
        for number in (0, 1025, -1):
            rule = f"--threads must be a whole number at least 1 and at most 1024; got {number}"
            with pytest.raises(UsageError, match=rf"^{rule}\."):
                parse([*shortest(command), "--threads", str(number)])
        for number in (1, 1024):
            parse([*shortest(command), "--threads", str(number)])


def test_options_are_short_lists_durations_and_sizes():
    _, train = parse("train digits -m levit_128 -b 8 -o run -q --lr 1e-3 --epochs 2".split())
    expected = dict(model="levit_128", batch_size="8", lr="1e-3", epochs="2")
    assert vars(train.arguments["of_recipe"]) | expected == vars(train.arguments["of_recipe"])
    assert (train.arguments["out"], train.arguments["output"].quiet) == ("run", True)
    words = "compare photos --models a b --budget 1h30m --max-latency 10ms --max-size 20MB"
    compared = parse(words.split())[1].arguments
    assert (compared["data"], compared["models"]) == ("photos", ["a", "b"])
    assert (compared["budget"], compared["max_latency"], compared["max_size"]) == (5400, 0.01, 20e6)
    _, served = parse("serve run --drain 0 --max-wait 20ms --read-timeout 2m".split())
    assert given(served.arguments["settings"]) == {"drain": 0, "max_wait": 0.02, "read_timeout": 120}


@pytest.mark.parametrize(("text", "size"), [("48", 48), ("48x64", (48, 64))])
def test_the_service_gets_an_image_size(text, size, monkeypatch):
    served: list[Settings] = []
    monkeypatch.setattr("weft.serve.server.serve", served.append)
    monkeypatch.setenv("GOMP_SPINCOUNT", "20000")  # else the verb sets it, for all tests that follow
    assert app.main(["serve", "levit_256", "--img-size", text]) == 0
    assert [settings.img_size for settings in served] == [size]


def test_a_shell_completes_verbs_options_and_values():
    script = command_line().generate_completion(shell="bash")
    assert [word for word in ("train", "--unknown-images", "openvino", "review") if word not in script] == []


def test_every_verb_limits_its_threads(monkeypatch):
    calls: list[int] = []
    monkeypatch.setattr("weft.cli.app.limit_threads", lambda: calls.append(1))
    assert main(["recipes"]) == 0
    assert calls == [1]


MEMORY = "weft: There must be enough memory; there is not ({}). Choose a smaller batch or image size."


def raises(error: BaseException):
    """A verb that fails."""

    def verb(words):
        raise error

    return verb


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (errors.UsageError("u"), 2, "weft: u"),
        (errors.DataError("d"), 3, "weft: d"),
        (errors.CheckpointError("c"), 4, "weft: c"),
        (errors.DivergedError("n"), 5, "weft: n"),
        (errors.StorageError("s"), 6, "weft: s"),
        (errors.VerificationError("v"), 7, "weft: v"),
        (OSError(errno.ENOSPC, "No space left on device", "x"), 6, "weft: [Errno 28] No space left on device: 'x'"),
        (MemoryError("std::bad_alloc"), 1, MEMORY.format("std::bad_alloc")),
        (RuntimeError("CUDA out of memory. Tried ...\nMore"), 1, MEMORY.format("CUDA out of memory. Tried")),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 1, MEMORY.format("[Errno 12] Cannot allocate memory")),
        (KeyboardInterrupt(), 130, "weft: interrupted."),
        (SystemExit(143), 143, ""),
        (SystemExit("a plugin ends"), 1, "weft: a plugin ends"),
        (SystemExit(None), 0, ""),
    ],
)
def test_exit_codes(error, code, line, monkeypatch, capsys):
    monkeypatch.setattr(app, "_run", raises(error))
    assert main(["models"]) == code
    assert capsys.readouterr().err.strip() == line


def test_other_errors_keep_their_traceback(monkeypatch):
    monkeypatch.setattr(app, "_run", raises(FileNotFoundError(errno.ENOENT, "gone", "x")))
    with pytest.raises(FileNotFoundError, match="gone"):
        main(["models"])


def test_a_closed_pipe_is_no_error(monkeypatch):
    command = f"{sys.executable} -m weft models --json | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert (done.stdout.splitlines()[0], done.stdout.splitlines()[-1], done.stderr) == ("[", "0", "")

    monkeypatch.setattr(app, "_run", raises(OSError(errno.EINVAL, "Invalid argument")))  # as Windows says it
    with pytest.raises(OSError, match="Invalid argument"):
        main(["models"])
    monkeypatch.setattr(app, "IS_WINDOWS", True)
    assert main(["models"]) == 0


def test_sigterm_unwinds_and_the_handler_is_given_back(monkeypatch):
    swept: list[str] = []

    def verb(words):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            swept.append("swept")

    monkeypatch.setattr(app, "_run", verb)
    before = signal.getsignal(signal.SIGTERM)
    assert main(["models"]) == 143
    assert swept == ["swept"]
    assert signal.getsignal(signal.SIGTERM) is before


def noticed(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let a signal end the command line, also where the tests run under nohup or in the background."""
    get = signal.getsignal
    monkeypatch.setattr(signal, "getsignal", lambda asked: signal.SIG_DFL if asked == number else get(asked))


@pytest.mark.parametrize(("name", "code"), [("SIGINT", None), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_waits_until_an_import_is_done(name, code, tmp_path, monkeypatch):
    """An exception within it could abort the process; the signal comes again once the import is done."""
    if not hasattr(signal, name):
        pytest.skip(f"this system has no {name}")
    noticed(monkeypatch, getattr(signal, name))
    (tmp_path / "slow_library.py").write_text(f"import signal\nsignal.raise_signal(signal.{name})\nis_done = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(app, "RETRY_S", 0.001)

    @_signals_as_exit()
    def import_and_work() -> None:
        importlib.import_module("slow_library")
        for _ in range(10_000):
            time.sleep(0.01)

    with pytest.raises((KeyboardInterrupt, SystemExit)) as caught:
        import_and_work()
    assert sys.modules.pop("slow_library").is_done
    assert getattr(caught.value, "code", None) == code


def test_a_signal_outside_of_imports_acts_immediately(monkeypatch):
    noticed(monkeypatch, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), _signals_as_exit():
        signal.raise_signal(signal.SIGINT)
