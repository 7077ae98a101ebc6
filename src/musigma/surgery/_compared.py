"""Two models side by side in float64: how far apart they are, and what rounding accounts for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from musigma.graph import call, forked_rng, tensors, unwrap
from musigma.graph._state import Untouched
from musigma.surgery._places import cast, copied

Modes = tuple[bool, ...]
"""The values of `.training` under which two models are compared."""


class ChangedModelError(RuntimeError):
    """A changed model does not run where the model before did."""


@dataclass
class Gap:
    """The largest difference between two values, and what rounding accounts for."""

    difference: float = 0.0
    bound: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether rounding accounts for the difference."""
        return self.difference <= self.bound

    def add(self, old: Sequence[Tensor], new: Sequence[Tensor], moved: Sequence[Tensor]) -> None:
        """Take in one more comparison.

        Args:
            old: the values before.
            new: the values after.
            moved: the values before, with every parameter off by up to one rounding of its type.
        """
        self.difference = max(self.difference, gap(old, new))
        # Sixteen such steps are allowed, and never less than 2⁻⁴⁴ of the largest value (256 roundings of
        # float64): what another order of the same arithmetic does.
        shaken = gap(old, moved)
        allowed = max(16 * shaken if math.isfinite(shaken) else 0.0, 2.0**-44 * _scale(old))
        self.bound = max(self.bound, allowed)


@dataclass
class Compared:
    """How two models differ.

    Args:
        outputs: of the models.
        gradients: of the inputs and of the parameters that both have with the same values; None where
            nothing has gradients.
        places: of the outputs of single modules, by what was changed there.
    """

    outputs: Gap = field(default_factory=Gap)
    gradients: Gap | None = None
    places: dict[str, Gap] = field(default_factory=dict)


@dataclass
class _Ran:
    outputs: list[Tensor]
    seen: dict[str, list[Tensor]]
    gradients: list[Tensor]


def compare(
    before: nn.Module,
    after: nn.Module,
    inputs: Iterable[Any],
    modes: Modes,
    *,
    roundings: Mapping[str, float],
    witnesses: Mapping[str, tuple[str, ...]] | None = None,
    gradients: bool = True,
) -> Compared:
    """How far apart the outputs of two float64 models are, and what rounding can account for.

    The bound is measured: the model before is run again with every parameter and buffer off by up to one
    rounding of its type, at random, which is what another order of the same arithmetic does.

    Args:
        before: the model as it was, in float64.
        after: the changed model, in float64.
        inputs: what to call both with.
        modes: the values of `.training` to compare under.
        roundings: the unit roundoff of each parameter and buffer, by qualified name.
        witnesses: modules whose outputs are compared too, by place.
        gradients: whether to compare gradients too.
    """
    witnesses = witnesses or {}
    watched = tuple(dict.fromkeys(path for paths in witnesses.values() for path in paths))
    leaves = _unchanged(before, after) if gradients else ()
    shaken = _shaken(before, roundings)
    result = Compared(places={name: Gap() for name in witnesses})
    for given in inputs:
        for training in modes:
            ran = [
                _run(m, given, training, watched, leaves, gradients, changed=m is after)
                for m in (before, after, shaken)
            ]
            result.outputs.add(*(r.outputs for r in ran))
            for name, paths in witnesses.items():
                result.places[name].add(*([t for p in paths for t in r.seen.get(p, ())] for r in ran))
            if ran[0].gradients:
                # Of all tensors at once: of a bias that a norm subtracts again it is rounding alone.
                result.gradients = result.gradients or Gap()
                result.gradients.add(*(r.gradients for r in ran))
    return result


def _run(
    model: nn.Module,
    example: Any,
    training: bool,
    watched: Sequence[str],
    leaves: Sequence[str],
    gradients: bool,
    *,
    changed: bool,
) -> _Ran:
    """Every floating output in one mode, with the same random numbers each time."""
    inner = unwrap(model)
    with (
        Untouched(inner),
        torch.set_grad_enabled(gradients),
        forked_rng(model, seed=0),
        _watching(inner, watched) as seen,
    ):
        model.train(training)
        given, inputs = _own(example, gradients)
        try:
            found = tensors(call(model, given))
        except Exception as error:
            if changed:
                raise ChangedModelError(f"it fails: {type(error).__name__}: {error}") from error
            mode = "train" if training else "eval"
            error.add_note(
                f"The model was run in {mode} mode, for a changed model has to compute the same in each mode "
                "that it is certified for; pass an example that it takes there. The model is untouched."
            )
            raise
        outputs = [t for t in found if t.is_floating_point()]
        wanted = [*inputs, *(inner.get_parameter(name) for name in leaves)]
        return _Ran([t.detach() for t in outputs], seen, _gradients(outputs, wanted) if gradients else [])


def _own(example: Any, gradients: bool) -> tuple[Any, list[Tensor]]:
    """The example in float64 with tensors of its own, and the leaves behind those."""
    leaves: list[Tensor] = []

    def own(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if gradients and value.is_floating_point():
            leaves.append(value.detach().clone().requires_grad_())
            return leaves[-1].clone()  # which an in-place first op may overwrite
        return value.clone()

    return pytree.tree_map(own, cast(example, torch.float64)), leaves


def _gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Of a fixed random combination of the outputs; none where the model has no gradients."""
    generator = torch.Generator().manual_seed(0)
    terms = [
        (t * torch.randn(t.shape, generator=generator, dtype=t.dtype, device="cpu").to(t.device)).sum()
        for t in outputs
        if t.requires_grad
    ]
    if not terms or not leaves:
        return []
    try:
        found = torch.autograd.grad(sum(terms[1:], terms[0]), leaves, allow_unused=True)
    except RuntimeError:  # an op without a derivative
        return []
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]


@contextmanager
def _watching(model: nn.Module, paths: Sequence[str]) -> Iterator[dict[str, list[Tensor]]]:
    seen: dict[str, list[Tensor]] = {path: [] for path in paths}
    with ExitStack() as stack:
        for path in paths:

            def see(_module: nn.Module, _args: Any, result: Any, path: str = path) -> None:
                seen[path] += [t.detach().clone() for t in tensors(result) if t.is_floating_point()]

            stack.callback(model.get_submodule(path).register_forward_hook(see).remove)
        yield seen


def _unchanged(before: nn.Module, after: nn.Module) -> tuple[str, ...]:
    """The parameters that both have, with the same values and under the same names."""
    others = _by_names(after)
    return tuple(
        names[0]
        for names, p in _by_names(before).items()
        if p.requires_grad
        and names in others
        and others[names].requires_grad
        and torch.equal(p, others[names])
    )


def _by_names(model: nn.Module) -> dict[tuple[str, ...], Tensor]:
    """Every parameter, by all of its names: one that is no longer tied gets less of a gradient."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for name, parameter in unwrap(model).named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), ([], parameter))[0].append(name)
    return {tuple(names): parameter for names, parameter in found.values()}


def roundings(model: nn.Module) -> dict[str, float]:
    """The unit roundoff of every parameter and buffer, by qualified name."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: torch.finfo(t.dtype).eps for name, t in named if t.is_floating_point()}


def _shaken(model: nn.Module, roundings: Mapping[str, float]) -> nn.Module:
    """A copy in which every parameter and buffer is off by up to its own unit roundoff."""
    twin = copied(model)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in (*twin.named_parameters(), *twin.named_buffers()):
        if name in roundings:
            sign = torch.randint(-1, 2, tensor.shape, generator=generator, device="cpu").to(tensor.device)
            tensor.data.mul_(1 + sign * roundings[name])
    return twin


def random_like(example: Any) -> Any:
    """An example of the same shapes with standard normal values, the same numbers on every device."""
    generator = torch.Generator().manual_seed(0)

    def draw(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        drawn = torch.randn(value.shape, generator=generator, dtype=torch.float64, device="cpu")
        return drawn.to(value.device)

    return pytree.tree_map(draw, example)


def gap(old: Sequence[Tensor], new: Sequence[Tensor]) -> float:
    """The largest difference; infinite where shapes or finiteness differ."""
    if [t.shape for t in old] != [t.shape for t in new]:
        return math.inf
    largest = 0.0
    for a, b in zip(old, new, strict=True):
        finite = a.isfinite()
        if not torch.equal(finite, b.isfinite()):
            return math.inf
        if finite.any():
            largest = max(largest, float((a[finite].double() - b[finite].double()).abs().max()))
    return largest


def _scale(values: Sequence[Tensor]) -> float:
    return max((float(t[t.isfinite()].abs().amax()) for t in values if t.isfinite().any()), default=0.0)
