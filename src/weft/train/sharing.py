"""`push`: upload a trained model to the Hugging Face hub, with a model card."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import CommitOperationAdd, EvalResult, HfApi, ModelCardData
from huggingface_hub.utils import validate_repo_id

from weft.checkpoints import load_model_dir
from weft.checkpoints.hub_dir import PREFIX, told
from weft.checkpoints.model_dir import CONFIG, WEIGHTS, model_dir, read_config
from weft.errors import UsageError
from weft.recipes import Recipe, dump, load_recipe
from weft.recipes.load import recorded_environment
from weft.text import fenced, markdown, printable
from weft.train.build import preprocessing
from weft.train.rundir import EpochRow, read_metrics

CLASSES_NAMED = 100


def push(run: str | Path, repo: str, *, license: str | None = None, private: bool = False, force: bool = False) -> str:
    """Puts the weights of a model and its card on the hub, in one commit. What was there stays in the history.

    Args:
        run: a run directory, whose best model is taken, or a model directory.
        repo: OWNER/NAME; made if it is not there.
        license: of the weights, in the hub's words, such as `apache-2.0`.
        private: for a repository that is made: only its owner sees it.
        force: also where the repository has a model already.

    Returns:
        The address of its page.

    Raises:
        UsageError: the repository has a model, or the run is an export.
        CheckpointError: no model there, or the hub does not take it.
    """
    folder, card = model_dir(run), model_card(run, repo, license=license)
    hub = HfApi()
    with told(repo):
        page = hub.create_repo(repo, private=private, exist_ok=True)
        if not force and hub.file_exists(repo, CONFIG):
            raise UsageError(f"{repo} has a model already. --force puts this one in its place; the history keeps both.")
        files = [CommitOperationAdd(name, folder / name) for name in (WEIGHTS, CONFIG)]
        files.append(CommitOperationAdd("README.md", card.encode()))
        hub.create_commit(repo, files, commit_message="A model, trained with weft")
    return str(page)


def model_card(run: str | Path, repo: str, *, license: str | None = None) -> str:
    """What the page on the hub says of a model: Markdown, and before it what the hub's search reads.

    Paths of this machine are not in it: of the data there is the last part of its name.

    Raises:
        UsageError: the run is an export.
        CheckpointError: no model there, or a name that the hub does not take.
    """
    with told(repo):
        validate_repo_id(repo)
    folder, title = model_dir(run).resolve(), repo.rpartition("/")[2]
    config = read_config(folder)
    if "artefact" in config:
        raise UsageError(f"The hub gets weights to go on with; {run} is an export. Push the run that it was made of.")
    model, names = load_model_dir(folder)
    channels, height, width = preprocessing(model)["input_size"]
    size = sum(weight.numel() for weight in model.parameters())
    facts = [
        ("network", f"`{config['architecture']}`, {size:,} parameters"),
        ("input", f"{height}x{width} pixels, {'gray' if channels == 1 else 'RGB'}"),
        ("classes", markdown(_classes(names, model.num_classes))),
    ]
    made, data, training, best = folder.parent, "", "", None
    if folder.name in ("best", "last") and (made / "recipe.yaml").is_file():
        recipe = load_recipe(made / "recipe.yaml")
        data = printable(Path(recipe.data.source or "").name)
        facts.append(("data", markdown(data) + _counts(made / "recipe.yaml")))
        training = TRAINING.format(recipe=fenced(dump(_without_places(recipe, data)), "yaml"))
    if folder.name == "best" and (made / "metrics.csv").is_file():
        best = best_of(read_metrics(made / "metrics.csv"))
    if best is not None:
        scores = f"{best.val_top1:.2f} %, {best.val_top5:.2f} %"
        chosen = f"of epoch {best.epoch}, chosen by the same images, so a little flattering"
        facts.append(("held-out top-1, top-5", f"{scores} {chosen}"))
    head = ModelCardData(
        license=license,
        library_name="timm",
        tags=["weft", "image-classification"],
        pipeline_tag="image-classification",
        model_name=title,
        eval_results=None if best is None else [_result(best, data or "unknown")],
    )
    table = "\n".join(f"| {name} | {text} |" for name, text in facts)
    return CARD.format(head=head.to_yaml(), title=title, table=table, name=f"{PREFIX}{repo}") + training


CARD = """---
{head}
---

# {title}

| | |
|---|---|
{table}

## Use

```sh
weft predict {name} picture.jpg
weft serve {name}
```

```python
import timm
import weft.models.registry  # makes weft's networks known to timm

model = timm.create_model("{name}", pretrained=True).eval()
```
"""

TRAINING = """
## Training

`weft train DATA --recipe FILE`, of which FILE is:

{recipe}"""


def _without_places(recipe: Recipe, data: str) -> Recipe:
    """A recipe that does not tell where on this machine something lies."""

    def name_of(place: str | None) -> str | None:
        return place if place is None or place.startswith(PREFIX) else Path(place).name

    return dataclasses.replace(
        recipe,
        start_from=name_of(recipe.start_from),
        data=dataclasses.replace(recipe.data, source=data),
        distill=dataclasses.replace(recipe.distill, teacher=name_of(recipe.distill.teacher)),
    )


def best_of(history: Sequence[EpochRow]) -> EpochRow | None:
    """The epoch whose model a run keeps as its best; None before the first that was measured."""
    measured = [row for row in history if not math.isnan(row.val_top1)]
    return max(measured, key=lambda row: (row.val_top1, -row.val_loss, -row.epoch), default=None)


def _result(best: EpochRow, data: str) -> EvalResult:
    return EvalResult(
        task_type="image-classification",
        dataset_type=data,
        dataset_name=f"{data}, held out",
        metric_type="accuracy",
        metric_value=round(best.val_top1 / 100, 6),
    )


def _counts(recipe: Path) -> str:
    """How many images, by the record in a run's recipe, which `load_recipe` takes but leaves aside."""
    noted = recorded_environment(recipe)
    train, val = (noted.get(name) for name in ("train_images", "val_images"))
    known = isinstance(train, int) and isinstance(val, int)
    return f": {train:,} images to learn from, {val:,} held out" if known else ""


def _classes(names: list[str] | None, count: int) -> str:
    if not names:
        return str(count)
    more = f" and {len(names) - CLASSES_NAMED} more" if len(names) > CLASSES_NAMED else ""
    return f"{count}: {', '.join(names[:CLASSES_NAMED])}{more}"
