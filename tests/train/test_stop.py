"""Requests to stop: the first signal waits for the end of a step, the second acts immediately, an echo is none."""

from __future__ import annotations

import signal
import threading
from types import SimpleNamespace

import pytest

from weft.errors import StoppedError
from weft.train.stop import Stop


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the clock: the last entry."""
    now = [100.0]
    monkeypatch.setattr("weft.train.stop.time", SimpleNamespace(monotonic=lambda: now[-1]))
    return now


@pytest.mark.parametrize(
    ("number", "reason", "error", "code"),
    [
        (signal.SIGINT, Stop.SIGINT, KeyboardInterrupt, None),
        (signal.SIGTERM, Stop.SIGTERM, SystemExit, 143),
        (signal.SIGHUP, Stop.SIGHUP, SystemExit, 129),
    ],
)
def test_the_first_signal_is_a_request_and_the_second_acts_immediately(number, reason, error, code, seconds):
    class Now(Exception):
        pass

    def act(number: int, frame: object) -> None:
        raise Now

    before = signal.signal(number, act)
    try:
        with Stop() as stop:
            assert stop.reason == 0
            signal.raise_signal(number)
            assert stop.reason == reason
            with pytest.raises(error) as caught:
                stop.end(stop.reason, "stopped")
            seconds.append(seconds[0] + Stop.ECHO_SECONDS)
            with pytest.raises(Now):
                signal.raise_signal(number)
        assert getattr(caught.value, "code", None) == code
        assert signal.getsignal(number) is act
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(
    ("numbers", "processes", "is_echo"),
    [
        ([signal.SIGTERM, signal.SIGTERM, signal.SIGHUP], 1, True),  # `timeout` signals its child and then its group
        ([signal.SIGINT, signal.SIGINT], 2, True),  # torchrun's agent repeats what the group got
        ([signal.SIGINT, signal.SIGINT], 1, False),  # a person who presses twice means it
    ],
)
def test_an_echo_of_a_signal_is_no_second_one(numbers, processes, is_echo, seconds, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    with Stop() as stop:
        for number in numbers[:-1]:
            signal.raise_signal(number)
        if is_echo:
            signal.raise_signal(numbers[-1])
        else:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(numbers[-1])
        assert stop.requested == numbers[0]


def test_a_signal_that_the_process_ignores_stays_ignored() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop() as stop:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            signal.raise_signal(signal.SIGHUP)
            assert stop.reason == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_time_limit_is_a_request(seconds: list[float]) -> None:
    stop = Stop(60)
    seconds.append(159.0)
    assert stop.reason == 0
    seconds.append(160.1)
    assert stop.reason == Stop.TIME
    with pytest.raises(StoppedError, match="stopped") as caught:
        stop.end(stop.reason, "stopped")
    assert caught.value.exit_code == 143


def test_another_thread_may_train_too() -> None:
    """Python allows it no handlers."""
    seen: list[int] = []

    def work() -> None:
        with Stop() as stop:
            seen.append(stop.reason)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [0]
