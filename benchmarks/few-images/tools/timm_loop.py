"""Fine-tune in a PyTorch loop with timm's transforms, optimizer groups and schedule."""

import sys

import timm
import timm.optim
import timm.scheduler
import torch
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

folder, weights = sys.argv[1:]
torch.manual_seed(0)
overlay = {"file": weights}
model = timm.create_model("tf_efficientnet_lite0", pretrained=True, pretrained_cfg_overlay=overlay, num_classes=9)
config = timm.data.resolve_model_data_config(model)
train = ImageFolder(f"{folder}/train", timm.data.create_transform(**config, is_training=True))
val = ImageFolder(f"{folder}/val", timm.data.create_transform(**config))
loader = DataLoader(train, batch_size=16, shuffle=True, drop_last=True)
optimizer = timm.optim.create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75)
epochs = 8
schedule = timm.scheduler.CosineLRScheduler(optimizer, t_initial=epochs * len(loader))
loss, step = torch.nn.CrossEntropyLoss(label_smoothing=0.1), 0
for _ in range(epochs):
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        loss(model(images), labels).backward()
        optimizer.step()
        step += 1
        schedule.step(step)
model.eval()
with torch.inference_mode():
    right = sum(int(model(image[None]).argmax() == label) for image, label in val)
print(100 * right / len(val))
