"""`weft push`: a model to the Hugging Face hub."""

from __future__ import annotations

import argparse

from weft.cli.options import add_common, example, print_json

HELP = "put a model on the Hugging Face hub, with a card of what it is and how good"

EXAMPLE = """
weft push runs/birds me/birds --license apache-2.0
weft predict hf-hub:me/birds picture.jpg

The hub knows you by `hf auth login` or HF_TOKEN. Weights, config.json and README.md (the card) are sent, nothing else;
weft push runs/birds me/birds --print-card shows the card and sends nothing.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("run", metavar="RUN", help="a run directory (its best model is taken) or a model directory")
    parser.add_argument("repo", metavar="OWNER/NAME", help="where on the hub; made if it is not there")
    parser.add_argument("--license", metavar="ID", help="of the weights, in the hub's words, such as apache-2.0")
    parser.add_argument("--private", action="store_true", help="only its owner sees a repository that is made")
    parser.add_argument("--print-card", action="store_true", help="print the card, and do nothing")
    add_common(parser, "--force", "--json", force="the model that is there; its history is kept")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Pushes, and says where."""
    from weft.train import push
    from weft.train.sharing import model_card

    if args.print_card:
        print(model_card(args.run, args.repo, license=args.license), end="")
        return 0
    page = push(args.run, args.repo, license=args.license, private=args.private, force=args.force)
    if args.json:
        print_json({"page": page})
    else:
        print(page)
    return 0
