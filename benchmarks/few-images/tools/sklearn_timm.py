"""Fit scikit-learn's logistic regression on features of a timm network."""

import sys

import numpy as np
import timm
import torch
from sklearn.linear_model import LogisticRegressionCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torchvision.datasets import ImageFolder

folder, weights = sys.argv[1:]
overlay = {"file": weights}
model = timm.create_model(
    "tf_efficientnet_lite0", pretrained=True, pretrained_cfg_overlay=overlay, num_classes=0
).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))


def read(split: str) -> tuple[np.ndarray, np.ndarray]:
    dataset = ImageFolder(f"{folder}/{split}", transform)
    with torch.inference_mode():
        features = [model(image[None])[0].numpy() for image, _ in dataset]
    return np.stack(features), np.array(dataset.targets)


classifier = make_pipeline(StandardScaler(), LogisticRegressionCV(Cs=np.logspace(-5, 1, 7), cv=3, max_iter=1000))
classifier.fit(*read("train"))
print(100 * classifier.score(*read("val")))
