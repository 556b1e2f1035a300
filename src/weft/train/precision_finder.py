"""Find the faster precision for training a network, by timing training steps."""

from __future__ import annotations

import dataclasses

from weft.recipes import Recipe
from weft.runtime import Runtime
from weft.train.batch_size_finder import seconds_of_step

LARGEST = 64  # images of a timed step
GAIN = 1.05  # of bf16 over fp32 in the time of a step, from which it is chosen


def find_precision(recipe: Recipe, num_classes: int, runtime: Runtime) -> tuple[Runtime, str]:
    """Choose between fp32 and bf16 on a CPU that multiplies matrices faster in bf16, by the time of a training step.

    A network may have operations that are slow in bf16: the gradient of strided depthwise convolutions, for example,
    takes ten times as long as in fp32.

    Args:
        recipe: what to train, with its batch size; its weights are not loaded.
        num_classes: number of classes.
        runtime: with the precision that `weft.capabilities.fastest_precision` found.

    Returns:
        The runtime with the chosen precision, and a sentence that gives the reason.
    """
    text = "chosen for this machine"
    if runtime.precision == "fp32" or runtime.device.type != "cpu" or recipe.epochs == 0:
        return runtime, f"Precision: {runtime.precision}, {text}."
    assert isinstance(recipe.batch_size, int)
    size = min(max(recipe.batch_size // (runtime.world * recipe.accumulate), 1), LARGEST)
    seconds: dict[str, float] = {}
    for precision in ("fp32", "bf16"):
        own = dataclasses.replace(runtime, precision=precision)
        seconds[precision] = max(runtime.gather(seconds_of_step(recipe, size, num_classes, own)))
    chosen = "bf16" if seconds["bf16"] * GAIN <= seconds["fp32"] else "fp32"
    reason = f"a step takes {1e3 * seconds['bf16']:.0f} ms in bf16 and {1e3 * seconds['fp32']:.0f} ms in fp32"
    return dataclasses.replace(runtime, precision=chosen), f"Precision: {chosen}, {text}: {reason}."
