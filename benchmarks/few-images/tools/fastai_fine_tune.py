"""Fine-tune a timm network with fastai's `vision_learner` and `fine_tune`, its head and its augmentation."""

import sys

import timm
import torch
from fastai.vision.all import ImageDataLoaders, Normalize, Resize, accuracy, aug_transforms, vision_learner

folder, weights = sys.argv[1:]
name = "tf_efficientnet_lite0"
config = timm.get_pretrained_cfg(name)
data = ImageDataLoaders.from_folder(
    folder,
    train="train",
    valid="val",
    bs=16,
    num_workers=0,
    item_tfms=Resize(256),
    batch_tfms=[*aug_transforms(size=224), Normalize.from_stats(config.mean, config.std)],
)
learner = vision_learner(data, name, pretrained=False, normalize=False, metrics=accuracy)
learner.model[0].model.load_state_dict(torch.load(weights), strict=False)
learner.freeze()
with learner.no_bar():
    learner.fine_tune(8)
    print(100 * learner.validate()[1])
