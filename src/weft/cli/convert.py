"""`weft convert`: convert a third-party checkpoint to a model directory."""

from __future__ import annotations

import argparse
from pathlib import Path

from weft.cli.options import add_common, example, print_json
from weft.cli.train import setting
from weft.text import first_few, one_line

HELP = "convert a third-party checkpoint to a weft model directory"

EXAMPLE = """
weft convert LeViT-256-13b5763e.pth models/levit_256
weft convert epoch=9.ckpt models/cats --model resnet50 --prefix net

Supported layouts: the released CeiT, CvT and LeViT (linear and convolutional), CeiT-pytorch, timm's and transformers'
LeViT, transformers' CvT, vit-pytorch's CvT and LeViT, and weft's own; .safetensors, .pth, .pt, .bin.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.usage = "weft convert IN OUT [options]"
    parser.add_argument("source", metavar="IN", help="checkpoint file, or folder of transformers or timm")
    parser.add_argument("out", metavar="OUT", help="model directory to write")
    add_common(parser, "--model", model="default: the model that matches the weights")
    parser.add_argument("--num-classes", type=int, metavar="N", help="number of classes (default: that of the weights)")
    add_common(parser, "--img-size", img_size="position embeddings are resized")
    parser.add_argument(
        "--head", choices=("keep", "drop"), default="keep", help="drop: replace the head by a new one (default: keep)"
    )
    parser.add_argument("--state-dict", metavar="KEY", help="state dict of the file to use, for example model_ema")
    parser.add_argument(
        "--import-foreign",
        action="store_true",
        help="accept a pickle that names unknown classes; they become inert placeholders",
    )
    parser.add_argument(
        "--prefix", metavar="NAME", help="beginning of the keys to load, such as net (default: the one that fits)"
    )
    add_common(parser, "--set", set="here: constructor arguments of the network")
    add_common(parser, "--force", "--json", "--quiet")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Convert a checkpoint, and print the model."""
    from weft.checkpoints.conversion import convert_checkpoint
    from weft.progress import Work, say
    from weft.recipes import load_recipe

    values = [(f"model_args.{key}", value) for key, value in (setting(text) for text in args.set)]
    if args.img_size is not None:
        values.append(("img_size", args.img_size))
    recipe, out = load_recipe(None, values), Path(args.out)
    with Work("converting"):
        report = convert_checkpoint(
            args.source,
            out,
            model=args.model,
            num_classes=args.num_classes,
            img_size=recipe.img_size,
            head=args.head,
            state_dict=args.state_dict,
            import_foreign=args.import_foreign,
            prefix=args.prefix,
            settings=recipe.model_args,
            force=args.force,
        )
    if report.others:
        part, others = report.part, ", ".join(report.others)
        say(
            f"{args.source} has several state dicts; used {part!r}, not {others}. Choose another with --state-dict KEY."
        )
    if args.json:
        print_json({"out": str(out), **{key: value for key, value in vars(report).items() if key != "label_names"}})
        return 0
    print(f"{report.model}, {report.tensors} tensors of {report.source}: {out}")
    for action, names in (("resized", report.resized), ("not loaded", report.dropped)):
        if names:
            print(f"{action}: {one_line(first_few(names, 3))}")
    if report.files:
        named = "class names and preprocessing" if report.label_names else "preprocessing"
        print(f"{named}: {', '.join(report.files)}")
    return 0
