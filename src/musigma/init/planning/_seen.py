"""What one layer's output was."""

from __future__ import annotations

import math

from torch import Tensor

from musigma.statistics import moments


class Seen:
    """What one layer's output was.

    Attributes:
        second: E[z²] over everything.
        across: variance from example to example, averaged over units and places.
        correlation: E[z z'] of two examples by E[z²]; nan for one example.

    Args:
        out: the output; examples along its first dimension, or in equal pieces along it.
        examples: how many there are.
    """

    def __init__(self, out: Tensor, examples: int) -> None:
        x = out.detach()
        whole = moments(x, None)
        self.second = float(whole.mean.square() + whole.var())
        self.across = self.correlation = math.nan
        if examples > 1 and x.dim() > 1 and x.shape[0] % examples == 0:
            each = moments(x.reshape(examples, -1), 0)
            squares = each.mean.square().mean()
            self.across = float(each.var(correction=1).mean()) ** 0.5
            # Of B examples' sum squared, 1/B is what each has with itself.
            pairs = (examples * squares - self.second) / (examples - 1)
            self.correlation = float(pairs) / self.second if self.second > 0 else math.nan
