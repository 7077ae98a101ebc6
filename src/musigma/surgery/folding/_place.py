"""A place where something was folded away, as it is planned before anything changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor, nn

from musigma.ops import activate
from musigma.surgery._places import Observed, replace_module
from musigma.surgery.folding._layers import Edit


@dataclass(frozen=True)
class Place:
    """One fold.

    Args:
        path: the module that is folded away.
        line: what the certificate says of it, after its name.
        edits: the changes, in order.
        witnesses: the modules whose outputs have to stay what they were.
        removed: nodes that the model no longer runs; values pass there unchanged.
        between: the modules whose outputs become others, on the way to the witnesses.
        untied: layers that get a weight of their own.
        kind: set where a module may be a place twice.
    """

    path: str
    line: str
    edits: tuple[Edit, ...] = field(repr=False)
    witnesses: tuple[str, ...]
    removed: frozenset[int] = frozenset()
    between: frozenset[str] = frozenset()
    untied: frozenset[str] = frozenset()
    kind: str = ""

    @property
    def key(self) -> str:
        """What tells the place from every other."""
        return f"{self.path} ({self.kind})" if self.kind else self.path

    def __str__(self) -> str:
        return f"{self.path}: {self.line}"

    def apply(self, model: nn.Module) -> None:
        """Make the changes, in place."""
        for edit in self.edits:
            edit(model)


class Folded(nn.Identity):
    """What is left of a norm that its caller hands a sum or an activation too."""

    def forward(self, input: Tensor, *, add: Tensor | None = None, activation: str | None = None) -> Tensor:
        x = input if add is None else input + add
        return x if activation is None else activate(x, activation)


def remove(path: str, *, fused: bool) -> Edit:
    """Put an identity where a module was."""

    def edit(model: nn.Module) -> None:
        replace_module(model, path, Folded() if fused else nn.Identity())

    return edit


def names(items: Iterable[str]) -> str:
    """Names joined for a sentence, each once."""
    return ", ".join(dict.fromkeys(items))


@dataclass
class Plan:
    """What will be folded and what will not.

    Args:
        observed: the model as it ran.
        excluded: places that were tried and did not hold, with what happened.
    """

    observed: Observed
    excluded: dict[str, str] = field(default_factory=dict)
    places: list[Place] = field(default_factory=list)
    refused: dict[str, list[str]] = field(default_factory=dict)

    @property
    def removed(self) -> frozenset[int]:
        """The nodes that are gone so far."""
        return frozenset().union(*(place.removed for place in self.places))

    @property
    def untied(self) -> frozenset[str]:
        """The layers that have a weight of their own by now."""
        return frozenset().union(*(place.untied for place in self.places))

    @property
    def done(self) -> set[str]:
        """The keys of the places so far."""
        return {place.key for place in self.places}

    def witnesses(self) -> dict[str, tuple[str, ...]]:
        """By place the modules whose outputs stay what they were when all is done.

        A layer that takes in a norm in front of it may have taken in one behind it too: then that one's
        witness speaks for both.
        """
        onward = {path: place.witnesses for place in self.places for path in place.between}

        def last(path: str, seen: frozenset[str]) -> list[str]:
            if path not in onward or path in seen:
                return [path]
            return [end for further in onward[path] for end in last(further, seen | {path})]

        return {
            place.path: tuple(
                dict.fromkeys(end for path in place.witnesses for end in last(path, frozenset()))
            )
            for place in self.places
        }

    def refuse(self, path: str, reason: str) -> None:
        """Note why a place was left alone; an empty reason adds nothing to those of other kinds."""
        if reason:
            self.refused.setdefault(path, []).append(reason)
