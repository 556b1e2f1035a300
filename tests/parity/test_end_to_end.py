"""From a file to the answer, as public packages go there: 64 tensors, and photographs through both preparations."""

import io
import tarfile
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms import InterpolationMode

import weft
from tests.helpers import enliven
from weft.data import eval_transform, open_image

transformers = pytest.importorskip("transformers")
PHOTOS = Path(__file__).parents[2].parent / "shared" / "data" / "photos.tar"
# The released LeViT's own preparation, in torchvision's words.
RELEASED = transforms.Compose(
    [
        transforms.Resize(256, InterpolationMode.BICUBIC),
        transforms.CenterCrop(224),
        transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]
)


@pytest.fixture(scope="module")
def levits():
    torch.manual_seed(0)
    theirs = enliven(timm.create_model("levit_128s")).eval()
    ours = weft.create_model("levit_128s").eval()
    weft.load_checkpoint(ours, theirs.state_dict())
    return ours, theirs


def assert_same_answers(ours, theirs, tolerance):
    assert (ours - theirs).abs().max() <= tolerance
    assert torch.equal(ours.argmax(dim=1), theirs.argmax(dim=1))


@torch.inference_mode()
def test_levit_on_64_tensors(levits):
    x = torch.randn(64, 3, 224, 224)
    ours, theirs = (model(x) for model in levits)
    assert_same_answers(ours, theirs, 1e-5 * max(1.0, theirs.abs().max().item()))


@torch.inference_mode()
def test_cvt_on_64_tensors():
    widths = dict(embed_dim=[16, 32, 64], depth=[1, 2, 4], num_heads=[1, 2, 4])
    config = transformers.CvtConfig(num_labels=20, **widths)
    theirs = enliven(transformers.CvtForImageClassification(config)).eval()
    ours = weft.create_model("cvt_13", num_classes=20, act_layer="gelu", **widths).eval()
    weft.load_checkpoint(ours, theirs.state_dict())
    x = torch.randn(64, 3, 64, 64)
    assert_same_answers(ours(x), theirs(x).logits, 1e-5)


def photographs() -> list[bytes]:
    if not PHOTOS.is_file():
        pytest.skip("needs photos.tar of the shared data, which is not part of the project")
    with tarfile.open(PHOTOS) as archive:
        members = [member for member in archive if member.isfile()]
        return [archive.extractfile(member).read() for member in members[:24]]


def drawn() -> list[bytes]:
    """JPEGs of several shapes, made here."""
    files = []
    for height, width in ((375, 500), (500, 333), (256, 256), (90, 120)):
        ramp = torch.linspace(0, 255, height * width * 3).sin().add(1).mul(127).byte().reshape(height, width, 3)
        buffer = io.BytesIO()
        Image.fromarray(ramp.numpy()).save(buffer, "JPEG", quality=95)
        files.append(buffer.getvalue())
    return files


@pytest.mark.parametrize("files", [drawn, photographs])
@torch.inference_mode()
def test_the_same_file_gets_the_same_answer(levits, files):
    ours, theirs = levits
    prepare = eval_transform(ours.pretrained_cfg)
    photos = files()
    plain = [Image.open(io.BytesIO(data)) for data in photos]
    # Where a picture brings a colour profile or a rotation, ours is what a person sees, theirs is not.
    kept = [i for i, p in enumerate(plain) if "icc_profile" not in p.info and p.getexif().get(0x0112, 1) == 1]
    assert len(kept) >= 4
    mine = torch.stack([prepare(open_image(photos[i])) for i in kept])
    released = torch.stack([RELEASED(plain[i].convert("RGB")) for i in kept])
    assert_same_answers(ours(mine), theirs(released), 2e-3)
