"""Both ways of attention agree, and the faster one is taken where it was found to be faster."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.nn import functional as F

from weft.layers.attention import attend, record_attention


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
    ("dtype", "tokens", "is_fused"),
    [(torch.float32, 9, True), (torch.bfloat16, 9, False), (torch.bfloat16, 1025, True)],
)
def test_which_way(dtype, tokens, is_fused, monkeypatch):
    """Products in bf16 on a CPU, but not where the scores would take much memory."""
    asked = []
    fused = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: asked.append(1) or fused(*a, **k))
    attend(*parts(dtype, tokens, tokens), 0.3)
    assert bool(asked) == is_fused


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
