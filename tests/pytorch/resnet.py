"""ResNet as torchvision has it, by the same names, in few lines.

He et al. 2015, "Deep Residual Learning for Image Recognition"; the bottleneck
has its stride in the 3x3 convolution, as torchvision's.
"""

import torch
from torch import nn


def conv(inputs, outputs, size, stride=1):
    return nn.Conv2d(
        inputs, outputs, size, stride, padding=size // 2, bias=False
    )


class Block(nn.Module):
    """Two 3x3 convolutions, or 1x1, 3x3 and 1x1, beside a shortcut."""

    def __init__(self, inputs, width, stride, bottleneck):
        super().__init__()
        outputs = width * (4 if bottleneck else 1)
        if bottleneck:
            self.conv1 = conv(inputs, width, 1)
            self.bn1 = nn.BatchNorm2d(width)
            self.conv2 = conv(width, width, 3, stride)
            self.bn2 = nn.BatchNorm2d(width)
            self.conv3 = conv(width, outputs, 1)
            self.bn3 = nn.BatchNorm2d(outputs)
        else:
            self.conv1 = conv(inputs, width, 3, stride)
            self.bn1 = nn.BatchNorm2d(width)
            self.conv2 = conv(width, outputs, 3)
            self.bn2 = nn.BatchNorm2d(outputs)
        self.bottleneck = bottleneck
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.bottleneck:
            y = self.bn3(self.conv3(self.relu(y)))
        shortcut = x if self.downsample is None else self.downsample(x)
        y += shortcut
        return self.relu(y)


class ResNet(nn.Module):
    """Stem, four stages of `depths` blocks, average pool, classifier."""

    def __init__(self, depths, bottleneck, width=64, num_labels=1000):
        super().__init__()
        self.conv1 = conv(3, width, 7, 2)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        channels = width
        for stage, depth in enumerate(depths):
            blocks = []
            for i in range(depth):
                stride = 2 if stage > 0 and i == 0 else 1
                blocks.append(
                    Block(channels, width << stage, stride, bottleneck)
                )
                channels = (width << stage) * (4 if bottleneck else 1)
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.num_stages = len(depths)
        self.fc = nn.Linear(channels, num_labels)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in range(self.num_stages):
            x = getattr(self, f"layer{stage + 1}")(x)
        return self.fc(torch.flatten(x.mean((2, 3)), 1))


def resnet18(**changes):
    return ResNet([2, 2, 2, 2], bottleneck=False, **changes)


def resnet50(**changes):
    return ResNet([3, 4, 6, 3], bottleneck=True, **changes)
