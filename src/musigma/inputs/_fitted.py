"""What a Standardizer has learned, and the attributes that show it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from musigma.inputs._estimator import Estimator, not_fitted
from musigma.inputs._tally import Tally, feature_count
from musigma.statistics import Moments


@dataclass(frozen=True, eq=False)
class Learned:
    """A tally, the shape its features had, and whether the first data came as NumPy arrays."""

    tally: Tally
    shape: tuple[int, ...]
    numpy: bool


class Fitted(Estimator):
    """The attributes that end in an underscore, read off one tally, so that they can't contradict it."""

    with_mean: bool
    with_std: bool
    _learned: Learned | None = None

    def __sklearn_is_fitted__(self) -> bool:
        return self._learned is not None and self._learned.tally.positions > 0

    def _known(self) -> Learned:
        if self._learned is None or self._learned.tally.positions == 0:
            raise not_fitted(
                f"This {type(self).__name__} instance is not fitted yet: it has seen no data. Call fit first."
            )
        return self._learned

    def _shown(self, per_feature: Tensor) -> Any:
        known = self._known()
        value = per_feature.reshape(known.shape).clone()
        return value.numpy() if known.numpy else value

    def _spread(self) -> Tensor:
        tally = self._known().tally
        return torch.where(tally.constant(), 1.0, tally.std())

    @property
    def mean_(self) -> Any:
        mean = self._known().tally.center()[0]
        return self._shown(mean) if self.with_mean or self.with_std else None

    @property
    def var_(self) -> Any:
        var = self._known().tally.var()
        return self._shown(var) if self.with_std else None

    @property
    def scale_(self) -> Any:
        scale = self._spread()
        return self._shown(scale) if self.with_std else None

    @property
    def constant_(self) -> Any:
        return self._shown(self._known().tally.constant())

    @property
    def n_samples_seen_(self) -> Any:
        count = self._known().tally.moments.count
        if bool((count == count.round()).all()):
            count = count.to(torch.int64)
        return count[0].item() if bool((count == count[0]).all()) else self._shown(count)

    @property
    def n_features_in_(self) -> int:
        learned = self._learned if self._learned is not None else self._known()
        return feature_count(learned.shape)

    @property
    def moments_(self) -> Moments:
        known = self._known()
        tally = known.tally
        count, m2 = tally.moments.count, tally.moments.m2 * tally.unit.square()
        triple = (count, tally.center()[0].nan_to_num(0.0), m2)  # the empty set is (0, 0, 0)
        return Moments(*(t.reshape(known.shape).clone() for t in triple))
