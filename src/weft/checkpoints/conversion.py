"""Convert a third-party checkpoint to a weft model directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from weft.checkpoints.source_folder import read_metadata, weights_in
from weft.errors import CheckpointError
from weft.files import refuse_taken
from weft.models.contract import preprocessing, resized
from weft.models.families import VARIANTS, check_name
from weft.progress import loading, obeys_quiet

if TYPE_CHECKING:
    from weft.checkpoints.load import LoadReport


@obeys_quiet
def convert_checkpoint(
    source: str | Path,
    out: str | Path,
    *,
    model: str | None = None,
    num_classes: int | None = None,
    img_size: int | tuple[int, int] | None = None,
    head: Literal["keep", "drop"] = "keep",
    state_dict: str | None = None,
    import_foreign: bool = False,
    prefix: str | None = None,
    settings: Mapping[str, Any] | None = None,
    force: bool = False,
    quiet: bool = False,
) -> LoadReport:
    """Read weights in any layout that `load_checkpoint` supports, and write a model directory.

    Args:
        source: the checkpoint file, or a folder with one. Class names and preprocessing next to it, as transformers,
            timm and weft write them, are kept.
        out: the model directory.
        model: name of the model; None to find weft's model that matches the weights.
        num_classes: number of classes of the head; None for that of the weights.
        img_size: input size in pixels; None for that of the model. Position embeddings are resized.
        head: 'drop' replaces the head by a new one with random weights.
        state_dict, import_foreign, prefix: as in `load_checkpoint`.
        settings: constructor arguments, in addition to those that the layout requires.
        force: replace an existing model directory.
        quiet: print no progress.

    Returns:
        The model that was written, and what was loaded into it.

    Raises:
        UsageError: no model or several models match the weights, or `out` exists.
        CheckpointError: the file is refused, or does not match the model.
    """
    out, source = Path(out), Path(source)
    if not force:
        refuse_taken(out, (), force=False)
    if not source.exists():
        raise CheckpointError(f"The checkpoint must be a file; {source} does not exist.")
    with loading():
        from weft.checkpoints.files import read_contents
        from weft.checkpoints.load import find_prefix, given_prefix, load_checkpoint, prefixes, recognise, under
        from weft.checkpoints.matching import arguments_for, classes_of, matching_model
        from weft.checkpoints.model_dir import save_model_dir
        from weft.models.building import create_model

        if model is not None:
            check_name(model)
    file = weights_in(source)
    state, part, others = read_contents(file, state_dict=state_dict, import_foreign=import_foreign)
    settings = dict(settings or {})
    places = prefixes(state, len(state) // 3)
    if prefix is not None:
        places = [prefix := given_prefix(state, prefix)]
    if model is None:
        prefix, model = matching_model(state, places, settings, img_size, source)
    default: Any = create_model(model, device="meta")
    if prefix is None:
        prefix = find_prefix(default, state, head=head)
    weights = under(state, prefix)
    layout = recognise(weights)
    required, weights = layout.switches(weights), layout.convert(weights)[0]
    switches = {**required, **settings}

    names, cfg, files = read_metadata(file.parent)
    size_beside = tuple(cfg.pop("input_size", ()))[1:]
    if img_size is None and size_beside not in ((), tuple(preprocessing(default)["input_size"][1:])):
        img_size = size_beside
    if img_size is not None and model in VARIANTS:
        switches["img_size"] = img_size
    arguments = arguments_for(model, weights, switches) | settings  # an unknown setting is refused
    classes = num_classes
    if classes is None:
        classes = classes_of(weights, create_model(model, device="meta", **arguments))
    network: Any = create_model(model, num_classes=classes, **arguments)
    if img_size is not None and model not in VARIANTS:
        network = resized(network, img_size)
    # a setting that contradicts the layout is intended: the weights may have been trained with it
    contradicts = any(required.get(key, value) != value for key, value in settings.items())
    report = load_checkpoint(network, state, head=head, switches="ignore" if contradicts else "check", prefix=prefix)
    network.pretrained_cfg = network.default_cfg = {**network.pretrained_cfg, **cfg}
    if head == "drop" or len(names or ()) != classes:
        names = None
    save_model_dir(network, out, label_names=names, force=force)
    return replace(report, model=model, switches=switches, part=part, others=others, files=files, label_names=names)
