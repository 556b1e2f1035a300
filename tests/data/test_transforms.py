"""Evaluation equals timm's, training draws what timm and torchvision draw; only the resizing rounds otherwise."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config
from torchvision import transforms as tv

from tests.data.fuzz import mutant
from tests.data.pictures import encoded, photo
from tests.data.zoo import GOOD
from weft.data import BadImage, ImageDataset, eval_transform, make_loader, open_image, train_transform
from weft.data.colour import Picture
from weft.data.crops import batch_of, normalized
from weft.data.decode import open_picture
from weft.data.formats import sniff
from weft.data.preprocessing import visible
from weft.data.seeding import seeded_rng
from weft.data.source import KeyedSource
from weft.data.transforms import _rand_augment, posterize_at_least_one_bit
from weft.errors import UsageError

PHOTO = Image.fromarray(photo(90, 120))
POLICY = "rand-m9-mstd0.5-inc1"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
UNIT = ((0.0,) * 3, (1.0,) * 3)  # mean and std that leave 0 to 1 as it is
PLAIN = {"crop_pct": 1.0, "mean": UNIT[0], "std": UNIT[1]}


@pytest.mark.parametrize("in_chans", [1, 3])
@pytest.mark.parametrize("crop", ["resized", "shift", "cut", "none"])
def test_every_crop_is_sent_to_workers_and_takes_every_operation(crop, in_chans):
    mean = (0.5,) * in_chans
    transform = train_transform(
        16, mean, mean, crop=crop, in_chans=in_chans, color_jitter=0.4, rand_augment=POLICY, erase_prob=0.5
    )
    assert pickle.loads(pickle.dumps(transform))(PHOTO).shape == (in_chans, 16, 16)


@pytest.mark.parametrize("ratio", [(3 / 4, 4 / 3), (3.0, 3.0), (0.2, 0.2)])
@pytest.mark.parametrize("size", [(1, 1), (1, 2), (3, 1), (2, 40)])
def test_the_smallest_images_have_crops(size, ratio):
    transform = train_transform(64, MEAN, STD, crop="resized", ratio=ratio)
    for seed in range(60):
        with seeded_rng(seed):
            assert transform(Image.new("RGB", size)).shape == (3, 64, 64)


@pytest.mark.parametrize("name", ["levit_128s", "mobilenetv3_small_100"])
def test_evaluation_equals_timms(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    theirs = create_transform(**resolve_data_config(model=model), is_training=False)
    for cfg in (model.pretrained_cfg, timm.models.get_pretrained_cfg(name)):
        torch.testing.assert_close(eval_transform(cfg)(PHOTO), theirs(PHOTO), rtol=0, atol=0)


@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "lanczos", "nearest"])
def test_evaluation_equals_timms_for_every_shape(crop_mode: str, interpolation: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        image = Image.fromarray(photo(*rng.integers(1, 90, 2), seed=int(rng.integers(99))))
        size = (3, *(int(side) for side in rng.integers(8, 64, 2))) if rng.random() < 0.5 else (3, 32, 32)
        arguments = dict(interpolation=interpolation, mean=MEAN, std=STD, crop_mode=crop_mode)
        arguments |= dict(input_size=size, crop_pct=float(rng.uniform(0.7, 1.0)))
        try:
            expected = create_transform(**arguments, is_training=False)(image)
        except ValueError:  # timm rounds a side to 0
            expected = None
        seen = eval_transform(arguments)(image)
        assert seen.shape == size
        if expected is not None:
            torch.testing.assert_close(seen, expected, rtol=0, atol=0)
        batch = np.stack([eval_transform(arguments).pixels(image).values] * 2)
        assert np.array_equal(eval_transform(arguments).normalize(batch)[1], seen.numpy())


@pytest.mark.parametrize("mode", ["center", "squash", "border"])
def test_a_crop_larger_than_a_small_image(mode):
    cfg = {"input_size": (3, 4, 6), "crop_pct": 10.0, "crop_mode": mode}
    assert eval_transform(cfg)(PHOTO).shape == (3, 4, 6)


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_what_is_visible_is_what_was_there(channels):
    cfg = {"input_size": (channels, 16, 16), "crop_pct": 1.0, "mean": MEAN, "std": STD}
    pixels = photo(16, 16) if channels > 1 else np.repeat(photo(16, 16)[..., :1], 3, axis=-1)
    if channels <= 3:
        seen = visible(eval_transform(cfg)(Image.fromarray(pixels)), cfg)
    else:  # no file has five channels: other means than the picture's own are those of the first
        planes = torch.from_numpy(np.moveaxis(pixels, -1, 0).copy()) / 255
        seen = visible(((torch.cat([planes, planes[:2]]) - MEAN[0]) / STD[0])[None], cfg)[0]
    np.testing.assert_array_equal((255 * seen).round().permute(1, 2, 0).numpy(), pixels)


def test_gray_becomes_three_equal_channels():
    gray = photo(16, 16)[..., 0]
    seen = eval_transform(PLAIN | {"input_size": (3, 16, 16)})(open_image(encoded(gray, "PNG")))
    np.testing.assert_array_equal(np.rint(seen.numpy() * 255), np.stack([gray] * 3))


@pytest.mark.parametrize(
    "transform",
    [
        train_transform(16, (0.5,), (0.25,), in_chans=1, hflip=False, crop="none", crop_pct=1.0),
        eval_transform({"input_size": (1, 16, 16), "crop_pct": 1.0, "mean": (0.5,), "std": (0.25,)}),
    ],
    ids=["train", "eval"],
)
def test_one_channel_keeps_gray_levels(transform):
    gray = photo(16, 16)[..., 0]
    seen = transform(open_image(encoded(gray, "PNG")))
    np.testing.assert_array_equal(np.rint((seen.numpy() * 0.25 + 0.5) * 255), gray[None])


def test_one_channel_of_a_model_made_for_three_takes_the_average():
    cfg = {"input_size": (1, 8, 8), "mean": (0.2, 0.4, 0.6), "std": (0.1, 0.2, 0.3)}
    seen = eval_transform(cfg)(Image.new("L", (9, 9)))
    torch.testing.assert_close(seen, torch.full((1, 8, 8), -2.0))


@pytest.mark.parametrize(("size", "crop"), [(32, "shift"), (48, "shift"), (49, "resized"), ((32, 96), "resized")])
def test_small_images_are_shifted_and_a_rectangle_is_height_by_width(size, crop):
    for seed in range(5):
        with seeded_rng(seed):
            drawn = train_transform(size, MEAN, STD)(PHOTO)
        with seeded_rng(seed):
            assert torch.equal(train_transform(size, MEAN, STD, crop=crop)(PHOTO), drawn)
        assert drawn.shape == (3, *(size if isinstance(size, tuple) else (size, size)))


def test_images_are_mirrored_on_request_only():
    upright = train_transform(64, *UNIT, hflip=False, crop="resized", scale=(1.0, 1.0), ratio=(1.0, 1.0))
    expected = upright(Image.fromarray(photo(64, 64)))
    assert all(torch.equal(upright(Image.fromarray(photo(64, 64))), expected) for _ in range(50))


@pytest.mark.parametrize("policy", [POLICY, "rand-m10-inc1", "rand-m10-mstd0.5"])
def test_rand_augment_survives_its_strongest_level(policy):
    ops = _rand_augment(policy, (32, 32), MEAN, "bicubic").ops
    posterizers = [op for op in ops if op.name.startswith("Posterize")]
    assert posterizers
    for op in posterizers:
        op.prob, op.magnitude, op.magnitude_std = 1.0, 10 if op.name.endswith("Increasing") else 0, 0
        np.testing.assert_array_equal(np.asarray(op(PHOTO)), np.asarray(PHOTO) & 0x80)
    transform = train_transform(64, MEAN, STD, rand_augment=policy)
    for index in range(100):
        with seeded_rng(index):
            assert transform(PHOTO).isfinite().all()


def test_the_clamp_is_ours_alone():
    _rand_augment("rand-m9-inc1", (32, 32), MEAN, "bicubic")
    assert timm.data.auto_augment.NAME_TO_OP["PosterizeIncreasing"] is not posterize_at_least_one_bit
    np.testing.assert_array_equal(np.asarray(posterize_at_least_one_bit(PHOTO, 3)), np.asarray(PHOTO) & 0xE0)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((32, MEAN, STD, "cubic"), {}, r"interpolation must be bicubic, .*; got 'cubic'"),
        ((32, MEAN, STD), {"crop": "zoom"}, r"crop must be auto, resized, shift, cut or none; got 'zoom'"),
        ((32, MEAN, STD), {"in_chans": 4}, r"one value per channel \(4\); got \(0\.485"),
        ((32, (0.5,) * 4, (0.5,) * 4), {"in_chans": 4}, r"in_chans must be 3 \(RGB\) or 1 .*; got 4"),
        ((32, (0.5,), STD), {}, r"one value per channel \(3\); got \(0\.5,\)"),
        ((32, MEAN, STD), {"rand_augment": "random"}, r"policy such as rand-m9.*; got 'random'"),
        ((32, MEAN, STD), {"rand_augment": "rand-q9"}, r"policy such as rand-m9.*; got 'rand-q9'"),
        ((), {"crop_mode": "stretch"}, r"crop_mode must be center, squash or border; got 'stretch'"),
        ((), {"interpolation": "cubic"}, r"interpolation must be .*; got 'cubic'"),
        ((), {"input_size": (5, 32, 32)}, r"one value per channel \(5\)"),
    ],
)
def test_invalid_values_are_refused(arguments, options, words):
    with pytest.raises(UsageError, match=words):
        train_transform(*arguments, **options) if arguments else eval_transform(options)


@pytest.mark.parametrize(
    ("sizes", "input_size", "message"),
    [
        ([(40, 200)] * 3, (224, 224), r"wider than the input of 224x224: .* 5\.0 .* 85 % .*--img-size 96x512"),
        ([(200, 40)] * 3, (224, 224), r"taller than the input of 224x224: .* 5\.0 .* 85 % .*--img-size 512x96"),
        ([(90, 160)] * 3, (32, 32), r"wider .* factor of 1\.8"),
        ([(90, 160), (160, 90)], (32, 32), r"factor of 1\.8 .* cut off\.$"),  # no shape fits both
        ([(100, 100)] * 3, (128, 640), r"taller than the input of 128x640"),
        ([(40, 200)] * 3, (128, 640), ""),
        ([(100, 150)] * 3 + [(10, 900)], (224, 224), ""),  # 3:2, with one panorama
        ([], (224, 224), ""),
    ],
)
def test_images_that_the_crop_cuts_have_a_note(sizes, input_size, message):
    crop = eval_transform({"input_size": (3, *input_size), "crop_pct": 0.875})
    assert re.search(message, crop.note(sizes)) if message else crop.note(sizes) == ""
    for mode in ("squash", "border"):  # nothing is cut
        assert eval_transform({"input_size": (3, *input_size), "crop_mode": mode}).note(sizes) == ""


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
            expected = theirs(PHOTO)
        with seeded_rng(seed):
            torch.testing.assert_close(own(PHOTO), expected, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_resizing_rounds_otherwise_than_pillow_and_no_more(mode):
    own = train_transform(64, (0, 0, 0), (1, 1, 1), mode, hflip=False, scale=(0.3, 0.9))
    differences = []
    for seed in range(30):
        with seeded_rng(seed):
            pixels = own(PHOTO)
        with seeded_rng(seed):
            box = own.window._box(PHOTO.height, PHOTO.width)
        region = PHOTO.crop((box[1], box[0], box[1] + box[3], box[0] + box[2]))
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
    picture, crops = Picture(np.asarray(PHOTO)), []
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
    crops = batch_of([transform.draw(Picture(np.asarray(PHOTO)))] * 2, [0, 1])
    assert crops.pixels.dtype == torch.uint8
    torch.testing.assert_close(normalized(crops, transform.mean, transform.std)[1], transform(PHOTO), rtol=0, atol=0)
