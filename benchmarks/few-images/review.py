"""Measure `weft data review` on CIFAR-10 with wrong labels.

    python benchmarks/few-images/review.py features CIFAR10 random-0.npz --noise random --seed 0
    python benchmarks/few-images/review.py photos PHOTOS few9-random-0.npz --noise random --seed 0
    python benchmarks/few-images/review.py rank *.npz

`features` changes a tenth of the labels, trains a network on these labels (ceit_nano_32, recipe `cifar10`; or a small
ResNet), and writes its features; with --model, those of a public model. `photos` does the same with the public weights
that `weft data review` uses, for a folder with a folder per class. `rank` sorts the images by label quality and
measures the precision of the first n images, where n is the number of wrong labels. It writes review.csv next to this
file, and includes cleanlab if it is installed. With --corrected-by, `features` is the second round: the network is
trained on the labels that the first review proposes, and its features are used to review the changed labels again.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import resnet9

FILE = Path(__file__).parent / "review.csv"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIMILAR = {3: 5, 5: 3, 1: 9, 9: 1, 4: 7, 7: 4, 0: 8, 8: 0, 2: 0, 6: 3}  # each class is confused with this one
SHARE = 0.1  # of wrong labels


def wrong_labels(labels: np.ndarray, noise: str, seed: int, similar: dict[int, int]) -> np.ndarray:
    """Return labels of which a tenth is replaced by a random other class, or by the one class of `similar`."""
    rng, given, num_classes = np.random.default_rng(seed), labels.copy(), int(labels.max()) + 1
    wrong = rng.choice(len(labels), int(SHARE * len(labels)), replace=False)
    if noise == "random":
        given[wrong] = (labels[wrong] + rng.integers(1, num_classes, len(wrong))) % num_classes
    else:
        given[wrong] = [similar[label] for label in labels[wrong]]
    return given


def photos(args: argparse.Namespace) -> None:
    """Write the features of the photos by public weights, and both labels, to a file."""
    from weft.inference import embed

    embedding = embed(args.model, args.photos, quiet=True)
    names, true = np.unique([Path(path).parent.name for path in embedding.images], return_inverse=True)
    neighbours = {label: (label + 1) % len(names) for label in range(len(names))}
    given = wrong_labels(true, args.noise, args.seed, neighbours)
    np.savez_compressed(args.out, features=embedding.features[:, None], given=given, true=true)


def corrected(file: Path, given: np.ndarray) -> np.ndarray:
    """Return the labels after the changes that `weft data review` proposes with the features in a file."""
    from weft.train.label_errors import MIN_KEPT, find_label_errors

    saved = np.load(file)
    assert (saved["given"] == given).all(), f"{file} must have the same images and labels"
    result = find_label_errors(saved["features"][:, 0], given, len(CLASSES))
    return np.where(result.quality < MIN_KEPT, result.proposed, given)


def features(args: argparse.Namespace) -> None:
    """Write the features of images with wrong labels, and both labels, to a file."""
    import torch

    from weft.checkpoints.hub import create_model
    from weft.checkpoints.model_dir import load_model_dir
    from weft.data import open_data
    from weft.inference.features import read_features
    from weft.inference.measurement import evaluation_batches
    from weft.machine.runtime import Runtime
    from weft.train import train

    torch.set_num_threads(args.threads)
    paths = [path for name in CLASSES for path in sorted((args.cifar / "train" / name).iterdir())[: args.images // 10]]
    true = np.array([CLASSES.index(path.parent.name) for path in paths])
    given = trained = wrong_labels(true, args.noise, args.seed, SIMILAR)
    if args.corrected_by:
        trained = corrected(args.corrected_by, given)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.run or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        table = folder / "noisy.csv"
        with table.open("w", newline="") as file:
            rows = [(path.absolute(), CLASSES[label]) for path, label in zip(paths, trained, strict=True)]
            csv.writer(file).writerows([("path", "label"), *rows])
        if args.model:
            network = create_model(args.model, pretrained=True)
        else:
            torch.manual_seed(args.seed)
            own: dict[str, Any] = {"model": resnet9.ResNet9()} if args.network == "resnet9" else {}
            if any((folder / "run" / "state").glob("*.json")):
                run = train(resume=folder / "run", **own)
            else:
                settings = {"epochs": args.epochs, "seed": args.seed, "data.val_fraction": 0.02}
                if own:
                    settings |= resnet9.SETTINGS | {"img_size": 32}
                run = train(table, recipe="cifar10", settings=settings, out=folder / "run", force=True, **own)
            print(f"accuracy on held-out noisy labels: {run.top1:.2f}")
            network, _ = load_model_dir(run.out / "best")
        splits = open_data(table)
        parts, keys = [], []
        for source in (splits.train, splits.val):
            batches = evaluation_batches(source, network, 64, 0)
            parts.append(read_features(network, batches, Runtime.of("cpu"))[0][0])
            keys += source.keys
    index = {str(path.absolute()): i for i, path in enumerate(paths)}
    views = np.empty((len(paths), *parts[0].shape[1:]), np.float32)
    views[[index[key] for key in keys]] = np.concatenate(parts)
    np.savez_compressed(args.out, features=views, given=given, true=true)


def rank(args: argparse.Namespace) -> None:
    """Write the precision of each ranking for as many images as have wrong labels; keep rows of other files."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from benchmarks.common.records import read_csv, write_csv

    from weft.train.label_errors import find_label_errors

    stems = {path.stem for path in args.files}
    rows = [row for row in (read_csv(FILE) if FILE.is_file() else []) if row["file"] not in stems]
    for path in args.files:
        saved = np.load(path)
        given, true = saved["given"].astype(int), saved["true"].astype(int)
        is_wrong, start = given != true, time.perf_counter()
        result = find_label_errors(saved["features"][:, 0], given, int(true.max()) + 1)
        seconds = time.perf_counter() - start
        rankings = {"weft": np.lexsort((result.quality, ~result.is_error))}
        try:
            import cleanlab
            from cleanlab.filter import find_label_issues
            from cleanlab.rank import get_label_quality_scores
        except ImportError:
            print("cleanlab is not installed: pip install cleanlab")
        else:
            for method in ("self_confidence", "normalized_margin"):
                scores = get_label_quality_scores(given, result.probabilities, method=method)
                is_issue = find_label_issues(given, result.probabilities)
                rankings[f"cleanlab {cleanlab.__version__}, {method}"] = np.argsort(scores, kind="stable")
                rankings[f"cleanlab {cleanlab.__version__}, issues by {method}"] = np.lexsort((scores, ~is_issue))
        for name, order in rankings.items():
            first = order[: is_wrong.sum()]
            rows.append(
                {
                    "file": path.stem,
                    "images": len(given),
                    "wrong": int(is_wrong.sum()),
                    "ranking": name,
                    "precision_at_wrong": f"{is_wrong[first].mean():.4f}",
                    "proposals_right": f"{(result.proposed[first] == true[first])[is_wrong[first]].mean():.4f}",
                    "errors_counted": int(result.is_error.sum()) if name == "weft" else "",
                    "precision_of_errors": f"{is_wrong[result.is_error].mean():.4f}" if name == "weft" else "",
                    "recall_of_errors": f"{result.is_error[is_wrong].mean():.4f}" if name == "weft" else "",
                    "probabilities_right": f"{(result.probabilities.argmax(axis=1) == true).mean():.4f}",
                    "seconds": f"{seconds:.1f}" if name == "weft" else "",
                }
            )
            print(rows[-1], flush=True)
    write_csv(FILE, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    actions = parser.add_subparsers(required=True)
    make = actions.add_parser("features")
    make.add_argument("cifar", type=Path)
    make.add_argument("out", type=Path)
    make.add_argument("--noise", choices=("random", "similar"), default="random")
    make.add_argument("--seed", type=int, default=0)
    make.add_argument("--images", type=int, default=20_000)
    make.add_argument("--epochs", type=int, default=4)
    make.add_argument("--threads", type=int, default=2)
    make.add_argument("--model", help="a public model, which is not trained")
    make.add_argument("--network", choices=("ceit_nano_32", "resnet9"), default="ceit_nano_32", help="to be trained")
    make.add_argument(
        "--corrected-by",
        type=Path,
        metavar="NPZ",
        help="train on the labels that a review with these features proposes, instead of the changed labels",
    )
    make.add_argument("--run", type=Path, help="folder that keeps the training run, and resumes it")
    make.set_defaults(action=features)
    public = actions.add_parser("photos")
    public.add_argument("photos", type=Path)
    public.add_argument("out", type=Path)
    public.add_argument("--noise", choices=("random", "similar"), default="random")
    public.add_argument("--seed", type=int, default=0)
    public.add_argument("--model", default="tf_efficientnet_lite0")
    public.set_defaults(action=photos)
    order = actions.add_parser("rank")
    order.add_argument("files", type=Path, nargs="+")
    order.set_defaults(action=rank)
    args = parser.parse_args()
    args.action(args)


if __name__ == "__main__":
    main()
