"""Residual blocks: where the normalization of a Transformer stands."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from musigma.nn._layer_norm import LayerNorm
from musigma.nn._rms_norm import RMSNorm


class _Residual(nn.Module):
    def __init__(self, sublayer: nn.Module, norm: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.sublayer = sublayer
        self.norm = norm
        self.dropout = nn.Dropout(dropout)

    def _branch(self, x: Tensor, skip: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """dropout(sublayer(x)), made sure to be something that can be added to the skip connection."""
        out = self.sublayer(x, *args, **kwargs)
        if not isinstance(out, Tensor):
            raise TypeError(
                f"{type(self).__name__}'s sublayer must return one tensor, got {type(out).__name__} from "
                f"{type(self.sublayer).__name__}; wrap it in a module that returns what is to be added"
            )
        if out.shape != skip.shape:
            raise ValueError(
                f"{type(self).__name__}'s sublayer must keep the shape: {type(self.sublayer).__name__} made "
                f"{tuple(out.shape)} of {tuple(skip.shape)}, which cannot be added"
            )
        return self.dropout(out)


def _adds(norm: nn.Module) -> bool:
    """Whether the norm itself can add: one of ours, with no hook that expects the sum."""
    return type(norm) in (LayerNorm, RMSNorm) and not (norm._forward_pre_hooks or norm._forward_hooks)


class AddNorm(_Residual):
    """Add, then normalize: the original Transformer's placement (post-norm).

        y = norm(x + dropout(sublayer(x)))

    Every residual sum is normalized, so the stream keeps its scale, but the gradient passes a norm at every
    block and shrinks with depth: deep post-norm stacks need a learning-rate warm-up (Xiong et al. 2020).

    Args:
        sublayer: attention or feed-forward; returns one tensor of its input's shape.
        norm: the normalization, e.g. ``ms.nn.LayerNorm(d)``.
        dropout: the probability with which a value of the sublayer's output is dropped in training.

    Example:
        >>> import torch, musigma as ms
        >>> block = ms.nn.AddNorm(torch.nn.Linear(4, 4), ms.nn.LayerNorm(4))
        >>> y = block(torch.randn(2, 4))
        >>> bool(y.mean(-1).abs().max() < 1e-6)
        True

    References:
        Vaswani et al. 2017, "Attention Is All You Need", section 3.1.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """norm(x + dropout(sublayer(x, *args, **kwargs))).

        Args:
            x: whatever shape sublayer and norm take.
            *args, **kwargs: passed to the sublayer (an attention mask, say).

        Returns:
            like x.

        Raises:
            TypeError: the sublayer returned something else than a tensor.
            ValueError: the sublayer changed the shape.
        """
        out = self._branch(x, x, args, kwargs)
        if out.dtype is x.dtype and _adds(self.norm):
            return self.norm(x, residual=out)[0]
        return self.norm(x + out)


class PreNorm(_Residual):
    """Normalize, transform, then add: the placement of GPT-2 and Llama (pre-norm).

        y = x + dropout(sublayer(norm(x)))

    The residual stream itself is never normalized, so gradients reach every block unscaled; its variance
    grows with depth, and the last block needs a norm after it.

    Args:
        sublayer: attention or feed-forward; returns one tensor of its input's shape.
        norm: the normalization, e.g. ``ms.nn.RMSNorm(d)``.
        dropout: the probability with which a value of the sublayer's output is dropped in training.

    Example:
        >>> import torch, musigma as ms
        >>> block = ms.nn.PreNorm(torch.nn.Linear(4, 4), ms.nn.RMSNorm(4))
        >>> block(torch.randn(2, 4)).shape
        torch.Size([2, 4])

    References:
        Xiong et al. 2020, "On Layer Normalization in the Transformer Architecture".
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x + dropout(sublayer(norm(x), *args, **kwargs)).

        Args:
            x: whatever shape sublayer and norm take.
            *args, **kwargs: passed to the sublayer (an attention mask, say).

        Returns:
            like x.

        Raises:
            TypeError: the sublayer returned something else than a tensor.
            ValueError: the sublayer changed the shape.
        """
        return x + self._branch(self.norm(x), x, args, kwargs)
