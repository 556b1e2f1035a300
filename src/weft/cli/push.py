"""`weft push`: upload a model to the Hugging Face hub."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from weft.cli.options import Output, Plugins, print_json


def push(
    run: str,
    repo: str,
    /,
    *,
    license: Annotated[str | None, Parameter(metavar="ID")] = None,
    private: bool = False,
    print_card: bool = False,
    plugins: Plugins = Plugins(),
    output: Output = Output(),
) -> int:
    """Upload a model to the Hugging Face hub, with a model card.

    Args:
        run: run directory (its best model is used) or model directory
        repo: repository OWNER/NAME on the hub; created if it does not exist (with --force, its history is kept)
        license: licence of the weights, by its hub name, for example apache-2.0
        private: create the repository as private
        print_card: print the model card, and exit

    Example:
        weft push runs/birds me/birds --license apache-2.0
        weft predict hf-hub:me/birds photo.jpg

        Log in with `hf auth login` or HF_TOKEN. Uploads the weights, config.json, README.md (the card), and
        unknown.safetensors (the detector of unknown images, with features of training images) if the model has one;
        nothing else.
        weft push runs/birds me/birds --print-card prints the card without uploading.
    """
    from weft.runs import hub as library

    if print_card:
        print(library.model_card(run, repo, license=license), end="")
        return 0
    page = library.push(run, repo, license=license, private=private, force=output.force)
    if output.json:
        print_json({"page": page})
    else:
        print(page)
    return 0
