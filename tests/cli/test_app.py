"""The frame around the verbs: help without torch, nearest names, exit codes, Ultralytics' `key=value`."""

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
from pathlib import Path
from typing import get_args, get_origin

import pytest
from cyclopts.argument import Argument

from weft import errors
from weft.cli import app
from weft.cli.app import (
    VERBS,
    _signals_as_exit,
    arguments,
    command_line,
    commands,
    example_of,
    find,
    main,
    option_names,
    parse,
)
from weft.cli.options import given
from weft.serve.settings import Settings


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "weft", *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "arguments", [["--help"], *([*command.split(), "--help"] for command in commands())], ids=" ".join
)
def test_help_ends_in_an_example(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 0
    assert done.stderr == ""
    _, found, example = done.stdout.partition("\nexample:\n")
    assert found, "no worked example"
    assert "\n\n  -" not in example, "something stands behind the example"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["models"], *([*command.split(), "--help"] for command in commands())], ids=" ".join
)
def test_torch_is_not_loaded_for_words(arguments: list[str]) -> None:
    """And nothing else that takes long to import: what is loaded is little, and most of it Python's own."""
    code = f"import sys; from weft.cli import main; main({arguments!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    modules = set(done.stdout.splitlines()[-1].split())
    assert not {"torch", "timm", "numpy", "PIL", "scipy", "matplotlib", "huggingface_hub"} & modules
    if arguments != ["models"]:  # reads tables with it
        assert "pydantic" not in modules
        assert len(modules) < 400


def test_every_verb_has_the_same_shape() -> None:
    for command in commands():
        function = find(command).default_command
        title = (function.__doc__ or "").splitlines()[0]
        assert title[0].isupper(), command
        assert title.endswith("."), command
        assert option_names(command), command


def test_the_overview_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for verb in VERBS:
        assert f"\n│ {verb} " in shown
    assert main([]) == 2


def test_help_is_also_a_verb(capsys: pytest.CaptureFixture[str]) -> None:
    for words, same in ((["help"], ["--help"]), (["help", "data", "check"], ["data", "check", "--help"])):
        assert main(words) == main(same) == 0
        shown = capsys.readouterr().out
        assert shown[: len(shown) // 2] == shown[len(shown) // 2 :]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import weft

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"weft {weft.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian", "x"], "Unknown verb 'trian'. Nearest: train, "),
        (["--verison"], "Unknown option '--verison'. Nearest: --version, "),
        (["train", "digits", "--epoch", "3"], "Unknown option of weft train '--epoch'. Nearest: --epochs, "),
        (["train", "digits", "--epoch=3"], "Unknown option of weft train '--epoch'. Nearest: --epochs, "),
        (["train", "digits", "extra"], "weft train has no place for 'extra'. See: weft train --help"),
        (
            ["train", "digits", "--device", "gpu"],
            "--device must be one of auto, cpu, cuda, mps; got 'gpu'. See: weft train --help",
        ),
        (
            ["evaluate"],
            "weft evaluate needs RUN; got none. Usage: weft evaluate RUN DATA [options]. See: weft evaluate --help",
        ),
        (["train", "digits", "--epochs"], "--epochs needs a value; got none. See: weft train --help"),
        (["predict", "run", "x.png", "--quiet=maybe"], "--quiet must be given without a value; got 'maybe'. See: "),
        (["predict", "run", "x.png", "--top_k", "1"], "Unknown option of weft predict '--top_k'. Nearest: --top-k, "),
        (["help", "trian"], "Unknown verb 'trian'. Nearest: train, "),
        (["models", "--papers", "levit", "x"], "Unknown paper or model 'x'. Nearest: "),
        (["models", "--papers", "levit", "--papers", "x"], "Unknown paper or model 'x'. Nearest: "),
        (["models", "resnett*"], "Unknown model 'resnett*'. Nearest: "),
        (
            ["predict", "run", "x.png", "--top-k", "few"],
            "--top-k must be a whole number; got 'few'. See: ",
        ),
    ],
)
def test_a_slip_gets_the_nearest_name_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"weft: {message}")
    assert len(shown.err.splitlines()) == 1
    assert shown.out == ""


@pytest.mark.parametrize("text", ["0", "x"])
def test_a_batch_size_may_be_chosen_by_train_alone(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    rule = "weft: batch_size must be a whole number at least 1 and at most 65536"
    assert main(["train", "digits", "--batch-size", text]) == 2
    assert capsys.readouterr().err == f"{rule} or auto; got '{text}'.\n"
    assert main(["embed", "levit_256", ".", "--batch-size", text, "--out", "x.npy"]) == 2
    assert capsys.readouterr().err == f"{rule}; got '{text}'.\n"


def options_of(kind: type) -> list[tuple[str, Argument]]:
    """Return the command and the argument of each option that has this type, or a list of it."""
    return [
        (command, argument)
        for command in commands()
        for argument in arguments(command)
        for hint in (argument.resolved_hint,)
        if argument.name.startswith("-") and kind in (hint, get_origin(hint), *get_args(hint))
    ]


@functools.cache
def shortest(command: str) -> list[str]:
    """Return the words of a command with its required arguments."""
    needed = [argument for argument in arguments(command) if argument.required]
    named = [[argument.name, "x"] if argument.name.startswith("-") else ["x"] for argument in needed]
    return [*command.split(), *(word for words in named for word in words)]


@pytest.mark.parametrize("command", commands())
def test_options_may_stand_between_arguments(command: str) -> None:
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


def test_numbers_are_decimal_and_finite() -> None:
    whole = ("2.7", "2.0", "0x2", "1_0", "\u0663", " 3", "", "[1,2]")
    for text in whole:
        with pytest.raises(errors.UsageError, match=rf"^--top-k must be a whole number; got '{re.escape(text)}'\."):
            parse(["predict", "run", "x.png", "--top-k", text])
    for text in ("nan", "inf", "1e999", "1_0", "0x2"):
        with pytest.raises(errors.UsageError, match=rf"^--min-probability must be a number; got '{text}'\."):
            parse(["label", "run", "x.png", "--min-probability", text])
    for text in ("1_0", "1_0s", "\u0663s", "1_0MB"):
        for option in ("--budget", "--max-latency", "--max-size"):
            with pytest.raises(errors.UsageError, match=rf"^{option} must be .*; got '{text}'\."):
                parse(["compare", "photos", option, text])
    for command, argument in options_of(int) + options_of(float):
        with pytest.raises(errors.UsageError, match=rf"^{argument.name} must be .*; got '1_0'\."):
            parse([*shortest(command), argument.name, "1_0"])


def test_flags_have_no_value() -> None:
    for text in ("false", "1", "none", ""):
        with pytest.raises(errors.UsageError, match=f"^--quiet must be given without a value; got '{text}'"):
            parse(["predict", "run", "x.png", f"-q={text}"])
    for command, argument in options_of(bool):
        with pytest.raises(errors.UsageError, match=f"^{argument.name} must be given without a value; got 'true'"):
            parse([*shortest(command), f"{argument.name}=true"])


def test_lists_have_a_value() -> None:
    for command, argument in options_of(list):
        if argument.name != "--papers":  # alone, it lists all
            with pytest.raises(errors.UsageError, match=rf"^{argument.name} needs a value; got none\."):
                parse([*shortest(command), argument.name])


@pytest.mark.parametrize("command", commands())
def test_options_have_one_spelling(command: str) -> None:
    names = [option for option in option_names(command) if "-" in option.lstrip("-")]
    for option in names[:1] + names[-1:]:
        other = f"--{option[2:].replace('-', '_')}"
        with pytest.raises(errors.UsageError, match=rf"Unknown option of weft {command} '{other}'\. Nearest: {option}"):
            parse([*shortest(command), other, "1"])


@pytest.mark.parametrize("command", [name for name in commands() if "--threads" in option_names(name)])
def test_threads_have_one_range(command: str) -> None:
    rule = "--threads must be a whole number at least 1 and at most 1024"
    for number in (0, 1025, -1):
        with pytest.raises(errors.UsageError, match=rf"^{rule}; got {number}\."):
            parse([*shortest(command), "--threads", str(number)])
    for number in (1, 1024):
        parse([*shortest(command), "--threads", str(number)])


def test_help_of_outputs_and_examples_has_one_form() -> None:
    for command in commands():
        example = example_of(find(command)).splitlines()
        assert example[1].startswith(f"  weft {command}"), command
        for argument in arguments(command):
            if argument.name in ("--out", "OUT"):
                text = argument.parameter.help or ""
                assert re.match(r"output (directory|file): ", text), (command, text)


MEMORY = "weft: There must be enough memory; there is not ({}). Choose a smaller batch or image size."
CODES = [
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
]


@pytest.mark.parametrize(("error", "code", "line"), CODES, ids=[type(error).__name__ + str(c) for error, c, _ in CODES])
def test_exit_codes(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def verb(arguments: list[str]) -> int:
        raise error

    monkeypatch.setattr(app, "_run", verb)
    assert main(["models"]) == code
    assert capsys.readouterr().err.strip() == line


def test_other_errors_are_ours_and_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def verb(arguments: list[str]) -> int:
        raise FileNotFoundError(errno.ENOENT, "gone", "x")

    monkeypatch.setattr(app, "_run", verb)
    with pytest.raises(FileNotFoundError, match="gone"):
        main(["models"])


def test_sigterm_unwinds_and_the_handler_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    swept: list[str] = []

    def verb(arguments: list[str]) -> int:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            swept.append("swept")
        return 0

    monkeypatch.setattr(app, "_run", verb)
    before = signal.getsignal(signal.SIGTERM)
    assert main(["models"]) == 143
    assert swept == ["swept"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m weft models --json | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[0] == "["
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""


def test_a_closed_pipe_of_windows_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(words: list[str]) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("weft.cli.app._run", fail)
    with pytest.raises(OSError, match="Invalid argument"):
        main(["models"])
    monkeypatch.setattr("weft.cli.app.IS_WINDOWS", True)
    assert main(["models"]) == 0


def test_a_setting_without_set_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "digits", "optim.lr=1e-3"]) == 2
    assert "weft train has no place for 'optim.lr=1e-3'. A setting needs --set: --set optim.lr=1e-3." in (
        capsys.readouterr().err
    )


def test_an_unknown_key_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "digits", "--set", "imgsize=32"]) == 2
    assert "Unknown setting 'imgsize'. Nearest: img_size, " in capsys.readouterr().err


def test_set_wants_a_pair(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "digits", "--set", "optim.lr"]) == 2
    assert "--set takes KEY=VALUE; got 'optim.lr'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["train", "digits", "--no-force"],
        ["compare", "digits", "--empty-models"],
        ["predict", "--run", "model", "a.png"],
        ["train", "digits", "--quie"],
    ],
)
def test_what_is_no_option(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Flags have no opposite, positional arguments no name, and options no abbreviation."""
    assert main(words) == 2
    assert f"Unknown option of weft {words[0]} '--" in capsys.readouterr().err


def test_options_are_short_lists_durations_and_sizes() -> None:
    _, train = parse(
        ["train", "digits", "-m", "levit_128", "-b", "8", "-o", "run", "-q", "--lr", "1e-3", "--epochs", "2"]
    )
    assert vars(train.arguments["of_recipe"]) | dict(model="levit_128", batch_size="8", lr="1e-3", epochs="2") == vars(
        train.arguments["of_recipe"]
    )
    assert train.arguments["out"] == "run"
    assert train.arguments["output"].quiet
    words = [
        "compare",
        "photos",
        "--models",
        "a",
        "b",
        "--budget",
        "1h30m",
        "--max-latency",
        "10ms",
        "--max-size",
        "20MB",
    ]
    compared = parse(words)[1].arguments
    assert (compared["data"], compared["models"]) == ("photos", ["a", "b"])
    assert (compared["budget"], compared["max_latency"], compared["max_size"]) == (5400, 0.01, 20e6)
    served = given(
        parse(["serve", "run", "--drain", "0", "--max-wait", "20ms", "--read-timeout", "2m"])[1].arguments["settings"]
    )
    assert served == {"drain": 0, "max_wait": 0.02, "read_timeout": 120}


@pytest.mark.parametrize(("text", "size"), [("48", 48), ("48x64", (48, 64))])
def test_the_service_gets_an_image_size(text: str, size: object, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Settings] = []
    monkeypatch.setattr("weft.serve.server.serve", served.append)
    monkeypatch.setenv("GOMP_SPINCOUNT", "20000")  # else the verb sets it, for all tests that follow
    assert app.main(["serve", "levit_256", "--img-size", text]) == 0
    assert [settings.img_size for settings in served] == [size]


def test_a_shell_completes_verbs_options_and_values() -> None:
    script = command_line().generate_completion(shell="bash")
    for word in ("train", "--unknown-images", "openvino", "review"):
        assert word in script


def test_every_verb_limits_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr("weft.cli.app.limit_threads", lambda: calls.append(1))
    assert main(["recipes"]) == 0
    assert calls == [1]


def noticed(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let a signal end the command line, also where the tests run under nohup or in the background."""
    get = signal.getsignal
    monkeypatch.setattr(signal, "getsignal", lambda asked: signal.SIG_DFL if asked == number else get(asked))


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_waits_until_an_import_is_done(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception within it could abort the process; the signal comes once the import is done."""
    if not hasattr(signal, name):
        pytest.skip(f"this system has no {name}")
    noticed(monkeypatch, getattr(signal, name))
    body = f"import signal, time\nsignal.raise_signal(signal.{name})\ntime.sleep(0.2)\nis_done = True\n"
    (tmp_path / "slow_library.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)

    @_signals_as_exit()
    def import_and_work() -> None:
        importlib.import_module("slow_library")
        time.sleep(5)

    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)) as caught:
            import_and_work()
        assert sys.modules["slow_library"].is_done
    finally:
        sys.modules.pop("slow_library", None)
    codes = {"SIGINT": None, "SIGTERM": 143, "SIGHUP": 129}
    assert getattr(caught.value, "code", None) == codes[name]


def test_a_signal_outside_of_imports_acts_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    noticed(monkeypatch, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), _signals_as_exit():
        signal.raise_signal(signal.SIGINT)
