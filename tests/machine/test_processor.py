"""The class of a processor, read from /proc/cpuinfo."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.machine import processor


@pytest.fixture(autouse=True)
def cpuinfo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An absent file in place of /proc/cpuinfo, no limits, and no cache."""
    for name in processor.LIMITS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(processor, "_CPUINFO", tmp_path / "cpuinfo")
    processor.cpu_flags.cache_clear()
    yield tmp_path / "cpuinfo"
    processor.cpu_flags.cache_clear()


@pytest.mark.parametrize(
    ("flags", "name", "has_bf16"),
    [
        ("fpu sse2", "unknown", False),
        ("avx2 fma", "avx2", False),
        ("avx2 fma avx_vnni", "avx2_vnni", False),
        ("avx2 avx512f", "avx512", False),
        ("avx2 avx512f avx512_vnni", "avx512_vnni", False),
        ("avx2 avx512f avx512_vnni avx512_bf16", "avx512_bf16_vnni", True),
        ("avx2 avx512f avx512_vnni avx512_bf16 amx_bf16 amx_int8", "amx", True),
        ("fp asimd", "neon", False),
    ],
)
def test_the_class_follows_from_the_flags(flags, name, has_bf16, cpuinfo):
    title = "Features" if "asimd" in flags else "flags"
    cpuinfo.write_text(f"processor\t: 0\nmodel name\t: A fast one\n{title}\t\t: {flags}\n")
    assert processor.processor_class() == name
    assert processor.has_bf16() is has_bf16
    assert processor.cpu_name() == "A fast one"
    assert set(processor.cpu_flags()) == set(flags.split()) & set(processor.FLAGS)


@pytest.mark.parametrize(
    ("variable", "value", "name", "has_bf16"),
    [
        ("ONEDNN_MAX_CPU_ISA", "AVX2", "avx2", False),
        ("ONEDNN_MAX_CPU_ISA", "avx512_core_vnni", "avx512_vnni", False),
        ("DNNL_MAX_CPU_ISA", "AVX512_CORE_BF16", "avx512_bf16_vnni", True),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX", "amx", True),
        ("ONEDNN_MAX_CPU_ISA", "nonsense", "amx", True),
        ("ONEDNN_MAX_CPU_ISA", "SSE41", "unknown", False),
        ("ATEN_CPU_CAPABILITY", "avx2", "amx", True),  # bf16 is multiplied by oneDNN
    ],
)
def test_a_limit_of_onednn_leaves_the_instructions_of_a_class(variable, value, name, has_bf16, cpuinfo, monkeypatch):
    cpuinfo.write_text("flags\t\t: avx2 fma avx512f avx512_vnni avx512_bf16 amx_bf16 amx_int8\n")
    monkeypatch.setenv(variable, value)
    assert (processor.processor_class(processor.onednn_flags()), processor.has_bf16()) == (name, has_bf16)
    assert (processor.processor_class(), processor.limits()) == ("amx", {variable: value})


def test_a_limit_is_a_short_text_and_of_x86(cpuinfo, monkeypatch):
    cpuinfo.write_text("Features\t: fp asimd sve\n")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", 1000 * "\x1b")
    assert processor.onednn_flags() == ("asimd", "sve")
    assert len(processor.limits()["ATEN_CPU_CAPABILITY"]) == processor.MAX_LIMIT


def test_the_name_without_a_model_name(cpuinfo, monkeypatch):
    names = iter(["Intel64 Family 6", ""])
    monkeypatch.setattr(processor.platform, "processor", lambda: next(names))
    assert processor.cpu_name() == "Intel64 Family 6"
    assert (processor.cpu_flags(), processor.cpu_name(), processor.processor_class()) == ((), None, "unknown")
    cpuinfo.write_text("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n")
    assert processor.cpu_name() == "ARM 0x41 0xd0c"


def test_emulated_bf16_is_named(monkeypatch):
    monkeypatch.setattr(processor, "has_bf16", lambda: False)
    note = "This processor emulates bf16, which is slow. --precision fp32 is faster."
    assert processor.bf16_note("cpu", "bf16") == note
    assert processor.bf16_note("cpu", "fp32") is processor.bf16_note("cuda", "bf16") is None
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert processor.bf16_note("cpu", "bf16") == f"With ONEDNN_MAX_CPU_ISA=AVX2, t{note[1:]}"
    monkeypatch.setattr(processor, "has_bf16", lambda: True)
    assert processor.bf16_note("cpu", "bf16") is None


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 4),
        ({"cpu.max": "max 100000\n"}, 4),
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "6400000 100000\n"}, 4),
        ({"cpu.max": "nonsense\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
    ],
)
def test_cores_of_a_container(files, cores, tmp_path, monkeypatch):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(processor, "_CGROUP", tmp_path)
    monkeypatch.setattr(processor, "_logical_cores", lambda: 4)
    monkeypatch.setattr(processor, "_physical_cores", lambda: 4)
    assert processor.available_cores() == cores
    assert processor.default_threads() == cores
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    processor.limit_threads()
    assert os.environ["OMP_NUM_THREADS"] == "8"
    monkeypatch.delenv("OMP_NUM_THREADS")
    processor.limit_threads()
    assert os.environ.get("OMP_NUM_THREADS") == (str(cores) if cores < 4 else None)


@pytest.mark.parametrize(("given", "threads"), [("3", 3), ("2,1", 2), ("99999999999", 1024), ("0", 5), ("many", 5)])
def test_openmp_s_number_of_threads(given: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "_threads", [])
    monkeypatch.setattr(processor, "default_threads", lambda: 5)
    monkeypatch.delitem(processor.sys.modules, "torch", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert processor.num_threads() == threads


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_spinning_is_limited_unless_the_environment_configures_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    monkeypatch.setattr(os, "environ", {name: "7"})
    processor.limit_spinning()
    assert os.environ == {name: "7"}
    monkeypatch.setattr(os, "environ", {})
    processor.limit_spinning()
    assert set(os.environ) == set(names) - {"OMP_WAIT_POLICY"}


def test_a_call_in_a_thread_returns_after_its_end() -> None:
    called: list[threading.Thread] = []

    def fail() -> None:
        called.append(threading.current_thread())
        raise ValueError("the reason")

    called.append(processor.call_in_thread(threading.current_thread))
    with pytest.raises(ValueError, match="the reason"):
        processor.call_in_thread(fail)
    assert len({threading.main_thread(), *called}) == 3
    assert not any(thread.is_alive() for thread in called)


def test_nobody_waits_for_a_call_that_was_begun() -> None:
    go = threading.Event()
    begun = processor.begin_in_thread(lambda: go.wait(20))
    assert not begun.done()
    go.set()
    assert begun.result(20)
    with pytest.raises(ZeroDivisionError):
        processor.begin_in_thread(lambda: 1 / 0).result(20)
