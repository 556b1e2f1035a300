"""`push`: upload a trained model to the Hugging Face hub, with a model card."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from huggingface_hub import CommitOperationAdd, EvalResult, HfApi, ModelCardData
from huggingface_hub.utils import validate_repo_id

from weft.checkpoints.config import CONFIG, WEIGHTS, read_config
from weft.checkpoints.hub_client import hub_errors
from weft.checkpoints.resolve import PREFIX, find_model
from weft.checkpoints.unknown import FILE as DETECTOR
from weft.errors import UsageError
from weft.models.contract import preprocessing
from weft.progress import loading
from weft.recipes import Recipe, dump, load_recipe
from weft.recipes.load import recorded_environment
from weft.report.intervals import held_out_text
from weft.runs.directory import EpochRow, best_of, read_metrics
from weft.text import fenced, first_few, markdown, printable

MAX_CLASSES = 100  # class names listed in a model card


def push(run: str | Path, repo: str, *, license: str | None = None, private: bool = False, force: bool = False) -> str:
    """Upload the weights and the model card of a run to the Hugging Face hub, in one commit.

    Args:
        run: a run directory (its best model) or a model directory.
        repo: repository as OWNER/NAME; created if it does not exist.
        license: license identifier of the hub for the weights, such as `apache-2.0`.
        private: create a private repository; an existing one keeps its visibility.
        force: replace the model of a repository that already has one; its commit history is kept.

    Returns:
        The URL of the repository.

    Raises:
        UsageError: the repository has a model and `force` is not set, or `run` is an export or a public model.
        CheckpointError: there is no model, or the hub refuses the upload.
    """
    folder, card = _own_model(run), model_card(run, repo, license=license)
    hub = HfApi()
    with hub_errors(repo):
        page = hub.create_repo(repo, private=private, exist_ok=True)
        if not force and hub.file_exists(repo, CONFIG):
            raise UsageError(
                f"The repository must not have a model yet; {repo} has one. Pass --force to replace it; its commit"
                " history is kept."
            )
        files = [
            CommitOperationAdd(name, folder / name) for name in (WEIGHTS, CONFIG, DETECTOR) if (folder / name).is_file()
        ]
        files.append(CommitOperationAdd("README.md", card.encode()))
        hub.create_commit(repo, files, commit_message="Upload a model trained with weft")
    return str(page)


def model_card(run: str | Path, repo: str, *, license: str | None = None) -> str:
    """Return the model card of a run: YAML metadata for the hub's search, and Markdown.

    It contains no paths of this machine: of the dataset only the last part of its path.

    Args:
        run, repo, license: as in `push`.

    Raises:
        UsageError: `run` is an export or a public model.
        CheckpointError: there is no model, or `repo` is not a valid repository name.
    """
    with hub_errors(repo):
        validate_repo_id(repo)
    folder, title = _own_model(run).resolve(), repo.rpartition("/")[2]
    config = read_config(folder)
    if "artefact" in config:
        raise UsageError(f"push uploads trained weights; {run} is an export. Push the run that it was exported from.")
    with loading():
        from weft.checkpoints import load_model_dir

    model, names = load_model_dir(folder)
    channels, height, width = preprocessing(model)["input_size"]
    num_params = sum(weight.numel() for weight in model.parameters())
    classes = f"{model.num_classes}: {first_few(names, MAX_CLASSES)}" if names else str(model.num_classes)
    rows = [
        ("network", f"`{config['architecture']}`, {num_params:,} parameters"),
        ("input", f"{height}x{width} pixels, {'gray' if channels == 1 else 'RGB'}"),
        ("classes", markdown(classes)),
    ]
    recipe_file, metrics = folder.parent / "recipe.yaml", folder.parent / "metrics.csv"
    data, training, best = "", "", None
    if folder.name in ("best", "last") and recipe_file.is_file():
        recipe, environment = load_recipe(recipe_file), recorded_environment(recipe_file)
        data = printable(Path(recipe.data.source or "").name)
        known = [environment.get(name) for name in ("train_images", "val_images", "val_groups")]
        train, val, groups = (count if isinstance(count, int) else 0 for count in known)
        counts = f": {train:,} images for training, {val:,} held out" if train and val else ""
        rows.append(("data", markdown(data) + counts))
        training = TRAINING.format(recipe=fenced(dump(_without_paths(recipe, data)), "yaml"))
        if folder.name == "best" and metrics.is_file():
            best = best_of(read_metrics(metrics), recipe.best)
        if best is not None:
            accuracies = {"top-1": best.val_top1} | ({"top-5": best.val_top5} if model.num_classes > 5 else {})
            for name, value in accuracies.items():
                text = held_out_text(value, val, groups or None, "images") if val else f"{value:.2f} %"
                rows.append((f"held-out {name}", text))
            note = "selected on the same images; its accuracy is slightly optimistic"
            rows.append(("best epoch", f"{best.epoch}, {note}"))
    metadata = ModelCardData(
        license=license,
        library_name="timm",
        tags=["weft", "image-classification"],
        pipeline_tag="image-classification",
        model_name=title,
        eval_results=None if best is None else [_eval_result(best, data or "unknown")],
    )
    table = "\n".join(f"| {name} | {text} |" for name, text in rows)
    return CARD.format(metadata=metadata.to_yaml(), title=title, table=table, name=f"{PREFIX}{repo}") + training


def _own_model(run: str | Path) -> Path:
    """Return the model directory to upload."""
    model_source = find_model(run)
    if isinstance(model_source, str):
        raise UsageError(
            f"push uploads weights that you trained; {run} is the name of a public model, whose weights are public"
            " already. Pass a run directory or a model directory."
        )
    return model_source


CARD = """---
{metadata}
---

# {title}

| | |
|---|---|
{table}

## Use

```sh
weft predict {name} image.jpg
weft serve {name}
```

```python
import timm
import weft.models.registry  # registers weft's networks with timm

model = timm.create_model("{name}", pretrained=True).eval()
```
"""

TRAINING = """
## Training

To repeat the training, save this recipe as FILE and run `weft train DATA --recipe FILE`:

{recipe}"""


def _without_paths(recipe: Recipe, data: str) -> Recipe:
    """Return a recipe in which paths of this machine are reduced to their last part."""

    def name_of(path: str | None) -> str | None:
        return path if path is None or path.startswith(PREFIX) else Path(path).name

    return dataclasses.replace(
        recipe,
        start_from=name_of(recipe.start_from),
        data=dataclasses.replace(recipe.data, source=data, unknown_images=name_of(recipe.data.unknown_images)),
        distill=dataclasses.replace(recipe.distill, teacher=name_of(recipe.distill.teacher)),
    )


def _eval_result(best: EpochRow, data: str) -> EvalResult:
    return EvalResult(
        task_type="image-classification",
        dataset_type=data,
        dataset_name=f"{data}, held out",
        metric_type="accuracy",
        metric_value=round(best.val_top1 / 100, 6),
    )
