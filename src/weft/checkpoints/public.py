"""From the name of a model to the model: run and model directories, repositories on the hub, and public models."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from weft.checkpoints.config import model_dir
from weft.checkpoints.finding import check_model, is_path, without_name
from weft.errors import CheckpointError
from weft.lazy import LazyModule
from weft.models.families import VARIANTS
from weft.models.imagenet import imagenet_classes
from weft.progress import say

timm: Any = LazyModule("timm")


class PublicModel(NamedTuple):
    """A model with public weights, by the name that `create_model` takes."""

    name: str

    def load(self) -> tuple[Any, list[str]]:
        """Load the public weights, and the preprocessing and the ImageNet classes that they were trained with.

        Returns:
            The model in evaluation mode, and its class names.

        Raises:
            CheckpointError: there are no public weights, they have no classifier, or they cannot be downloaded.
        """
        from weft.checkpoints.hub import create_model  # imports torch

        if self.name not in VARIANTS:
            self._check_classifier()
        model: Any = create_model(self.name, pretrained=True)
        model.pretrained_cfg = model.default_cfg = {
            key: value for key, value in model.pretrained_cfg.items() if key != "state_dict"
        }
        classes = imagenet_classes(model.num_classes)
        assert classes is not None, self.name  # of the variants, and checked above for the others
        return model.eval(), classes.names

    def _check_classifier(self) -> None:
        """Check that timm has public weights of this name, with ImageNet classes."""
        cfg = timm.get_pretrained_cfg(self.name)
        with_classes = _with_classes(self.name.partition(".")[0])
        instead = f" Tags with classes: {', '.join(with_classes)}." if with_classes else ""
        if cfg is None or not cfg.has_weights:
            raise CheckpointError(
                f"A model name needs public weights; {self.name} has none.{instead} Or train it: weft train DATA"
                f" --model {self.name}"
            )
        if imagenet_classes(cfg.num_classes) is None:
            outputs = (
                "no classifier: they compute features"
                if cfg.num_classes == 0
                else f"{cfg.num_classes} outputs without known class names: features, or classes of another dataset"
            )
            raise CheckpointError(
                f"A model name needs public weights that classify into ImageNet's classes; those of {self.name} have"
                f" {outputs}.{instead} To classify your own images, train it: weft train DATA --model {self.name}"
            )


def find_model(run: str | Path, *, quiet: bool = False) -> Path | PublicModel:
    """Return the model directory, export or public model that a name means; the one rule of all verbs.

    A name that exists on this disk, or has a path separator, is a directory; any other is that of a public model.

    Args:
        run: a run directory (its best model), a model directory, an export, `hf-hub:OWNER/NAME`, which is downloaded,
            or a name that `weft.create_model` takes, with or without a tag.
        quiet: print no notes.

    Raises:
        CheckpointError: it is none of these, or a file is missing.
    """
    check_model(run)
    if is_path(run):
        return model_dir(run)
    public = _public(str(run))
    if public is None:
        raise CheckpointError(without_name(str(run)))
    return public


def load_model(run: str | Path, *, quiet: bool = False) -> tuple[Any, list[str] | None]:
    """Load the model that a name means; of exports, `weft.deploy.open_model`.

    Args:
        run, quiet: as in `find_model`.

    Returns:
        The model in evaluation mode, and its class names or None if it has none.

    Raises:
        CheckpointError: it is not a model, cannot be read, or is an export.
    """
    from weft.checkpoints.model_dir import load_model_dir  # imports torch

    model_source = find_model(run, quiet=quiet)
    if isinstance(model_source, PublicModel):
        return load_public(model_source, quiet=quiet)
    return load_model_dir(model_source)


def load_public(public: PublicModel, *, quiet: bool = False) -> tuple[Any, list[str]]:
    """Load a public model as `PublicModel.load` does, and print where its weights come from."""
    from weft.checkpoints.hub import source_of  # imports torch

    model, names = public.load()
    if not quiet:
        say(f"Public weights {source_of(public.name)}.")
    return model, names


def _public(name: str) -> PublicModel | None:
    """Return the public model of a name; None: no model has this name."""
    base, _, tag = name.partition(".")
    if base in VARIANTS:
        weights = VARIANTS[base].weights
        if not tag or (weights is not None and weights.repo.partition(".")[2] == tag):
            return PublicModel(base)  # weft's network, also under the tag of its weights
    is_known = timm.is_model(base) and (not tag or name in timm.list_pretrained(f"{base}.*"))
    return PublicModel(name) if is_known else None


def _with_classes(base: str) -> list[str]:
    """Return the first tagged names of a network whose weights have ImageNet classes."""
    names = timm.list_pretrained(f"{base}.*")
    return [name for name in names if (cfg := timm.get_pretrained_cfg(name)) and imagenet_classes(cfg.num_classes)][:3]
