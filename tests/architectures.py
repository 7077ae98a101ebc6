"""Published architectures, written out so that published weights load into them by name."""

from __future__ import annotations

import torch
import torch.nn.functional as F
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


class EfficientNetLite0(nn.Module):
    """EfficientNet-lite0 in the names of its published checkpoint: 49 BatchNorms, eps 1e-3.

    TensorFlow's padding of strided convolutions (one more on the right) is part of what was trained.
    """

    # expansion, channels, repeats, first stride, kernel
    STAGES = (
        (1, 16, 1, 1, 3),
        (6, 24, 2, 2, 3),
        (6, 40, 2, 2, 5),
        (6, 80, 3, 2, 3),
        (6, 112, 3, 1, 5),
        (6, 192, 4, 2, 5),
        (6, 320, 1, 1, 3),
    )

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self._conv_stem, self._bn0 = SamePadded(3, 32, 3, 2), nn.BatchNorm2d(32, eps=1e-3)
        blocks, channels = [], 32
        for expansion, width, repeats, stride, kernel in self.STAGES:
            for number in range(repeats):
                blocks.append(MBConv(channels, width, expansion, stride if number == 0 else 1, kernel))
                channels = width
        self._blocks = nn.ModuleList(blocks)
        self._conv_head, self._bn1 = SamePadded(320, 1280, 1), nn.BatchNorm2d(1280, eps=1e-3)
        self._fc = nn.Linear(1280, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self._bn0(self._conv_stem(x)))
        for block in self._blocks:
            x = block(x)
        return self._fc(F.relu6(self._bn1(self._conv_head(x))).mean((2, 3)))


class SamePadded(nn.Conv2d):
    """A convolution without bias that pads as TensorFlow does."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        pads = [max((-(-n // stride) - 1) * stride + kernel - n, 0) for n in (x.shape[3], x.shape[2])]
        x = F.pad(x, [pads[0] // 2, pads[0] - pads[0] // 2, pads[1] // 2, pads[1] - pads[1] // 2])
        return F.conv2d(x, self.weight, self.bias, self.stride, 0, 1, self.groups)


class MBConv(nn.Module):
    """An inverted residual block."""

    def __init__(self, channels: int, width: int, expansion: int, stride: int, kernel: int) -> None:
        super().__init__()
        inner = channels * expansion
        self.skips = stride == 1 and channels == width
        if expansion != 1:
            self._expand_conv = SamePadded(channels, inner, 1)
            self._bn0 = nn.BatchNorm2d(inner, eps=1e-3)
        self._depthwise_conv = SamePadded(inner, inner, kernel, stride, groups=inner)
        self._bn1 = nn.BatchNorm2d(inner, eps=1e-3)
        self._project_conv, self._bn2 = SamePadded(inner, width, 1), nn.BatchNorm2d(width, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self._bn0(self._expand_conv(x))) if hasattr(self, "_expand_conv") else x
        y = F.relu6(self._bn1(self._depthwise_conv(y)))
        y = self._bn2(self._project_conv(y))
        return x + y if self.skips else y


class Craft(nn.Module):
    """CRAFT (Baek et al. 2019), a U-net on VGG16-BN, in the names of its checkpoint: 20 BatchNorms."""

    # A convolution of so many channels, a rectifier or a pooling, under their numbers in VGG16-BN's list.
    SLICES = (
        (0, "64 R 64 R M 128 R 128"),
        (12, "R M 256 R 256"),
        (19, "R 256 R M 512 R 512"),
        (29, "R 512 R M 512 R 512"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.basenet, channels = nn.Module(), 3
        for number, (first, layers) in enumerate(self.SLICES, 1):
            part, place = nn.Sequential(), first
            for word in layers.split():
                if word in "RM":
                    part.add_module(str(place), nn.ReLU(inplace=True) if word == "R" else nn.MaxPool2d(2))
                    place += 1
                else:
                    part.add_module(str(place), nn.Conv2d(channels, int(word), 3, padding=1))
                    part.add_module(str(place + 1), nn.BatchNorm2d(int(word)))
                    channels, place = int(word), place + 2
            setattr(self.basenet, f"slice{number}", part)
        self.basenet.slice5 = nn.Sequential(
            nn.MaxPool2d(3, 1, 1), nn.Conv2d(512, 1024, 3, padding=6, dilation=6), nn.Conv2d(1024, 1024, 1)
        )
        self.upconv1, self.upconv2 = DoubleConv(1536, 512, 256), DoubleConv(768, 256, 128)
        self.upconv3, self.upconv4 = DoubleConv(384, 128, 64), DoubleConv(192, 64, 32)
        widths = ((32, 32, 3), (32, 32, 3), (32, 16, 3), (16, 16, 1))
        head = [m for i, o, k in widths for m in (nn.Conv2d(i, o, k, padding=k // 2), nn.ReLU(inplace=True))]
        self.conv_cls = nn.Sequential(*head, nn.Conv2d(16, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for number in range(1, 5):
            x = getattr(self.basenet, f"slice{number}")(x)
            found.append(x)
        y = self.upconv1(torch.cat([self.basenet.slice5(x), found[3]], 1))
        for up, beside in ((self.upconv2, found[2]), (self.upconv3, found[1]), (self.upconv4, found[0])):
            y = F.interpolate(y, size=beside.shape[2:], mode="bilinear", align_corners=False)
            y = up(torch.cat([y, beside], 1))
        return self.conv_cls(y).permute(0, 2, 3, 1)


class DoubleConv(nn.Module):
    """Two convolutions of a U-net's way up."""

    def __init__(self, inputs: int, middle: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(inputs, middle, 1), nn.BatchNorm2d(middle), nn.ReLU(inplace=True),
            nn.Conv2d(middle, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Crepe(nn.Module):
    """CREPE's tiny pitch tracker (Kim et al. 2018): six BatchNorms, each behind the rectifier."""

    WIDTHS = (1, 128, 16, 16, 16, 32, 64)

    def __init__(self) -> None:
        super().__init__()
        for number in range(1, 7):
            size, stride = (512, 4) if number == 1 else (64, 1)
            conv = nn.Conv2d(self.WIDTHS[number - 1], self.WIDTHS[number], (size, 1), (stride, 1))
            setattr(self, f"conv{number}", conv)
            setattr(self, f"conv{number}_BN", nn.BatchNorm2d(self.WIDTHS[number], eps=1e-3, momentum=0.0))
        self.classifier = nn.Linear(256, 360)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None, :, None]
        for number in range(1, 7):
            x = F.pad(x, (0, 0, 254, 254) if number == 1 else (0, 0, 31, 32))
            x = F.relu(getattr(self, f"conv{number}")(x))
            x = F.max_pool2d(getattr(self, f"conv{number}_BN")(x), (2, 1), (2, 1))
        return torch.sigmoid(self.classifier(x.permute(0, 2, 1, 3).reshape(-1, 256)))
