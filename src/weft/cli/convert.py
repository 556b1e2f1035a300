"""`weft convert`: convert a third-party checkpoint to a model directory."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from weft.cli import options as opt
from weft.cli.options import flat, in_group, pairs, print_json
from weft.text import first_few, one_line


@flat
class Network(opt.Plugins):
    """The network to build."""

    model: str | None = None
    img_size: str | None = None


def convert(
    source: str,
    out: str,
    /,
    *,
    network: Network = Network(),
    num_classes: Annotated[int | None, in_group("Network", metavar="N")] = None,
    head: Annotated[Literal["keep", "drop"], in_group("Network", metavar="keep|drop")] = "keep",
    settings: opt.Settings = None,
    state_dict: Annotated[str | None, Parameter(metavar="KEY")] = None,
    prefix: Annotated[str | None, Parameter(metavar="NAME")] = None,
    import_foreign: bool = False,
    output: opt.Output = opt.Output(),
) -> int:
    """Convert a third-party checkpoint to a weft model directory.

    Args:
        source: checkpoint file, or folder of transformers or timm
        out: output directory: model.safetensors, config.json
        num_classes: number of classes (default: that of the weights)
        head: drop: replace the head by a new one (default: keep)
        settings: constructor argument of the network; may be repeated
        state_dict: state dict of the file to use, for example model_ema
        prefix: beginning of the keys to load, such as net (default: the one that fits)
        import_foreign: accept a pickle that names unknown classes; they become inert placeholders

    Example:
        weft convert LeViT-256-13b5763e.pth models/levit_256
        weft convert epoch=9.ckpt models/cats --model resnet50 --prefix net

        The model is by default the one that matches the weights; for --img-size, position embeddings are resized.
        Supported layouts: the released CeiT, CvT and LeViT (linear and convolutional), CeiT-pytorch, timm's and
        transformers' LeViT, transformers' CvT, vit-pytorch's CvT and LeViT, and weft's own; .safetensors, .pth, .pt,
        .bin.
    """
    from weft.checkpoints.conversion import convert_checkpoint
    from weft.progress import Work, say
    from weft.recipes import load_recipe

    values = [(f"model_args.{key}", value) for key, value in pairs(settings).items()]
    if network.img_size is not None:
        values.append(("img_size", network.img_size))
    recipe = load_recipe(None, values)
    with Work("converting"):
        report = convert_checkpoint(
            source,
            out,
            model=network.model,
            num_classes=num_classes,
            img_size=recipe.img_size,
            head=head,
            state_dict=state_dict,
            import_foreign=import_foreign,
            prefix=prefix,
            settings=recipe.model_args,
            force=output.force,
        )
    if report.others:
        part, others = report.part, ", ".join(report.others)
        say(f"{source} has several state dicts; used {part!r}, not {others}. Choose another with --state-dict KEY.")
    if output.json:
        print_json({"out": out, **{key: value for key, value in vars(report).items() if key != "label_names"}})
        return 0
    print(f"{report.model}, {report.tensors} tensors of {report.source}: {out}")
    for action, names in (("resized", report.resized), ("not loaded", report.dropped)):
        if names:
            print(f"{action}: {one_line(first_few(names, 3))}")
    if report.files:
        named = "class names and preprocessing" if report.label_names else "preprocessing"
        print(f"{named}: {', '.join(report.files)}")
    return 0
