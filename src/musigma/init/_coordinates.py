"""Whether the sizes of activations stay what they are when a model is made wider."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from musigma.graph import Node, call, forked_rng, record, tensors
from musigma.init.planning import Plan, plan
from musigma.init.recipes import param_groups
from musigma.statistics import moments

# An activation grows with the width as its power 1/2 or 1 in standard parametrization, and 0 in μP up to
# corrections of 1/√width: halfway between 0 and 1/2.
LIMIT = 0.25
Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Coordinate:
    """The size of one layer's output after some steps of training, over widths.

    Attributes:
        layer: qualified path of the layer.
        step: how many steps were taken.
        sizes: mean |output| for each width.
        slope: d log(size)/d log(width), by least squares.
        judged: whether it counts: not at the start, where an output layer of μP shrinks as it should.
    """

    layer: str
    step: int
    sizes: tuple[float, ...]
    slope: float
    judged: bool

    @property
    def problem(self) -> str:
        """ "grows", "shrinks", or "" if it is flat or not judged."""
        if not self.judged or abs(self.slope) <= LIMIT:
            return ""
        return "grows" if self.slope > 0 or math.isnan(self.slope) else "shrinks"


@dataclass(frozen=True)
class CoordinateCheck:
    """What `coordinate_check` measured; true if every activation is flat over widths.

    Attributes:
        widths: what was compared.
        rows: one for each layer and step.
    """

    widths: tuple[int, ...]
    rows: tuple[Coordinate, ...]

    @property
    def flat(self) -> bool:
        """Whether no layer's output grows or shrinks with the width after a step of training."""
        return not any(row.problem for row in self.rows)

    def __bool__(self) -> bool:
        return self.flat

    def __str__(self) -> str:
        wide = max(len(row.layer) for row in self.rows)
        head = f"{'layer':{wide}}  step  {'  '.join(f'{w:>8}' for w in self.widths)}   slope"
        lines = [
            f"{row.layer:{wide}}  {row.step:>4}  {'  '.join(f'{size:8.3g}' for size in row.sizes)}  "
            f"{row.slope:>+6.2f}  {row.problem}".rstrip()
            for row in self.rows
        ]
        verdict = "flat" if self.flat else "not flat: see the layers that grow or shrink"
        return "\n".join([head, *lines, verdict])


def coordinate_check(
    make_model: Callable[[int], nn.Module],
    widths: Sequence[int],
    example: Any,
    *,
    scheme: Any = "auto",
    targets: Any = None,
    loss: Loss | None = None,
    optimizer: str = "adam",
    lr: float = 0.01,
    steps: int = 3,
    seeds: Sequence[int] = (0,),
) -> CoordinateCheck:
    """Train models of several widths for a few steps, and see whether their activations stay alike.

    Formula: the slope of log(mean |output|) over log(width), for every layer, after every step; flat if its
    absolute value is at most 1/4, halfway between μP's 0 and the 1/2 by which activations grow at the least
    where a learning rate doesn't fit. (The output layer may shrink, as μP's does at the start.)

    Args:
        make_model: width → model.
        widths: at least two, the smallest first; powers of 2 are usual.
        example: what the models run on; its shape must not depend on the width.
        scheme: as for `musigma.init.initialize`; for μP `Mup(base_width=…)`.
        targets: what `loss` is told; default: fixed normal numbers of the output's shape.
        loss: (output, targets) → scalar; default: mean squared error, cross-entropy for whole-number
            targets.
        optimizer: "adam" or "sgd" (which plan.lr_scale knows).
        lr: learning rate at the base width.
        steps: how many.
        seeds: sizes are averaged over them.

    Returns:
        What was measured; `check.flat` says whether all is well, printing shows a table.

    Raises:
        ValueError: fewer than two widths, no steps, models that run other layers at other widths.

    Example:
        >>> import torch, musigma as ms
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> make = lambda n: Sequential(Linear(8, n), ReLU(), Linear(n, n), ReLU(), Linear(n, 1))
        >>> x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
        >>> ms.init.coordinate_check(make, [64, 128, 256], x, scheme=ms.init.Mup(base_width=64)).flat
        True
        >>> ms.init.coordinate_check(make, [64, 128, 256], x, scheme="he_normal", lr=0.03).flat
        False

    References:
        Yang et al. 2021, Tensor Programs V, appendix D.1 (coordinate checking).
    """
    if len(widths) < 2 or len(set(widths)) != len(widths):
        raise ValueError(f"widths must be at least two different ones, got {list(widths)}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}: nothing is learned at the start")
    trial = _Trial(example, scheme, targets, loss, optimizer, lr, steps)
    runs = [[trial.run(make_model(width), seed) for seed in seeds] for width in widths]
    layers = list(runs[0][0][0])
    if any(list(sizes) != layers for seeded in runs for run in seeded for sizes in run):
        raise ValueError("make_model must build the same layers at every width, but other layers ran")
    rows = []
    for layer in layers:
        for step in range(steps + 1):
            sizes = tuple(sum(run[step][layer] for run in seeded) / len(seeds) for seeded in runs)
            slope = _slope(widths, sizes)
            shrinking_output = layer == layers[-1] and slope < 0
            rows.append(Coordinate(layer, step, sizes, slope, step > 0 and not shrinking_output))
    return CoordinateCheck(tuple(widths), tuple(rows))


@dataclass(frozen=True)
class _Trial:
    example: Any
    scheme: Any
    targets: Any
    loss: Loss | None
    optimizer: str
    lr: float
    steps: int

    def run(self, model: nn.Module, seed: int) -> list[dict[str, float]]:
        """The size of every layer's output, before and after each step."""
        with forked_rng(model, seed):
            made = plan(model, self.example, scheme=self.scheme, seed=seed)
            made.apply(model)
            groups = param_groups(model, made, self.lr, optimizer=self.optimizer)
            kind = torch.optim.Adam if self.optimizer == "adam" else torch.optim.SGD
            optimizer = kind(groups, lr=self.lr)
            found = [self._sizes(model, made)]
            for _ in range(self.steps):
                optimizer.zero_grad()
                self._loss(call(model, self.example), seed).backward()
                optimizer.step()
                found.append(self._sizes(model, made))
        return found

    def _sizes(self, model: nn.Module, made: Plan) -> dict[str, float]:
        assert made.graph is not None
        layers = {node.index for node in made.graph.weight_layers()}
        sizes: dict[str, float] = {}

        def listen(node: Node, args: Any, kwargs: Any, outputs: tuple[Tensor, ...]) -> None:
            if node.index in layers:
                name = node.module or node.op
                label = f"{name} #{node.call}" if node.call else name
                sizes[label] = float(moments(outputs[0].abs(), None).mean)

        with torch.no_grad():
            record(model, self.example, listen=listen)
        return sizes

    def _loss(self, output: Any, seed: int) -> Tensor:
        if self.loss is not None:
            return self.loss(output, self.targets)
        first = next(t for t in tensors(output) if t.is_floating_point())
        targets = self.targets
        if targets is None:
            generator = torch.Generator("cpu").manual_seed(seed)
            targets = torch.randn(first.shape, generator=generator, device="cpu").to(first)
        if targets.is_floating_point():
            return nn.functional.mse_loss(first, targets)
        return nn.functional.cross_entropy(first.flatten(0, -2), targets.flatten())


def _slope(widths: Sequence[int], sizes: Sequence[float]) -> float:
    if not all(0 < size < math.inf for size in sizes):
        return math.nan if any(not size < math.inf for size in sizes) else 0.0
    x, y = [math.log(w) for w in widths], [math.log(s) for s in sizes]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    together = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return together / sum((a - mean_x) ** 2 for a in x)
