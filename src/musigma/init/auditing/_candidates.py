"""The laws that a tensor may have been drawn from, each with its numbers for this tensor."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from musigma.init._fans import Fans
from musigma.init.auditing._facts import Facts
from musigma.init.schemes._scheme import SCHEMES, Law

# Kurtosis and, in standard deviations, the bound of the normal law cut at ±2σ of its parent.
_CUT = SCHEMES["truncated_normal"].law((1,))
UNIFORM_KURTOSIS = 1.8
# What the label of a law ends in whose fans are torch's and not the layer's.
SUFFIX = " by torch's fans"


class Candidate(NamedTuple):
    """A law under the name people know it by, and whether the layer's own constructor draws from it.

    Example:
        >>> Candidate("normal(0.02)", normal(0.02)).law.std
        0.02
    """

    label: str
    law: Law
    usual: bool = False


def normal(std: float) -> Law:
    """N(0, std²).

    Args:
        std: standard deviation.

    Returns:
        The law.

    Example:
        >>> normal(0.5).var
        0.25

    References:
        None.
    """
    return Law(0.0, std**2)


def uniform(std: float) -> Law:
    """The centered uniform law of a standard deviation.

    Args:
        std: standard deviation.

    Returns:
        The law, with bounds ±√3·std.

    Example:
        >>> round(uniform(1.0).high, 4)
        1.7321

    References:
        None.
    """
    bound = math.sqrt(3) * std
    return Law(0.0, std**2, UNIFORM_KURTOSIS, -bound, bound)


def cut(std: float) -> Law:
    """The normal law cut at ±2σ of its parent, with the standard deviation after the cut.

    Args:
        std: standard deviation of the numbers.

    Returns:
        The law.

    Example:
        >>> round(cut(0.8796).high, 3)
        2.0

    References:
        JAX variance_scaling.
    """
    return Law(0.0, std**2, _CUT.kurtosis, _CUT.low * std, _CUT.high * std)


# Spreads that don't depend on the layer: torch's embeddings, Krizhevsky 2012, GPT-2 and BERT, the lecture
# notes, DeepSeek.
_FIXED = (1.0, 0.02, 0.01, 0.1, 0.05, 0.001, 0.006)
_FIXED_BOUNDS = (0.1, 0.08, 0.05, 0.01)
# Gains of torch.nn.init.calculate_gain (tanh, selu) and of leaky ReLU at the slopes in use.
_GAINS = (("tanh", 5 / 3), ("selu", 0.75), ("leaky_relu(0.2)", math.sqrt(2 / 1.04)))


def candidates(facts: Facts, branches: int = 0) -> Iterator[Candidate]:
    """Every law that is in use for such a tensor, the most usual first.

    Args:
        facts: the tensor.
        branches: how many residual branches the model adds up, for GPT-2's scaling.

    Yields:
        Labelled laws; those of musigma's schemes with this layer's true fans, those of torch.nn.init with
        the fans that torch counts where the two differ.

    Example:
        >>> from musigma.init.auditing._facts import read
        >>> facts, _ = read(nn.Linear(16, 4))
        >>> next(candidates(facts[0])).label
        'torch_default'

    References:
        The sources of `musigma.init.SCHEMES`.
    """
    yield from (candidate._replace(usual=True) for candidate in _own(facts))
    for count, suffix in _counts(facts):
        yield from _scaled(facts, count, suffix)
    yield from _fixed(facts, branches)
    yield from _registered(facts)


def _own(facts: Facts) -> Iterator[Candidate]:
    """What the layer's own constructor draws."""
    owner = facts.owner
    if isinstance(owner, nn.RNNBase | nn.RNNCellBase):
        yield Candidate("torch_default (1/√hidden)", uniform(1 / math.sqrt(3 * int(owner.hidden_size))))  # type: ignore[arg-type]
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
        yield Candidate("normal(1) (torch's embedding)", normal(1.0))
    if isinstance(owner, nn.MultiheadAttention) and facts.leaf == "in_proj_weight" and facts.torch_fans:
        yield Candidate("xavier_uniform" + SUFFIX, uniform(math.sqrt(2 / sum(facts.torch_fans))))
    if isinstance(owner, nn.Bilinear) and facts.values.dim() == 3:
        yield Candidate("torch_default", uniform(1 / math.sqrt(3 * facts.shape[1])))
    if facts.torch_fans is not None and facts.torch_fans.fan_in:
        yield Candidate("torch_default", uniform(1 / math.sqrt(3 * facts.torch_fans.fan_in)))
    elif facts.kind == "bias" and facts.fans is not None and facts.fans.fan_in:
        yield Candidate("torch_default_bias", uniform(1 / math.sqrt(3 * facts.fans.fan_in)))


def _counts(facts: Facts) -> Iterator[tuple[Fans, str]]:
    if facts.values.dim() < 2:
        return
    for fans, suffix in ((facts.fans, ""), (facts.torch_fans, SUFFIX)):
        differ = fans is not None and (not suffix or fans != facts.fans)
        if fans is not None and differ and min(fans) > 0:
            yield fans, suffix


def _scaled(facts: Facts, fans: Fans, suffix: str) -> Iterator[Candidate]:
    """The laws that scale with a fan, in the three shapes they are drawn in."""
    fan_in, fan_out = fans
    named = [
        ("he", 2 / fan_in),
        ("xavier", 2 / (fan_in + fan_out)),
        ("lecun", 1 / fan_in),
        ("he(fan_out)", 2 / fan_out),
        ("lecun(fan_out)", 1 / fan_out),
        ("xavier(gain √2)", 4 / (fan_in + fan_out)),
        *((f"he({label})", g**2 / fan_in) for label, g in _GAINS),
        *((f"xavier(gain {label})", 2 * g**2 / (fan_in + fan_out)) for label, g in _GAINS[:1]),
    ]
    for shape, law in (("normal", normal), ("uniform", uniform), ("truncated", cut)):
        for name, var in named:
            head, _, options = name.partition("(")
            label = f"{head}_{shape}" + (f"({options}" if options else "")
            yield Candidate(label + suffix, law(math.sqrt(var)))


def _registered(facts: Facts) -> Iterator[Candidate]:
    """Every registered scheme at its defaults, those of other people's packages too."""
    for name, scheme in SCHEMES.items():
        if facts.values.dim() < 2 or name == "torch_default_bias":
            continue  # a bias has no fans, and a weight no bias
        try:
            law = scheme.law(facts.shape, fans=facts.fans)
        except (ValueError, KeyError, TypeError, IndexError, ZeroDivisionError):
            continue  # it needs options, or another shape
        if law.var > 0 and law.kurtosis > 1 and math.isfinite(law.var):
            yield Candidate(name, law)


def _fixed(facts: Facts, branches: int) -> Iterator[Candidate]:
    for std in _FIXED:
        yield Candidate(f"normal({std:g})", normal(std))
        yield Candidate(f"truncated_normal({std:g})", cut(std))
        # A normal law cut at ±2 of a *parent* of this spread, as JAX and Keras do.
        yield Candidate(f"truncated_normal({std:g} before the cut)", cut(std / _CUT.high * 2))
    for bound in _FIXED_BOUNDS:
        yield Candidate(f"uniform(±{bound:g})", uniform(bound / math.sqrt(3)))
    if branches and facts.kind == "weight":
        for std in _FIXED[1:3]:
            yield Candidate(f"normal({std:g}/√{branches})", normal(std / math.sqrt(branches)))
    if facts.kind in ("embedding", "weight") and facts.values.dim() == 2:
        width = facts.shape[1]
        yield Candidate(f"normal(1/√{width})", normal(1 / math.sqrt(width)))
