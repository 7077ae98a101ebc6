"""One rule of an initialization: a pattern, and a scheme made ready to be called."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from musigma.init.schemes._scheme import SCHEMES, Scheme

SchemeLike = str | Callable[..., object]


@dataclass(frozen=True)
class Rule:
    """A pattern and what to do with the tensors it matches.

    Attributes:
        pattern: glob over qualified parameter names.
        call: fills a tensor in place.
        label: the scheme in words.
        scheme: the registered scheme behind it, or None for a foreign function.
        options: the keywords that were fixed by `functools.partial`.
        open: the keyword parameters that may still be given, and whether they have a default.
    """

    pattern: str
    call: Callable[..., object]
    label: str
    scheme: Scheme | None
    options: Mapping[str, Any]
    open: Mapping[str, bool]

    def fill(self, w: Tensor, generator: torch.Generator, keywords: Mapping[str, Any]) -> None:
        """Call the scheme on a tensor, with the generator's numbers and no others.

        Args:
            w: filled in place.
            generator: a CPU generator; the numbers used up are used up in it.
            keywords: further keywords that the scheme accepts.
        """
        if "generator" in self.open:
            self.call(w, generator=generator, **keywords)
            return
        if self.scheme is not None:  # it draws nothing, or from a generator of the caller's
            self.call(w, **keywords)
            return
        # A foreign function draws from torch's own generator: lend it this one's numbers and take them back.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.set_state(generator.get_state())
            self.call(w, **keywords)
            generator.set_state(torch.default_generator.get_state())


def make_rule(pattern: str, scheme: SchemeLike) -> Rule:
    """Look up a scheme and see which keywords it takes.

    Args:
        pattern: glob over qualified parameter names.
        scheme: a name in SCHEMES, a function that fills a tensor in place, or a `functools.partial`.

    Returns:
        The rule.

    Raises:
        ValueError: no scheme of that name; the message has the nearest ones.
        TypeError: neither a name nor callable.

    Example:
        >>> make_rule("*.weight", "he_normal").label
        'he_normal'

    References:
        None.
    """
    if isinstance(scheme, str):
        scheme = _by_name(scheme)
    if not callable(scheme):
        raise TypeError(
            f"the rule for {pattern!r} must be a scheme's name or a function, got {type(scheme).__name__}"
        )
    partial = scheme if isinstance(scheme, functools.partial) else None
    function = partial.func if partial else scheme
    options = dict(partial.keywords) if partial else {}
    known = next((s for s in SCHEMES.values() if s.function is function), None)
    name = known.name if known else getattr(function, "__name__", repr(function))
    listed = ", ".join(f"{k}={getattr(v, '__name__', None) or repr(v)}" for k, v in options.items())
    label = f"{name}({listed})" if listed else name
    return Rule(pattern, scheme, label, known, options, _open_keywords(function, options))


def _open_keywords(function: Callable[..., object], options: Mapping[str, Any]) -> dict[str, bool]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature
        return {}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        k: p.default is not inspect.Parameter.empty
        for k, p in parameters.items()
        if p.kind in kinds and k not in options
    }


def _by_name(name: str) -> Callable[..., Tensor]:
    found = SCHEMES.get(name.rstrip("_"))
    if found is None:
        near = difflib.get_close_matches(name.rstrip("_"), SCHEMES, n=3)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known are {sorted(SCHEMES)}"
        raise ValueError(f"there is no scheme {name!r}; {hint}")
    return found.function
