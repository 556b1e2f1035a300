"""The class of a processor, read from /proc/cpuinfo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from weft import processor


@pytest.fixture(autouse=True)
def read_anew() -> Iterator[None]:
    processor.cpu_flags.cache_clear()
    yield
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
def test_the_class_follows_from_the_flags(
    flags: str, name: str, has_bf16: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    title = "Features" if "asimd" in flags else "flags"
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nmodel name\t: A fast one\n{title}\t\t: {flags}\n")
    monkeypatch.setattr(processor, "_CPUINFO", info)
    assert processor.processor_class() == name
    assert processor.has_bf16() is has_bf16
    assert processor.cpu_name() == "A fast one"
    assert set(processor.cpu_flags()) == set(flags.split()) & set(processor.FLAGS)


def test_no_cpuinfo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processor, "_CPUINFO", tmp_path / "absent")
    assert (processor.cpu_flags(), processor.cpu_name(), processor.processor_class()) == ((), None, "unknown")
