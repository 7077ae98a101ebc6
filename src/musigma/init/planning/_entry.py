"""What a plan says of one tensor, and of one layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from musigma.init._fans import Fans


@dataclass(frozen=True)
class Entry:
    """One tensor of a plan: the law it is drawn from, and why.

    Attributes:
        tensor: qualified name; of a tied tensor the first of its names in alphabetical order.
        shape: its shape.
        scheme: a name in `SCHEMES`.
        options: what the scheme is called with.
        mean, std: the law's moments, in numbers.
        reason: one sentence.
        op: the op that uses the tensor.
        module: the module that the op ran in.
        fans: effective fans of the layer.
        parts: how many matrices it stacks (query-key-value, gates, groups).
        activation: label of the activation that follows.
        norm: path of the normalization that follows.
        branch: (i, n) where the tensor ends branch i of n that add up.
        tied: its other names.
        target: std of the pre-activation that the law was chosen for.
    """

    tensor: str
    shape: tuple[int, ...]
    scheme: str
    options: Mapping[str, object]
    mean: float
    std: float
    reason: str
    op: str = ""
    module: str = ""
    fans: Fans | None = None
    parts: int = 1
    activation: str | None = None
    norm: str | None = None
    branch: tuple[int, int] | None = None
    tied: tuple[str, ...] = ()
    target: float | None = None


@dataclass(frozen=True)
class Layer:
    """What a plan expects of one weight layer as it runs.

    Attributes:
        node: index of the op in the plan's graph.
        module: qualified path of the module.
        op: the op.
        weights: its weight tensors.
        kind: what the layer's output is for: `activation`, `norm`, `branch`, `skip`, `head`, `score`,
            `gate`, `embedding`, `recurrent`, `plain`.
        inputs: second moment of what it reads.
        std: expected standard deviation of its output, over examples, places and units.
        rms: the root of its expected second moment; std if the mean is 0, as it is without a bias.
        correlation: expected correlation of one unit's output between two examples; nan if unknown.
        gradient: expected sum of squares of the gradient at the output, per example, relative to the last
            layer's; nan if unknown.
        spread: standard deviation of log(output variance) over draws of the weights, at this width.
        gradient_spread: the same of the gradient, relative to the last layer's.
        measured: empty if theory gave `inputs`; else what was measured on the example, and why.
        target: what the law was chosen for; std is what it comes to, which is as much but for a kept weight.
    """

    node: int
    module: str
    op: str
    weights: tuple[str, ...]
    kind: str
    inputs: float
    std: float
    correlation: float = float("nan")
    gradient: float = float("nan")
    spread: float = float("nan")
    gradient_spread: float = float("nan")
    rms: float = float("nan")
    measured: str = ""
    target: float = float("nan")
