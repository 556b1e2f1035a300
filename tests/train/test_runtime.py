"""Devices, number formats, and the two ways to be stopped."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch

from weft.errors import StoppedError, UsageError
from weft.train import runtime
from weft.train.runtime import Runtime, Stop


def test_auto_takes_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(runtime, "_accelerator", asked.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    Runtime.of("auto")
    Runtime.of("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Runtime.of("auto")
    assert asked == [False, True, True]  # on the CPU
    with pytest.raises(UsageError, match=r"device cuda needs a GPU .* Pass --device cpu"):
        Runtime.of("cuda")


@pytest.mark.parametrize(
    ("words", "message"),
    [(("gpu", "fp32"), "device must be auto, cpu or cuda; got 'gpu'"), (("cpu", "fp16"), "fp32 or bf16; got 'fp16'")],
)
def test_unknown_words(words: tuple[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Runtime.of(*words)


@pytest.mark.parametrize(
    ("number", "reason", "error", "code"),
    [(signal.SIGINT, 3, KeyboardInterrupt, None), (signal.SIGTERM, 2, SystemExit, 143)],
)
def test_the_first_signal_waits_for_the_loop(
    number: signal.Signals, reason: int, error: type[BaseException], code: int | None
) -> None:
    before = signal.getsignal(number)
    with Stop() as stop:
        assert stop.reason == 0
        signal.raise_signal(number)  # nothing happens here ...
        assert stop.reason == reason
        assert signal.getsignal(number) is before  # ... and a second one would act at once
        with pytest.raises(error) as caught:
            stop.leave(stop.reason, "stopped")
    assert getattr(caught.value, "code", None) == code
    assert signal.getsignal(number) is before


def test_a_time_limit() -> None:
    assert Stop(1000).reason == 0
    late = Stop(1e-9)
    time.sleep(0.001)
    assert late.reason == 1
    with pytest.raises(StoppedError, match="stopped") as caught:
        late.leave(late.reason, "stopped")
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
