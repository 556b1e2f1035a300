"""`weft convert`: convert a third-party checkpoint to a model directory."""

from __future__ import annotations

import argparse

from weft.cli.options import add_common, example, note, print_json
from weft.cli.train import setting
from weft.text import one_line

HELP = "convert a third-party checkpoint to a weft model directory"

EXAMPLE = """
weft convert LeViT-256-13b5763e.pth models/levit_256

Known layouts: the released CeiT, CvT and LeViT (linear and convolutional), CeiT-pytorch, timm's and transformers'
LeViT, transformers' CvT, vit-pytorch's CvT and LeViT, and weft's own; .safetensors, .pth, .pt, .bin.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.usage = "weft convert IN OUT [options]"
    parser.add_argument("source", metavar="IN", help="checkpoint file")
    parser.add_argument("out", metavar="OUT", help="model directory to write")
    add_common(parser, "--model", model="default: found by the weights")
    parser.add_argument("--num-classes", type=int, metavar="N", help="width of the head (default: that of the weights)")
    add_common(parser, "--img-size", img_size="position embeddings are resized")
    parser.add_argument(
        "--head", choices=("keep", "drop"), default="keep", help="drop replaces the head by a new one (default: keep)"
    )
    parser.add_argument("--which", metavar="KEY", help="state dict of the file to use, for example model_ema")
    parser.add_argument(
        "--import-foreign",
        action="store_true",
        help="accept a pickle that names unknown classes; they become inert placeholders",
    )
    add_common(parser, "--set", set="here: a constructor argument of the network")
    add_common(parser, "--force", "--json")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Converts, and says what was made."""
    from weft.checkpoints.conversion import convert_checkpoint
    from weft.recipes import load_recipe

    values = [(f"model_args.{key}", value) for key, value in (setting(text) for text in args.set)]
    if args.img_size is not None:
        values.append(("img_size", args.img_size))
    checked = load_recipe(None, values)
    made = convert_checkpoint(
        args.source,
        args.out,
        model=args.model,
        num_classes=args.num_classes,
        img_size=checked.img_size,
        head=args.head,
        which=args.which,
        import_foreign=args.import_foreign,
        settings=checked.model_args,
        force=args.force,
    )
    if made.report.others:
        took, left = made.report.part, ", ".join(made.report.others)
        note(f"{args.source} holds several state dicts; took {took!r}, left {left}. Another: --which NAME.")
    if args.json:
        print_json(made.as_dict())
        return 0
    print(f"{made.model}, {made.report.tensors} tensors of {made.report.source}: {made.out}")
    for what, names in (("resized", made.report.resized), ("left out", made.report.dropped)):
        if names:
            print(f"{what}: {one_line(', '.join(names[:3]))}{f' and {len(names) - 3} more' if len(names) > 3 else ''}")
    return 0
