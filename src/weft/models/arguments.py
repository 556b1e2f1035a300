"""Constructor values that come from a file or a command line: known names, plain values, and none that names a place.

timm's builders take more than a network's own values: where to fetch weights, which file to read, what to return. An
untrusted recipe or model directory must not reach those. No torch here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from weft.errors import UsageError, nearest

WORD = re.compile(r"[A-Za-z0-9_.+-]{1,64}\Z")  # `gelu`, `avg`: no path, no address
MAX_NUMBER, MAX_DEPTH, MAX_ITEMS = 100_000, 3, 256
TIMM = frozenset(
    "img_size in_chans channels global_pool patch_size embed_dim embed_dims depth depths dims widths num_heads "
    "heads head_dim num_kv_heads mlp_ratio mlp_ratios qkv_bias qk_norm class_token reg_tokens no_embed_class "
    "dynamic_img_size dynamic_img_pad strict_img_size window_size window_ratio act_layer norm_layer norm_eps "
    "fc_norm pre_norm final_norm output_stride init_values layer_scale_init_value ls_init_value head_init_scale "
    "zero_init_last weight_init fix_init distilled distillation drop_rate drop_path_rate drop_block_rate "
    "proj_drop_rate attn_drop_rate pos_drop_rate patch_drop_rate layers cardinality base_width stem_width stem_type "
    "stem_size stem_chs avg_down aa_layer width_factor growth_rate bn_size conv_mlp conv_bias use_grn kernel_sizes "
    "sr_ratios key_dim attn_ratio expand_ratio pos_embed use_abs_pos_emb use_rel_pos_bias use_rel_pos_emb".split()
)


def check_arguments(name: str, arguments: Mapping[str, Any], offered: Iterable[str]) -> None:
    """Check constructor arguments from an untrusted source.

    Args:
        name: of the model, for the message.
        arguments: names and values.
        offered: the names that there are.

    Raises:
        UsageError: an unknown name, or a value that is not plain: numbers within 100,000, `true`, `false`, null, words
            of letters and digits, and lists of these.
    """
    offered = sorted(offered)
    for key, value in arguments.items():
        if key not in offered:
            likely = ", ".join(nearest(key, offered))
            raise UsageError(
                f"{name} has no constructor value {_cut(repr(key))} that a file may set. Nearest: {likely}."
            )
        if not _is_plain(value, MAX_NUMBER if "depth" not in key else 1_000):
            raise UsageError(
                f"{key} of {name} must be a number, a word, true, false, null or a list of these; got"
                f" {_cut(repr(value))}."
            )


def _is_plain(value: Any, most: float, depth: int = 0) -> bool:
    if isinstance(value, (list, tuple)):
        return depth < MAX_DEPTH and len(value) <= MAX_ITEMS and all(_is_plain(item, most, depth + 1) for item in value)
    if value is None or isinstance(value, bool):
        return True
    if isinstance(value, (int, float)):
        return math.isfinite(value) and abs(value) <= most
    return isinstance(value, str) and WORD.match(value) is not None


def _cut(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
