"""`weft push`: upload a model to the Hugging Face hub."""

from __future__ import annotations

import argparse

from weft.cli.options import add_common, example, print_json

HELP = "upload a model to the Hugging Face hub, with a model card"

EXAMPLE = """
weft push runs/birds me/birds --license apache-2.0
weft predict hf-hub:me/birds photo.jpg

Log in with `hf auth login` or HF_TOKEN. Uploads the weights, config.json, README.md (the card), and unknown.safetensors
(the detector of unknown images, with features of training images) if the model has one; nothing else.
weft push runs/birds me/birds --print-card prints the card without uploading.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.add_argument("run", metavar="RUN", help="run directory (its best model is used) or model directory")
    parser.add_argument("repo", metavar="OWNER/NAME", help="repository on the hub; created if it does not exist")
    parser.add_argument(
        "--license", metavar="ID", help="licence of the weights, by its hub name, for example apache-2.0"
    )
    parser.add_argument("--private", action="store_true", help="create the repository as private")
    parser.add_argument("--print-card", action="store_true", help="print the model card, and exit")
    add_common(parser, "--force", "--json", force="its history is kept")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Upload a model, and print the address of its page."""
    from weft.runs.hub import model_card, push

    if args.print_card:
        print(model_card(args.run, args.repo, license=args.license), end="")
        return 0
    page = push(args.run, args.repo, license=args.license, private=args.private, force=args.force)
    if args.json:
        print_json({"page": page})
    else:
        print(page)
    return 0
