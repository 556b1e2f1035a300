"""Training pictures before the training: those that the network is then fed, with what it is taught about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from tests.train.tiny import recipe_of
from weft.cli import main
from weft.data import Splits, open_data, open_image
from weft.errors import StorageError, UsageError
from weft.train import plan, preview
from weft.train.augment_preview import EPOCHS, IMAGES, augmented_figure
from weft.train.plan import build_model, training_images

pytestmark = pytest.mark.figures


def drawn(photos: Path, **settings: Any) -> tuple[Figure, Splits, Any, Any]:
    """The figure, and what it was made from."""
    recipe = recipe_of(model="levit_nano_32", batch_size=8, **settings)
    splits = open_data(photos)
    model = build_model(recipe, len(splits.classes))
    return augmented_figure(recipe, splits, model), splits, training_images(recipe, splits.train, model), model


def test_it_shows_what_training_draws(photos: Path) -> None:
    figure, splits, images, model = drawn(photos, augment__erase_prob=0.5)
    axes = np.array(figure.axes).reshape(IMAGES, EPOCHS + 1)
    mean, std = (np.array(model.pretrained_cfg[key]) for key in ("mean", "std"))
    names = [row[0].get_xlabel() for row in axes]
    assert sorted(names) == sorted(2 * splits.classes)
    everything = [np.asarray(open_image(splits.train.read(place).data)) for place in range(len(splits.train))]
    for row, name in zip(axes, names, strict=True):
        as_it_is = np.asarray(row[0].images[0].get_array())
        place = next(place for place, pixels in enumerate(everything) if (pixels == as_it_is).all())  # no two are equal
        assert splits.classes[splits.train.labels[place]] == name
        for epoch in range(EPOCHS):
            expected = images[epoch, place][0].permute(1, 2, 0).numpy() * std + mean
            seen = np.asarray(row[epoch + 1].images[0].get_array())
            np.testing.assert_allclose(seen, np.clip(expected, 0, 1), atol=1e-5)  # float32 here, float64 there
            assert row[epoch + 1].get_xlabel() == ""


def test_mixed_pictures_say_what_they_are_taught_as(photos: Path) -> None:
    figure, splits, *_ = drawn(photos, augment__mixup=0.8, augment__cutmix=1.0)
    axes = np.array(figure.axes).reshape(IMAGES, EPOCHS + 1)
    for row, partner in zip(axes, axes[::-1], strict=True):
        for left, right in zip(row[1:], partner[1:], strict=True):
            shares = dict(line.rsplit(" ", 2)[:2] for line in left.get_xlabel().splitlines())
            assert set(shares) <= set(splits.classes)
            assert 99 <= sum(map(int, shares.values())) <= 101
            if len(shares) == 2:  # its partner holds the rest of it
                assert sorted(shares) == sorted(line.rsplit(" ", 2)[0] for line in right.get_xlabel().splitlines())
    assert any("\n" in cell.get_xlabel() for cell in axes.ravel())


def test_grey_networks_are_shown_grey(photos: Path) -> None:
    figure, *_ = drawn(photos, model_args__in_chans=1)
    image = np.asarray(figure.axes[1].images[0].get_array())
    assert image.shape == (32, 32, 3)
    assert (image[..., 0] == image[..., 2]).all()


def test_the_command_line_writes_a_new_file(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "seen.png"
    arguments = ["train", str(photos), "--model", "levit_nano_32", "--quiet", "--preview", str(out)]
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"{out}\n"
    with Image.open(out) as image:
        assert image.width > 1000
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["new", "seen.png"]
    assert main(arguments) == 2
    assert f"--preview must name a new file; {out} exists already." in capsys.readouterr().err
    assert main([*arguments, "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"preview": str(out)}


def test_a_file_that_cannot_be_written_is_refused_before_the_data_is_read(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "open_splits", lambda *args: pytest.fail("data was opened"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"must name an image file, such as preview\.png; got seen\.txt\."):
        preview(photos, out=tmp_path / "seen.txt")
    with pytest.raises(UsageError, match=r"got none\. Name a folder or `digits`: weft train DATA --preview FILE\."):
        preview(out=tmp_path / "seen.png")
    with pytest.raises(StorageError, match="file must be writable"):
        preview(photos, out=tmp_path / "file" / "seen.png")
