"""Devices, number formats, and the two ways to be stopped."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch

from weft.errors import StoppedError, UsageError
from weft.machine.runtime import Runtime
from weft.train.stop import Stop


def test_auto_takes_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert Runtime.of("auto").device == torch.device("cuda")
    assert Runtime.of("cpu").device == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Runtime.of("auto").device == torch.device("cpu")
    with pytest.raises(UsageError, match=r"device cuda needs a GPU .* Pass --device cpu"):
        Runtime.of("cuda")


def test_mps_is_used_only_by_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UsageError, match=r"device mps needs the GPU of a Mac .* Pass --device cpu"):
        Runtime.of("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert Runtime.of("auto").device == torch.device("cpu")
    assert Runtime.of("mps").device == torch.device("mps")
    with pytest.raises(UsageError, match="precision must be fp32 on device mps; got bf16"):
        Runtime.of("mps", "bf16")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="device mps runs in one process"):
        Runtime.of("mps")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpu", "fp32"), "device must be auto, cpu, cuda or mps; got 'gpu'"),
        (("cpu", "fp16"), "auto, fp32 or bf16; got 'fp16'"),
    ],
)
def test_unknown_words(arguments: tuple[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Runtime.of(*arguments)


@pytest.mark.parametrize(
    ("number", "reason", "error", "code"),
    [
        (signal.SIGINT, Stop.SIGINT, KeyboardInterrupt, None),
        (signal.SIGTERM, Stop.SIGTERM, SystemExit, 143),
        (signal.SIGHUP, Stop.SIGHUP, SystemExit, 129),
    ],
)
def test_the_first_signal_waits_for_the_loop(
    number: signal.Signals, reason: int, error: type[BaseException], code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Now(Exception):
        pass

    def act(number: int, frame: object) -> None:
        raise Now

    before = signal.signal(number, act)
    try:
        with Stop() as stop:
            assert stop.reason == 0
            signal.raise_signal(number)  # nothing happens here ...
            assert stop.reason == reason
            with pytest.raises(error) as caught:
                stop.end(stop.reason, "stopped")
            monkeypatch.setattr(Stop, "ECHO_SECONDS", 0.0)
            with pytest.raises(Now):
                signal.raise_signal(number)  # ... and a second one acts at once
        assert getattr(caught.value, "code", None) == code
        assert signal.getsignal(number) is act
    finally:
        signal.signal(number, before)


def test_an_echo_of_a_signal_is_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` signals its child and then its group; torchrun's agent repeats what the group got."""
    with Stop() as stop:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)
        assert stop.reason == Stop.SIGTERM
    monkeypatch.setenv("WORLD_SIZE", "2")
    with Stop() as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert stop.reason == Stop.SIGINT
    monkeypatch.delenv("WORLD_SIZE")
    with Stop():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):  # a person who presses twice means it
            signal.raise_signal(signal.SIGINT)


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop() as stop:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            signal.raise_signal(signal.SIGHUP)
            assert stop.reason == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_time_limit() -> None:
    assert Stop(1000).reason == 0
    late = Stop(1e-9)
    time.sleep(0.001)
    assert late.reason == 1
    with pytest.raises(StoppedError, match="stopped") as caught:
        late.end(late.reason, "stopped")
    assert caught.value.exit_code == 143


def test_handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Stop():
        assert signal.getsignal(signal.SIGINT) is not before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_another_thread_may_train_too() -> None:
    seen: list[int] = []

    def work() -> None:
        with Stop() as stop:
            seen.append(stop.reason)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [0]


def test_one_process_after_another_device_or_format() -> None:
    for precision in ("fp32", "bf16", "fp32"):
        one = Runtime.of("cpu", precision)
        assert (one.rank, one.world, one.is_main) == (0, 1, True)
        assert one.sum([1.0, 2.0]) == [1.0, 2.0]
        assert one.max([3.0]) == [3.0]
        assert one.gather("x") == ["x"]
