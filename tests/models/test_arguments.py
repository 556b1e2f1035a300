"""No constructor value of a file can make timm read a file, ask a hub, import code or return something else."""

from __future__ import annotations

import inspect

import pytest
import timm
from timm.models import build_model_with_cfg

from weft.errors import UsageError
from weft.models.arguments import check_arguments
from weft.models.building import build_described

OF_TIMM = sorted(
    {*inspect.signature(timm.create_model).parameters, *inspect.signature(build_model_with_cfg).parameters} - {"kwargs"}
)
OTHERS = (
    *("features_only", "feature_cls", "out_indices", "pruned", "device", "dtype", "hf_hub_id", "model_dir", "cfg"),
    *("pretrained_custom_load", "pretrained_cfg.url", "block_fn", "weights_path", "file", "checkpoint", "../x", ""),
)


@pytest.mark.parametrize("key", [*OF_TIMM, *OTHERS])
def test_what_is_no_value_of_a_network_is_refused(key: str) -> None:
    for value in (True, "x.pth", "http://127.0.0.1:1/x"):
        with pytest.raises(UsageError, match=r"resnet18 has no constructor value .* that a file may set"):
            check_arguments("resnet18", {key: value}, None)


def test_values_of_networks_of_timm_are_accepted_and_its_constructor_has_the_last_word() -> None:
    values = {"img_size": 64, "drop_path_rate": 0.1, "transformer_drop_path": False, "pretrained_window_sizes": [0, 0]}
    values |= {"act_layer": "gelu", "channels": [32, 64], "class_token": False, "in_chans": 1, "no_such_value": None}
    check_arguments("resnet18", values, None)
    with pytest.raises(UsageError, match=r"resnet18 cannot be built with no_such_value=3: .*no_such_value"):
        build_described("resnet18", {"no_such_value": 3})


@pytest.mark.parametrize("value", ["a/b", "a:b", "..\\x", "", 1e9, float("inf"), {"a": 1}, [[[[1]]]], [0] * 300])
def test_values_that_are_not_plain_are_refused(value: object) -> None:
    with pytest.raises(UsageError, match="must be a number, a word"):
        check_arguments("resnet18", {"act_layer": value}, None)
