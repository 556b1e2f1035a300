"""Training images are those of timm and torchvision, number for number; only the resizing rounds otherwise."""

from __future__ import annotations

import numpy as np
import pytest
import timm.data
import torch
from PIL import Image
from torchvision import transforms as tv

from tests.data.fuzz import mutant
from tests.data.pictures import encoded, photo
from tests.data.zoo import GOOD
from weft.data import BadImage, ImageDataset, eval_transform, make_loader, open_image, train_transform
from weft.data.colour import Picture
from weft.data.crops import batch_of, normalized
from weft.data.decode import open_picture
from weft.data.formats import sniff
from weft.data.seeding import seeded_rng
from weft.data.source import KeyedSource
from weft.data.transforms import _rand_augment

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IMAGE = Image.fromarray(photo(90, 120)).resize((120, 90), Image.Resampling.BICUBIC)
POLICY = "rand-m9-mstd0.5-inc1"


def of_libraries(size, crop, color_jitter=0.0, policy=None, erase_prob=0.0):
    """The same steps in the classes of timm and torchvision."""
    whole = {"size": (size, size), "scale": (0.3, 0.9), "ratio": (0.75, 4 / 3), "interpolation": "bicubic"}
    steps = {
        "resized": [timm.data.transforms.RandomResizedCropAndInterpolation(**whole)],
        "cut": [tv.Resize((size + 32, size + 32), tv.InterpolationMode.BICUBIC), tv.RandomCrop(size)],
        "shift": [
            tv.Resize((size, size), tv.InterpolationMode.BICUBIC),
            tv.Pad(size // 8, padding_mode="edge"),
            tv.RandomCrop(size),
        ],
    }[crop]
    steps.append(tv.RandomHorizontalFlip())
    steps += [tv.ColorJitter(color_jitter, color_jitter, color_jitter)] if color_jitter else []
    steps += [_rand_augment(policy, (size, size), MEAN, "bicubic")] if policy else []
    steps += [tv.ToTensor(), tv.Normalize(MEAN, STD)]
    if erase_prob:
        steps.append(timm.data.random_erasing.RandomErasing(erase_prob, mode="pixel", device="cpu"))
    return tv.Compose(steps)


@pytest.fixture
def resized_by_pillow(monkeypatch):
    def resized(pixels, size, mode):
        image = Image.fromarray(pixels)
        return np.asarray(image.resize(size[::-1], Image.Resampling[mode.upper()]))

    monkeypatch.setattr("weft.data.transforms._resized", resized)


@pytest.mark.usefixtures("resized_by_pillow")
@pytest.mark.parametrize("crop", ["resized", "shift", "cut"])
@pytest.mark.parametrize(
    "settings", [{}, {"color_jitter": 0.9}, {"color_jitter": 0.3, "policy": POLICY, "erase_prob": 0.6}], ids=str
)
def test_it_draws_what_the_libraries_draw(crop, settings):
    theirs = of_libraries(32, crop, **settings)
    renamed = {"rand_augment" if key == "policy" else key: value for key, value in settings.items()}
    own = train_transform(32, MEAN, STD, crop=crop, scale=(0.3, 0.9), **renamed)
    for seed in range(40):
        with seeded_rng(seed):
            expected = theirs(IMAGE)
        with seeded_rng(seed):
            torch.testing.assert_close(own(IMAGE), expected, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_resizing_rounds_otherwise_than_pillow_and_no_more(mode):
    own = train_transform(64, (0, 0, 0), (1, 1, 1), mode, hflip=False, scale=(0.3, 0.9))
    differences = []
    for seed in range(30):
        with seeded_rng(seed):
            pixels = own(IMAGE)
        with seeded_rng(seed):
            box = own.window._box(IMAGE.height, IMAGE.width)
        region = IMAGE.crop((box[1], box[0], box[1] + box[3], box[0] + box[2]))
        expected = tv.functional.to_tensor(region.resize((64, 64), Image.Resampling[mode.upper()]))
        differences.append(255 * (pixels - expected).abs())
    difference = torch.stack(differences)
    assert difference.mean() < 0.1
    assert (difference < 1.5).float().mean() > 0.998


@pytest.mark.parametrize("at_least", [None, 8])
def test_a_picture_has_the_pixels_of_open_image_or_the_same_error(at_least):
    files = [animal.content for animal in GOOD if isinstance(animal.content, bytes)]
    files += [data for data in map(mutant, range(400)) if sniff(data[:32]) == "JPEG"]

    def outcome(opened, data):
        try:
            return opened(data, at_least=at_least, max_pixels=10**6)
        except BadImage as error:
            return error.reason

    compared = 0
    for data in files:
        picture, image = outcome(open_picture, data), outcome(open_image, data)
        if isinstance(image, str):
            assert picture == image
        else:
            np.testing.assert_array_equal(picture.whole(), np.asarray(image))
            compared += 1
    assert compared > 50


def test_a_region_is_a_part_of_the_whole_in_all_orientations_and_profiles():
    for animal in GOOD:
        if isinstance(animal.content, bytes) and sniff(animal.content[:32]) == "JPEG":
            picture = open_picture(animal.content)
            np.testing.assert_array_equal(picture.region(2, 3, 9, 7), picture.whole()[2:11, 3:10], animal.name)


def test_a_batch_is_its_images_one_by_one():
    varied = train_transform(24, MEAN, STD, erase_prob=0.5, crop="resized")
    picture, crops = Picture(np.asarray(IMAGE)), []
    for seed in range(12):
        with seeded_rng(seed):
            crops.append(varied.draw(picture))
    assert 2 < sum(crop.patch is not None for crop in crops) < 10
    together = normalized(batch_of(crops, [0] * 12), MEAN, STD)
    alone = [normalized(batch_of([crop], [0]), MEAN, STD)[0] for crop in crops]
    torch.testing.assert_close(together, torch.stack(alone), rtol=0, atol=0)


def test_a_loader_normalises_on_its_device():
    source = KeyedSource(lambda key: encoded(photo(24, 24), "JPEG"), ["a"], ["1", "2"], [0, 0])
    dataset = ImageDataset(source, train_transform(24, MEAN, STD, erase_prob=1.0))
    (images, labels) = next(iter(make_loader(dataset, 2, shuffle=False, device="meta")))
    assert (images.device.type, labels.device.type) == ("meta", "cpu")
    assert images.shape == (2, 3, 24, 24)


@pytest.mark.parametrize("channels", [1, 3])
def test_training_and_inference_normalise_to_the_same_bits(channels):
    transform = eval_transform({"input_size": (channels, 24, 24), "mean": MEAN, "std": STD})
    crops = batch_of([transform.draw(Picture(np.asarray(IMAGE)))] * 2, [0, 1])
    assert crops.pixels.dtype == torch.uint8
    torch.testing.assert_close(normalized(crops, transform.mean, transform.std)[1], transform(IMAGE), rtol=0, atol=0)
