"""Put the statistics of the data in front of the model, as a module with buffers."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from musigma.doctor import _treatments
from musigma.doctor._finding import Finding
from musigma.doctor._treatments import Applied, NotApplicable, Patient
from musigma.doctor.probes._data import named_tensors
from musigma.doctor.probes._entries import EntryMeasure
from musigma.doctor.probes._words import counted
from musigma.inputs import Standardizer

__all__ = ["Standardized"]

# A loader can be long; statistics of this many examples are known to 1 %.
_EXAMPLES = 10_000


class Standardized(nn.Module):
    """A model that standardizes some of its inputs first, and otherwise is the model it was.

    Attributes of the model inside are found through the wrapper; its parameters' names begin with "model.".

    Args:
        model: what gets the standardized inputs.
        layers: argument name -> the module that standardizes it.

    Example:
        >>> import torch, musigma as ms
        >>> from torch import nn
        >>> x = torch.tensor([[1.0], [3.0]])
        >>> net = Standardized(nn.Linear(1, 1), {"input": ms.inputs.Standardizer().fit(x).layer()})
        >>> net.in_features, net.standardize["input"](x).flatten().tolist()
        (1, [-1.0, 1.0])
    """

    def __init__(self, model: nn.Module, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self.standardize = nn.ModuleDict(layers)
        self.model = model
        self.train(model.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model on its arguments, those that have statistics standardized."""
        bound = inspect.signature(self.model.forward).bind(*args, **kwargs)
        for name, layer in self.standardize.items():
            if isinstance(bound.arguments.get(name), Tensor):
                bound.arguments[name] = layer(bound.arguments[name])
        return self.model(*bound.args, **bound.kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)


@_treatments.treatment("standardize", mends=("INP101", "INP104"), order=10)
def apply(patient: Patient, findings: tuple[Finding, ...]) -> Applied:
    """Fit a `Standardizer` per input on the data, and wrap the model."""
    wanted = dict.fromkeys(name for f in findings for name in f.where)
    layers: dict[str, nn.Module] = {}
    said = []
    for name in wanted:
        fitted, axes = _fit(patient, name)
        layers[name] = fitted.layer()
        said.append(f"{name} over {counted(fitted.n_features_in_, axes)}")
    treated = Standardized(patient.model, layers)
    return Applied(
        treated,
        f"put a Standardize layer in front: {', '.join(said)}; parameters are called model.* now",
        {"inputs": list(layers)},
    )


def _fit(patient: Patient, name: str) -> tuple[Standardizer, str]:
    entries = [e for e in patient.exam.trace.entries if e.inputs == (name,)]
    if not entries:
        raise NotApplicable(f"{name} reaches the first layer together with other inputs")
    x = named_tensors(patient.model, patient.exam.inputs).get(name)
    if x is None:
        raise NotApplicable(f"{name} is no tensor argument of its own")
    axis = _axis(entries[0], x)
    if any(_axis(e, x) != axis for e in entries[1:]):
        raise NotApplicable(f"{name} reaches several first layers with its features on different axes")
    fitted, seen = Standardizer(axis=axis), 0
    for batch in patient.batches:
        part = named_tensors(patient.model, batch).get(name)
        if part is None or part.shape[1:] != x.shape[1:]:
            raise ValueError(f"data must hold batches like the inputs, with {name} of shape (n, {_rest(x)})")
        fitted.partial_fit(part)
        seen += len(part)
        if seen >= _EXAMPLES:
            break
    return fitted, "channel" if isinstance(axis, int) and x.ndim > 2 else "feature"


def _rest(x: Tensor) -> str:
    return ", ".join(map(str, x.shape[1:]))


def _axis(entry: EntryMeasure, x: Tensor) -> int | tuple[int, ...]:
    if entry.shape == tuple(x.shape):
        return entry.axis
    if len(entry.shape) == 2 and entry.shape == tuple(x.flatten(1).shape):
        # Divided by a std of its own, a pixel that is nearly always dark would drown the others
        return 1 if entry.channels is not None else tuple(range(1, x.ndim))
    raise NotApplicable(
        f"the model makes {entry.shape} of {tuple(x.shape)} on the way to {entry.node.module}: standardize "
        "the data, or put the layer where the features have an axis of their own"
    )
