"""Statistics of a network that was trained on ImageNet, wiped and taken anew."""

import pytest
import torch
from torch import Tensor, nn

from musigma.surgery import recalibrate
from weights import imagenet_images, mobilenet_v2

pytestmark = pytest.mark.weights


def right(model: nn.Module, images: Tensor, labels: Tensor) -> int:
    with torch.no_grad():
        return int((torch.cat([model(x) for x in images.split(7)]).argmax(1) == labels).sum())


@pytest.mark.parametrize("mode", ["one-pass", "layerwise"])
def test_mobilenet_comes_back_from_wiped_statistics_on_twenty_images(mode: str) -> None:
    net = mobilenet_v2()
    images, labels = imagenet_images()
    assert right(net, images, labels) == 18
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
    assert len(norms) == 52
    assert right(net, images, labels) <= 1
    again, certificate = recalibrate(net, list(images.split(7)), mode=mode)
    assert len(certificate.changed) == 52
    assert not any(m.training for m in again.modules())
    assert right(again, images, labels) >= 18  # top-1 of .90
