"""scikit-learn's manners without scikit-learn: parameters, repr, tags, and the error for unfitted."""

from __future__ import annotations

import inspect
import sys
from functools import cache
from typing import Any, TypeVar

E = TypeVar("E", bound="Estimator")


class NotFittedError(ValueError, AttributeError):
    """Something was asked of an estimator that has not seen any data yet.

    Where scikit-learn has been imported, what is raised is scikit-learn's class of this name, too.
    """


@cache
def _shared_class(theirs: type[Exception]) -> type[NotFittedError]:
    return type("NotFittedError", (NotFittedError, theirs), {"__doc__": NotFittedError.__doc__})


def not_fitted(message: str) -> NotFittedError:
    """The error to raise: ours, and scikit-learn's if anybody could be waiting for it."""
    module = sys.modules.get("sklearn.exceptions")
    theirs = getattr(module, "NotFittedError", None)
    return NotFittedError(message) if theirs is None else _shared_class(theirs)(message)


class Estimator:
    """get_params, set_params and repr read off the constructor, which only stores its arguments."""

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        parameters = inspect.signature(cls).parameters
        return {name: p.default for name, p in parameters.items()}

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The constructor's arguments as they stand (`deep` is scikit-learn's; there is nothing nested)."""
        return {name: getattr(self, name) for name in self._defaults()}

    def set_params(self: E, **params: Any) -> E:
        """Change constructor arguments; nothing is changed if one of them does not exist."""
        known = self._defaults()
        for name in params:
            if name not in known:
                raise ValueError(
                    f"Invalid parameter {name!r} for estimator {self}. Valid parameters are: {list(known)}."
                )
        for name, value in params.items():
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        changed = (
            f"{name}={getattr(self, name)!r}"
            for name, default in self._defaults().items()
            if getattr(self, name) != default
        )
        return f"{type(self).__name__}({', '.join(changed)})"

    def __sklearn_tags__(self) -> Any:
        """What scikit-learn asks an estimator about itself; only scikit-learn calls this."""
        from sklearn.utils import InputTags, Tags, TargetTags, TransformerTags

        return Tags(
            estimator_type="transformer",
            target_tags=TargetTags(required=False),
            transformer_tags=TransformerTags(preserves_dtype=["float16", "float32", "float64"]),
            input_tags=InputTags(allow_nan=True),
        )
