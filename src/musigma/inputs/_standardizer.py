"""The Standardizer: a data set's mean and standard deviation, however large it is and however it comes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from musigma.inputs._arrays import Data, as_data, is_array
from musigma.inputs._batches import Key, batches, inputs_of
from musigma.inputs._checks import (
    as_mask,
    as_weights,
    check_parameters,
    feature_shape,
    kept_dims,
    refuse_infinite,
    refuse_missing,
    require_features,
)
from musigma.inputs._fitted import Fitted, Learned
from musigma.inputs._tally import Tally, feature_count, labels, tally
from musigma.nn._standardize import Standardize, align, output_dtype, standardize, unstandardize


class Standardizer(Fitted):
    r"""Bring every feature to mean 0 and standard deviation 1, with statistics learned from data.

        z = (x − mean_) / scale_,    scale_ = √var_, or 1 for a constant feature

    An estimator with scikit-learn's manners that also takes tensors, loaders and images, and gives the module
    to put in front of a model (`layer`). Each block is summed in float64 around a value of the data, and
    blocks are merged (Chan, Golub & LeVeque), so any chunking gives the same statistics, integers do not
    overflow and a large mean costs nothing.

    **Axes.** `axis` names the axis whose entries have statistics of their own; all others are averaged over.
    The default, 1, means per feature for (n, features) and per channel for (n, c, h, w).

    **Types.** The result follows the input: a tensor gives a tensor on its device, an array (data frame,
    list) a NumPy array. Fitted attributes are float64 and follow the data of the fit: NumPy arrays, or
    tensors on the CPU. float16, bfloat16, float32 and float64 keep their type and are computed in float32 or
    wider; integers, booleans and 8-bit floats become float32.

    **Missing values.** NaN is left out of the statistics, counted per feature, and stays NaN in the result. A
    feature without a single value has mean and scale NaN. Infinities are refused by feature.

    **Constant features** come out as 0, and new data is not scaled by the spread of rounding errors: scale
    1. What counts as constant is decided by an error bound relative to the feature's own mean and spread
    (`Tally.constant`), never by an absolute threshold.

    Args:
        axis: 1; −1 for channels last; several axes for one statistic per position; None for a single one.
        with_mean: subtract the mean.
        with_std: divide by the standard deviation.
        missing: "keep" NaN, or "raise".
        clip: the largest absolute result of `transform`, None for no limit.

    Attributes:
        mean_: the mean of each feature, float64; None if neither `with_mean` nor `with_std`.
        var_: the biased (1/n) variance, float64; None without `with_std`.
        scale_: what is divided by; None without `with_std`.
        constant_: which features do not vary.
        n_samples_seen_: how many values (or what total weight) each statistic is made of: one number if it
            is the same for all. For (n, c, h, w) pixels count, n·h·w.
        n_features_in_: how many statistics there are.
        moments_: the `Moments` of the data: count, mean, m2.

    Example:
        >>> import torch, musigma as ms
        >>> x = torch.tensor([[1.0, 255.0], [2.0, 255.0], [3.0, 255.0]])
        >>> s = ms.inputs.Standardizer().fit(x)
        >>> s.transform(x)
        tensor([[-1.2247,  0.0000],
                [ 0.0000,  0.0000],
                [ 1.2247,  0.0000]])
        >>> s.mean_.tolist(), s.constant_.tolist(), s.n_samples_seen_
        ([2.0, 255.0], [False, True], 3)
        >>> s.layer()
        Standardize(num_features=2, dim=1)

    References:
        Chan, Golub & LeVeque 1983, "Algorithms for computing the sample variance".
        LeCun, Bottou, Orr & Müller 1998, "Efficient BackProp", section 4.3.
    """

    def __init__(
        self,
        *,
        axis: int | tuple[int, ...] | None = 1,
        with_mean: bool = True,
        with_std: bool = True,
        missing: Literal["keep", "raise"] = "keep",
        clip: float | None = None,
    ) -> None:
        self.axis = axis
        self.with_mean = with_mean
        self.with_std = with_std
        self.missing = missing
        self.clip = clip

    def fit(
        self, x: Any, y: Any = None, sample_weight: Any = None, *, mask: Any = None, key: Key = None
    ) -> Standardizer:
        """Learn the statistics of x, forgetting what was learned before.

        Args:
            x: (n, *shape): a tensor, an array, a data frame, rows of numbers; or a DataLoader or any
                iterable of batches, read once, one batch in memory at a time. A batch is an array, a tuple
                or list that starts with one (inputs, targets), or a dict.
            y: ignored, for scikit-learn's pipelines.
            sample_weight: (n,), one non-negative weight per example, or a number for all; 0 is as if the
                example were not there.
            mask: boolean, broadcastable to x; True takes part.
            key: where the inputs are in a batch: a key of a dict, an index of a tuple.

        Returns:
            self.

        Raises:
            ValueError: no values at all, infinities (named by feature), strings or dates (by column), a
                negative or NaN weight, weights that sum to 0, or batches that do not fit each other. What
                was learned before is kept.
            TypeError: x is no array and no iterable of batches.
        """
        if is_array(x) or hasattr(x, "tocsr"):
            data = as_data(x)
            learned = self._absorb(data, None, sample_weight, mask)
            if learned.tally.positions == 0:
                raise ValueError(self._nothing(data, sample_weight))
        else:
            if sample_weight is not None or mask is not None:
                raise ValueError(
                    "sample_weight and mask belong to one array; give them to partial_fit, batch by batch"
                )
            with closing(batches(x, key)) as arrays:
                learned = self._stream(arrays)
        self._learned = learned
        return self

    def partial_fit(
        self, x: Any, y: Any = None, sample_weight: Any = None, *, mask: Any = None, key: Key = None
    ) -> Standardizer:
        """Learn from one more batch; any chunking of a data set gives what `fit` gives on all of it.

        Args:
            x: one batch of (n, *shape), as an array or as a loader yields it; n may be 0.
            y: ignored.
            sample_weight, mask, key: as in `fit`.

        Returns:
            self.

        Raises:
            ValueError, TypeError: as in `fit`, or another number of features than before; nothing has been
                learned then.
        """
        data = as_data(inputs_of(x, key))
        self._learned = self._absorb(data, self._learned, sample_weight, mask)
        return self

    def merge(self, *others: Standardizer) -> Standardizer:
        """A new Standardizer that has seen what self and the others have seen; they stay as they are.

        For parts of a data set that were read in parallel. Merging is associative up to rounding; one that
        has seen nothing changes nothing. The parameters are self's.

        Args:
            others: fitted along the same axis, on the same features.

        Raises:
            ValueError: they were fitted along other axes or with another number of features.

        Example:
            >>> import torch, musigma as ms
            >>> a = ms.inputs.Standardizer().fit(torch.tensor([[1.0], [3.0]]))
            >>> b = ms.inputs.Standardizer().fit(torch.tensor([[2.0], [4.0], [9.0], [-1.0], [6.0]]))
            >>> round(a.merge(b).var_.item(), 12)
            9.387755102041
        """
        merged = type(self)(**self.get_params())
        for part in (self, *others):
            if part.axis != self.axis:
                raise ValueError(f"only the same axis can be merged: {self.axis} and {part.axis}")
            if part._learned is None:
                continue
            if merged._learned is None:
                merged._learned = part._learned
                continue
            mine, theirs = merged._learned, part._learned
            require_features(theirs.shape, mine.shape, "the Standardizer to merge")
            with _named_overflow(mine.shape, None):
                merged._learned = Learned(mine.tally + theirs.tally, mine.shape, mine.numpy)
        return merged

    def _stream(self, arrays: Iterator[Any]) -> Learned:
        learned = None
        for number, array in enumerate(arrays):
            try:
                learned = self._absorb(as_data(array), learned, None, None)
            except (TypeError, ValueError) as error:
                error.add_note(f"in batch {number}")
                raise
        if learned is None or learned.tally.positions == 0:
            raise ValueError(
                "fit needs at least one value, and this iterable yielded none (an iterator is read only once)"
            )
        return learned

    def _absorb(
        self,
        data: Data,
        before: Learned | None,
        sample_weight: Any,
        mask: Any,
    ) -> Learned:
        """What is known after one more array; self is not touched."""
        dims = kept_dims(self.axis, data)
        shape = feature_shape(data, dims)
        check_parameters(self.missing, self.clip)
        numpy = not isinstance(data.array, Tensor)
        total = Tally.empty(feature_count(shape))
        if before is not None:
            require_features(shape, before.shape, "X")
            total, numpy = before.tally, before.numpy
        weights = as_weights(sample_weight, data)
        masks = as_mask(mask, data)
        for part, block in data.blocks():
            flat = _features_last(block.detach(), dims)
            weight = _block_weight(block, dims, part, weights, masks)
            refuse_infinite(flat, weight, shape, data.columns)
            if self.missing == "raise":
                refuse_missing(flat, weight, shape, data.columns)
            with _named_overflow(shape, data.columns):
                total = total + tally(flat, weight)
        return Learned(total, shape, numpy)

    @staticmethod
    def _nothing(data: Data, sample_weight: Any) -> str:
        if 0 in data.shape:
            what = "0 sample(s)" if data.shape[0] == 0 else "no values"
            return f"Found array with {what} (shape={data.shape}) while a minimum of 1 is required by fit."
        if sample_weight is not None:
            return "the weights sum to 0 (total weight 0), so no example takes part"
        return "the mask is False everywhere, so no value takes part"

    def transform(self, x: Any) -> Any:
        """(x − mean_) / scale_, as a new tensor or array.

        Args:
            x: one array (n, *shape) with the features of the fit. Gradients flow through a tensor.

        Returns:
            float16, bfloat16, float32 and float64 keep their type, everything else becomes float32.

        Raises:
            NotFittedError: before any data has been seen.
            ValueError: another number of features, infinities, or NaN with missing="raise".
        """
        return self._convert(x, invert=False)

    def inverse_transform(self, x: Any) -> Any:
        """x · scale_ + mean_, back in the units of the data; arguments and types as in `transform`."""
        return self._convert(x, invert=True)

    def fit_transform(self, x: Any, y: Any = None, sample_weight: Any = None, *, mask: Any = None) -> Any:
        """`fit`, then `transform` of the same array."""
        if not is_array(x):
            raise TypeError(
                f"fit_transform takes one array, got {type(x).__name__}; fit it, then transform each batch"
            )
        return self.fit(x, y, sample_weight, mask=mask).transform(x)

    def layer(self) -> Standardize:
        """The module that does what `transform` does, to put in front of a model.

        Raises:
            NotFittedError: before any data has been seen.
            ValueError: a feature had no value at all.
        """
        mean, tail, scale = self._statistics()
        shape = self._known().shape
        never = mean.isnan() | scale.isnan()
        if never.any():
            raise ValueError(
                f"{labels(never, shape, None)} had no value in the data, so no layer can hold it; "
                "leave it out of the data"
            )
        mean, tail, scale = (t.reshape(shape) for t in (mean, tail, scale))
        return Standardize(mean, scale, dim=self.axis, clip=self.clip, mean_tail=tail)

    def _statistics(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, its tail and the scale as they are applied: 0 and 1 where not asked for. (features,)"""
        mean, tail = self._known().tally.center()
        scale = self._spread()
        if not self.with_mean:
            mean, tail = torch.zeros_like(mean), torch.zeros_like(tail)
        return mean, tail, scale if self.with_std else torch.ones_like(scale)

    def _convert(self, x: Any, *, invert: bool) -> Any:
        statistics = self._statistics()
        data = as_data(x)
        dims = kept_dims(self.axis, data)
        features = self._known().shape
        require_features(feature_shape(data, dims), features, "X")
        mean, tail, scale = (align(t.reshape(features), dims, len(data.shape)) for t in statistics)

        def convert(block: Tensor) -> Tensor:
            self._examine(block.detach(), dims, features, data.columns)
            parts = (t.to(block.device) for t in (mean, tail, scale))
            y = unstandardize(block, *parts) if invert else standardize(block, *parts)
            if self.clip is not None and not invert:
                y = y.clamp(-self.clip, self.clip)
            return y.to(output_dtype(block))

        array = data.array
        if isinstance(array, Tensor) and (array.requires_grad or array.device.type != "cpu"):
            return convert(array).to(x.device)
        # block by block: temporaries that stay in the cache are three times as fast as ones of x's size
        dtype = output_dtype(data.block(slice(0, 0)))
        like = array if isinstance(array, Tensor) else torch.empty(data.shape, device="meta")
        out = torch.empty_like(like, dtype=dtype, device="cpu")
        for part, block in data.blocks():
            out[part] = convert(block)
        return out.to(x.device) if isinstance(array, Tensor) else out.numpy()

    def _examine(
        self, x: Tensor, dims: tuple[int, ...], shape: tuple[int, ...], columns: list[str] | None
    ) -> None:
        if not x.is_floating_point() or x.isfinite().all():
            return
        flat = _features_last(x, dims)
        refuse_infinite(flat, None, shape, columns)
        if self.missing == "raise":
            refuse_missing(flat, None, shape, columns)


@contextmanager
def _named_overflow(shape: tuple[int, ...], columns: list[str] | None) -> Iterator[None]:
    """Say which features a tally could not hold."""
    try:
        yield
    except OverflowError as error:
        which = labels(error.args[0], shape, columns)
        raise ValueError(
            f"the values of {which} lie further apart than float64 reaches; divide them by 2"
        ) from None


def _features_last(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """x as (values, features), the features in the order of `dims`."""
    others = [d for d in range(x.dim()) if d not in dims]
    features = feature_count(tuple(x.shape[d] for d in dims))
    return x.permute(*others, *dims).reshape(x.numel() // features, features)


def _block_weight(
    block: Tensor, dims: tuple[int, ...], part: slice, weights: Tensor | None, mask: Tensor | None
) -> Tensor | None:
    """The weight of every value of the block, (values, features): boolean for a mask alone."""
    weight = None if mask is None else _features_last(mask[part].to(block.device), dims)
    if weights is not None:
        rows = weights[part].to(block.device).reshape(-1, *[1] * (block.dim() - 1)).expand(block.shape)
        rows = _features_last(rows, dims)
        weight = rows if weight is None else rows * weight
    return weight
