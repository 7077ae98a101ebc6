"""Published architectures, written out so that published weights load into them by name."""

from __future__ import annotations

from torch import Tensor, nn


class MobileNetV2(nn.Module):
    """Sandler et al. 2018, table 2, in the names of torchvision's checkpoints: 52 BatchNorms."""

    # expansion, channels, repeats, first stride
    STAGES = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        features: list[nn.Module] = [conv_bn_relu6(3, 32, 3, stride=2)]
        channels = 32
        for expansion, width, repeats, first in self.STAGES:
            for number in range(repeats):
                features.append(InvertedResidual(channels, width, first if number == 0 else 1, expansion))
                channels = width
        self.features = nn.Sequential(*features, conv_bn_relu6(channels, 1280, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


class InvertedResidual(nn.Module):
    """A block of MobileNetV2: expand, filter each channel by itself, project without an activation."""

    def __init__(self, channels: int, width: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = channels * expansion
        layers: list[nn.Module] = [conv_bn_relu6(channels, inner, 1)] if expansion != 1 else []
        self.conv = nn.Sequential(
            *layers,
            conv_bn_relu6(inner, inner, 3, stride=stride, groups=inner),
            nn.Conv2d(inner, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.residual = stride == 1 and channels == width

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.residual else self.conv(x)


def conv_bn_relu6(
    channels: int, width: int, kernel: int, *, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU6(inplace=True),
    )
