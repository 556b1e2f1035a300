"""Both ways of attention agree, and the faster one is taken where it was found to be faster."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.nn import functional as F

from weft.layers import attention
from weft.layers.attention import attend, attend_with_bias, record_attention


def parts(dtype: torch.dtype, queries: int = 9, keys: int = 5) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, count, 8).to(dtype).requires_grad_() for count in (queries, keys, keys)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-2)])
def test_values_and_gradients(dtype, tolerance):
    q, k, v = parts(dtype)
    answer = attend(q, k, v, 0.3)
    scores = (q.double() @ k.double().transpose(-2, -1)) * 0.3
    expected = scores.softmax(dim=-1) @ v.double()
    torch.testing.assert_close(answer.double(), expected, rtol=0, atol=tolerance)
    weights = torch.randn_like(expected)
    found = torch.autograd.grad((answer.double() * weights).sum(), (q, k, v))
    wanted = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=4 * tolerance)


@pytest.mark.parametrize(
    ("dtype", "tokens", "has_amx", "with_gradients", "is_fused"),
    [
        (torch.float32, 9, False, True, True),
        (torch.bfloat16, 9, False, True, False),
        (torch.bfloat16, 9, False, False, False),
        (torch.bfloat16, 9, True, True, False),
        (torch.bfloat16, 9, True, False, True),
        (torch.bfloat16, 1025, False, True, True),  # the scores would take much memory
    ],
)
def test_which_way(dtype, tokens, has_amx, with_gradients, is_fused, monkeypatch):
    calls = []
    fused = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or fused(*a, **k))
    monkeypatch.setattr(attention, "_HAS_AMX", has_amx)
    with torch.set_grad_enabled(with_gradients):
        attend(*parts(dtype, tokens, tokens), 0.3)
    assert bool(calls) == is_fused


@pytest.mark.parametrize("has_bias", [True, False])
def test_attention_with_a_bias_of_a_gpu(has_bias, monkeypatch):
    """The fused kernel, which inference on GPUs uses, gives the same as the products."""
    q, k, v = (torch.randn(2, 3, count, width, dtype=torch.float64) for count, width in ((9, 8), (5, 8), (5, 16)))
    bias = torch.randn(3, 9, 16, dtype=torch.float32)[..., :5] if has_bias else None
    expected = attend_with_bias(q, k, v, 0.3, bias)
    scores = (q @ k.mT) * 0.3 + (0.0 if bias is None else bias)
    torch.testing.assert_close(expected, scores.softmax(dim=-1) @ v)
    monkeypatch.setattr(attention, "_is_fused_with_bias", lambda q: True)
    torch.testing.assert_close(attend_with_bias(q, k, v, 0.3, bias), expected)


def test_a_compiled_graph_is_not_recorded() -> None:
    """PyTorch 2.11 cannot trace a ContextVar: it would split the graph at every attention."""
    q = torch.randn(1, 2, 5, 4)
    compiled = torch.compile(lambda x: attend(x, x, x, 0.5), fullgraph=True, backend="eager")
    with record_attention() as weights:
        torch.testing.assert_close(compiled(q), attend(q, q, q, 0.5))
    assert len(weights) == 1  # of the second call


def test_attention_of_other_threads_is_not_recorded() -> None:
    q = torch.randn(1, 2, 5, 4)
    asked, done = threading.Event(), threading.Event()

    def beside() -> None:
        asked.wait(10)
        attend(q, q, q, 0.5)
        with record_attention() as own:
            attend(q, q, q, 0.5)
        assert len(own) == 1
        done.set()

    other = threading.Thread(target=beside)
    other.start()
    with record_attention() as weights:
        attend(q, q, q, 0.5)
        asked.set()
        assert done.wait(10)
        with record_attention() as inner:
            attend(q, q, q, 0.5)
        attend(q, q, q, 0.5)
    other.join()
    attend(q, q, q, 0.5)
    assert (len(weights), len(inner)) == (2, 1)
