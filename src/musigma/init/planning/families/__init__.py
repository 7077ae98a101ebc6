"""What each family of ops does to a signal: one file a family, each registering its ops."""

from musigma.init.planning.families import (
    _attention,
    _elementwise,
    _layers,
    _mixing,
    _norms,
    _pooling,
    _recurrent,
    _reductions,
    _views,
)

__all__ = [
    "_attention",
    "_elementwise",
    "_layers",
    "_mixing",
    "_norms",
    "_pooling",
    "_recurrent",
    "_reductions",
    "_views",
]
