"""What a user may pass as `scheme`, turned into a recipe."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from torch import nn

from musigma.init._rule import make_rule
from musigma.init.recipes._one_scheme import OneScheme
from musigma.init.recipes._recipe import RECIPES, Recipe
from musigma.init.schemes import SCHEMES

if TYPE_CHECKING:
    from musigma.init.planning import Plan


def find_recipe(scheme: object) -> Recipe | None:
    """The recipe that a name, a scheme or a recipe means.

    Args:
        scheme: "auto"; a name in RECIPES or SCHEMES (a recipe's comes first: "delta_orthogonal" takes
            linear layers too), with or without the trailing underscore; one of the schemes, or a
            `functools.partial` of one; or a recipe.

    Returns:
        The recipe; None for "auto".

    Raises:
        ValueError: no such name, and the message has the nearest; a scheme that lacks an option.
        TypeError: something else.

    Example:
        >>> find_recipe("fixup").name, find_recipe("he_normal").name, find_recipe("auto")
        ('fixup', 'he_normal', None)

    References:
        None.
    """
    if isinstance(scheme, Recipe) and hasattr(scheme, "name"):
        return scheme
    if not isinstance(scheme, str):
        if not callable(scheme):
            raise TypeError(f"scheme must be a name, a scheme or a recipe, got {type(scheme).__name__}")
        return OneScheme.of(make_rule("*", scheme))
    name = scheme.rstrip("_").lower().replace("-", "_")
    if name == "auto":
        return None
    if name in RECIPES:
        return RECIPES[name]
    if name in SCHEMES:
        return OneScheme.of(make_rule("*", name))
    near = difflib.get_close_matches(name, [*RECIPES, *SCHEMES, "auto"], n=3)
    hint = f"did you mean {' or '.join(map(repr, near))}?\n" if near else "there are:\n"
    raise ValueError(
        f"there is no scheme or recipe {scheme!r}; {hint}"
        f"  recipes: {', '.join(sorted(RECIPES))}\n  schemes: {', '.join(sorted(SCHEMES))}"
    )


def fitted(recipe: object, plan: Plan, model: nn.Module, example: Any) -> Plan:
    """Let a recipe that needs the example change what was drawn.

    Args:
        recipe: any recipe, or None.
        plan: what was drawn.
        model: the model.
        example: what to run it on.

    Returns:
        The plan with the fitted entries; as it was for recipes without `fit`.
    """
    fit = getattr(recipe, "fit", None)
    return plan if fit is None else fit(plan, model, example)
