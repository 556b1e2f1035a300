"""The side of an image depends on the seed and its own name: files that are added, in any source, move no other.

One file may move where the number of held-out images of its class grows by one.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from weft.data import SplitPlan, open_data

CLASSES = ("ant", "bee", "cow")
Name = tuple[str, str]  # class and file


def content(name: Name) -> bytes:
    """A PNG file, different for every name."""
    seed = [CLASSES.index(name[0]), *name[1].encode()]
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def folder(root: Path, names: Sequence[Name]) -> str:
    for label, file in names:
        (root / label).mkdir(parents=True, exist_ok=True)
        (root / label / file).write_bytes(content((label, file)))
    return str(root)


def table(root: Path, names: Sequence[Name]) -> str:
    folder(root / "images", names)
    lines = ["image,label", *(f"images/{label}/{file},{label}" for label, file in names)]
    (root / "table.csv").write_text("\n".join(lines) + "\n")
    return str(root / "table.csv")


def parquet(root: Path, names: Sequence[Name]) -> str:
    import pyarrow
    import pyarrow.parquet

    folder(root / "images", names)
    columns = {"image": [f"images/{label}/{file}" for label, file in names], "label": [label for label, _ in names]}
    pyarrow.parquet.write_table(pyarrow.table(columns), root / "table.parquet")
    return str(root / "table.parquet")


def shard(root: Path, names: Sequence[Name]) -> str:
    root.mkdir(parents=True)
    with tarfile.open(root / "images.tar", "w") as archive:
        for label, file in names:
            info = tarfile.TarInfo(f"{label}/{file}")
            info.size = len(content((label, file)))
            archive.addfile(info, io.BytesIO(content((label, file))))
    return str(root / "images.tar")


SOURCES = [folder, table, parquet, shard]


def sides(data: str, seed: int, **options: object) -> dict[Name, str]:
    """Side of every image by its class and file."""
    splits = open_data(data, SplitPlan(seed=seed, **options))
    found = {}
    for side in ("train", "val"):
        source = getattr(splits, side)
        for key, label in zip(source.keys, source.labels, strict=True):
            name = source.classes[label], key.rpartition("/")[2]
            assert name not in found
            found[name] = side
    return found


NAMES = [(label, f"{label}{number:02}.png") for number in range(15) for label in CLASSES]
ADDED = ("bee", "added.png")


@pytest.mark.parametrize("options", [{}, {"folds": 5, "fold": 2}], ids=["split", "fold"])
@pytest.mark.parametrize("source", SOURCES)
def test_an_added_image_moves_at_most_one_of_its_class(
    source: Callable[[Path, Sequence[Name]], str], options: dict[str, object], tmp_path: Path
) -> None:
    before = sides(source(tmp_path / "before", NAMES), 3, **options)
    after = sides(source(tmp_path / "after", [ADDED, *reversed(NAMES)]), 3, **options)
    assert before.keys() == set(NAMES)
    assert after.keys() == {*NAMES, ADDED}
    moved = [name for name in NAMES if before[name] != after[name]]
    assert {label for label, _ in moved} <= {ADDED[0]}
    if not options:  # ranks of a class are dealt to five folds in turn: the next in rank may follow into another fold
        assert len(moved) <= 1


def test_both_forms_of_a_table_have_the_same_sides(tmp_path: Path) -> None:
    found = [sides(source(tmp_path / source.__name__, NAMES), 1) for source in (table, parquet)]
    assert found[0] == found[1]


def test_another_seed_is_another_split(tmp_path: Path) -> None:
    data = folder(tmp_path / "data", NAMES)
    splits = [sides(data, seed) for seed in (0, 1)]
    assert splits[0] != splits[1]
    for split in splits:
        for label in CLASSES:
            assert [split[name] for name in NAMES if name[0] == label].count("val") == 3
