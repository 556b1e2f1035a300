"""Devices, number formats, and the two ways to be stopped."""

from __future__ import annotations

import signal
import threading

import pytest
import torch

from weft.errors import UsageError
from weft.train.runtime import Runtime, StopSignals


def test_auto_takes_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert Runtime.of("auto").device.type == "cuda"
    assert Runtime.of("cpu").device.type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Runtime.of("auto").device.type == "cpu"
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
    ("number", "error", "code"), [(signal.SIGINT, KeyboardInterrupt, None), (signal.SIGTERM, SystemExit, 143)]
)
def test_the_first_signal_waits_for_the_loop(
    number: signal.Signals, error: type[BaseException], code: int | None
) -> None:
    before = signal.getsignal(number)
    with StopSignals() as signals:
        signals.check()
        signal.raise_signal(number)  # nothing happens here ...
        assert signals.requested is number
        assert signal.getsignal(number) is before  # ... and a second one would act at once
        with pytest.raises(error) as caught:
            signals.check()
    assert getattr(caught.value, "code", None) == code
    assert signal.getsignal(number) is before


def test_handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopSignals():
        assert signal.getsignal(signal.SIGINT) is not before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_another_thread_may_train_too() -> None:
    seen: list[str] = []

    def work() -> None:
        with StopSignals() as signals:
            signals.check()
            seen.append("worked")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == ["worked"]
