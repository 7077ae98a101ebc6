"""What a scheme is: a function that fills a tensor, and the law it promises to keep."""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from musigma.init._fans import Fans, FansLike
from musigma.init._fans import fans as count_fans

F = TypeVar("F", bound=Callable[..., Tensor])
_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Law:
    """The distribution of one entry of a tensor, as far as it is promised.

    Attributes:
        mean: expected value.
        var: variance.
        kurtosis: E[(w−mean)⁴]/var²; with it the sampling error of the variance of n entries is
            var·√((kurtosis − 1)/n).
        low, high: no entry lies outside [low, high].

    Example:
        >>> import torch, musigma as ms
        >>> ms.init.Law(0.0, 4.0).std
        2.0
    """

    mean: float
    var: float
    kurtosis: float = 3.0
    low: float = -math.inf
    high: float = math.inf

    @property
    def std(self) -> float:
        """Square root of the variance."""
        return math.sqrt(self.var)


@dataclass(frozen=True)
class Setting:
    """What a law may depend on: the tensor's shape, its fans, the scheme's options (defaults filled in).

    Example:
        >>> Setting((2, 3), Fans(3, 2), {}).fans.fan_in
        3
    """

    shape: tuple[int, ...]
    fans: Fans
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Sample:
    """One input on which the generic test holds a scheme to its law, or on which it must fail.

    Attributes:
        shape: the tensor's shape.
        options: keyword options of the call.
        error: the exception class the call must raise; None for an input that works.

    Example:
        >>> import torch, musigma as ms
        >>> ms.init.Sample((40, 50)).error is None
        True
    """

    shape: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    error: type[Exception] | None = None


@dataclass(frozen=True)
class Scheme:
    """A registered scheme: the function, its law in words and as a function, and where it comes from.

    Attributes:
        name: the function's name without the trailing underscore.
        function: fills a tensor in place and returns it.
        declared: the law, given a `Setting`.
        formula: the law in one line, for tables.
        source: the paper or the library it was taken from.
        samples: inputs for the generic tests, good and bad.

    Example:
        >>> import torch, musigma as ms
        >>> ms.init.SCHEMES["xavier_normal"].law((22, 10)).var
        0.0625
    """

    name: str
    function: Callable[..., Tensor]
    declared: Callable[[Setting], Law]
    formula: str
    source: str
    samples: tuple[Sample, ...]

    def law(
        self, shape: tuple[int, ...], *, fans: FansLike | None = None, options: Mapping[str, Any] = _NONE
    ) -> Law:
        """The law this scheme promises for a tensor.

        Args:
            shape: the tensor's shape.
            fans: its effective fans; default: counted from the shape.
            options: the options the scheme is called with.

        Returns:
            Mean, variance, kurtosis and bounds of one entry.

        Example:
            >>> import torch, musigma as ms
            >>> ms.init.SCHEMES["lecun_uniform"].law((64, 3)).high
            1.0
        """
        defaults = {
            k: p.default
            for k, p in inspect.signature(self.function).parameters.items()
            if p.default is not inspect.Parameter.empty
        }
        counted = _count(shape) if fans is None else Fans(*fans)
        return self.declared(Setting(tuple(shape), counted, {**defaults, **options}))


SCHEMES: dict[str, Scheme] = {}

_SAMPLES = (
    Sample((60, 50)),
    Sample((63, 1)),
    Sample((1, 100)),
    Sample((24, 5, 3, 3)),
    Sample((16, 7, 5)),
    Sample((5,), error=ValueError),
)


def _count(shape: tuple[int, ...]) -> Fans:
    # A 1-D tensor has no fans of its own; a law that needs them is given them.
    return count_fans(torch.empty(shape, device="meta")) if len(shape) > 1 else Fans(math.nan, math.nan)


def scheme(
    *,
    law: Callable[[Setting], Law],
    formula: str,
    source: str,
    samples: tuple[Sample, ...] = _SAMPLES,
    any_dtype: bool = False,
) -> Callable[[F], F]:
    """Register a function as a scheme and give it what every scheme does alike.

    The registered function refuses what is no real floating-point tensor, leaves tensors without
    elements alone, and runs without autograd.

    Args:
        law: the distribution it promises for a `Setting`.
        formula: the same in one line.
        source: the paper or library.
        samples: inputs for the generic tests.
        any_dtype: whether integers and complex numbers can be written too.

    Returns:
        The decorator.

    Raises:
        ValueError: a scheme of that name exists already.

    Example:
        >>> from musigma.init import SCHEMES
        >>> SCHEMES["zeros"].formula
        'w = 0'

    References:
        None.
    """

    def register(function: F) -> F:
        name = function.__name__.rstrip("_")
        if name in SCHEMES and SCHEMES[name].function.__module__ != function.__module__:
            raise ValueError(f"scheme names must be unique, but {name!r} is registered already")

        @functools.wraps(function)
        def checked(w: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            _require_writable(w, function.__name__, any_dtype)
            if w.numel() == 0:
                return w
            with torch.no_grad():
                function(w, *args, **kwargs)
            return w

        SCHEMES[name] = Scheme(name, checked, law, formula, source, samples)
        return cast(F, checked)

    return register


def _require_writable(w: Tensor, name: str, any_dtype: bool) -> None:
    if not isinstance(w, Tensor):
        raise TypeError(f"{name} fills a tensor, got {type(w).__name__}; pass module.weight, not the module")
    if not any_dtype and not w.dtype.is_floating_point:
        # torch raises NotImplementedError for its own random fills of such tensors.
        raise NotImplementedError(
            f"{name} needs a real floating-point tensor, got {w.dtype}; initialize before you quantize"
        )
