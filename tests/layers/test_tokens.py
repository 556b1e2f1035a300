import torch
from einops import rearrange

from weft.layers.tokens import join_heads, split_heads, to_map, to_tokens


def test_to_map_is_a_channels_last_view():
    tokens = torch.randn(2, 15, 4)
    fmap = to_map(tokens, (3, 5))
    assert torch.equal(fmap, rearrange(tokens, "b (h w) c -> b c h w", h=3, w=5))
    assert fmap.data_ptr() == tokens.data_ptr()
    assert fmap.is_contiguous(memory_format=torch.channels_last)


def test_there_and_back_is_the_same_memory():
    tokens = torch.randn(2, 15, 4)
    back = to_tokens(to_map(tokens, (3, 5)))
    assert back.data_ptr() == tokens.data_ptr()
    assert torch.equal(back, tokens)
    assert back.is_contiguous()


def test_heads():
    tokens = torch.randn(2, 7, 12)
    parts = split_heads(tokens, 3)
    assert torch.equal(parts, rearrange(tokens, "b n (heads d) -> b heads n d", heads=3))
    assert torch.equal(join_heads(parts), tokens)
