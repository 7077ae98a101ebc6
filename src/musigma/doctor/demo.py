"""The case of `musigma demo`: handwritten digits, and a network written the way people get it wrong."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from musigma.doctor._case import Case

__all__ = ["MultilayerPerceptron", "case"]

# What SGD is usually started with. From 0.05 to 0.3 the comparison comes out alike; BatchNorm makes the loss
# blind to the size of the weights before it, so that of the weights only the last layer's matter.
LEARNING_RATE = 0.1


class MultilayerPerceptron(nn.Module):
    """The lecture notes' network, with the two habits that they warn of: biases and weights of std 0.01.

    Args:
        num_features: of one example, once flattened.
        num_classes: logits that come out.
        num_hidden_1: units of the first hidden layer.
        num_hidden_2: units of the second.
        seed: where the weights' random numbers start.

    Example:
        >>> MultilayerPerceptron(64, 10, num_hidden_1=32, num_hidden_2=16)(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self, num_features: int, num_classes: int, *, num_hidden_1: int, num_hidden_2: int, seed: int = 0
    ) -> None:
        super().__init__()
        self.my_network = nn.Sequential(
            nn.Flatten(),
            nn.Linear(num_features, num_hidden_1),
            nn.BatchNorm1d(num_hidden_1),
            nn.ReLU(),
            nn.Linear(num_hidden_1, num_hidden_2),
            nn.BatchNorm1d(num_hidden_2),
            nn.ReLU(),
            nn.Linear(num_hidden_2, num_classes),
        )
        generator = torch.Generator().manual_seed(seed)
        for layer in self.my_network:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, 0.0, 0.01, generator=generator)
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (n, num_classes) for x of shape (n, ...) with num_features values each."""
        return self.my_network(x)


def case(*, seed: int = 0) -> Case:
    """Scikit-learn's digits as they come, with values from 0 to 16, and that network.

    Args:
        seed: of the split and the weights.

    Returns:
        1437 digits to train on in batches of 64, 360 to test on, of which no pixel is standardized.

    Raises:
        ImportError: scikit-learn is not installed.

    Example:
        >>> case().test[0].shape
        torch.Size([360, 1, 8, 8])
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the demo needs scikit-learn's digits, which are not installed; run: pip install 'musigma[demo]'"
        ) from error
    digits = load_digits()
    images, labels = torch.from_numpy(digits.images).float().unsqueeze(1), torch.from_numpy(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    images, labels = images[order], labels[order]
    train, test = slice(0, 1437), slice(1437, None)
    loader = DataLoader(
        TensorDataset(images[train], labels[train]),
        batch_size=64,
        shuffle=True,
        drop_last=True,
    )
    return Case(
        MultilayerPerceptron(64, 10, num_hidden_1=64, num_hidden_2=32, seed=seed),
        images[:256],
        labels[:256],
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE),
        intent="train",
        loader=loader,
        test=(images[test], labels[test]),
        name="handwritten digits",
    )
