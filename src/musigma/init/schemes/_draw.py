"""Fill a tensor with numbers that depend on the generator and the shape, never on dtype or layout."""

from collections.abc import Callable

import torch
from torch import Tensor

# Entries that a chunked draw holds in float64 at a time: 8 MiB.
_CHUNK = 1 << 20


def fill_normal(w: Tensor, mean: float, std: float, generator: torch.Generator | None) -> None:
    """Write independent N(mean, std²) entries.

    Args:
        w: (*), any floating dtype and layout; numbers are drawn in float32, then rounded.
        mean: expected value.
        std: standard deviation, at least 0.
        generator: source of randomness; default: torch's own. Its device is where the numbers are drawn.

    Example:
        >>> w = torch.empty(2, 2)
        >>> fill_normal(w, 1.0, 0.0, None); w.tolist()
        [[1.0, 1.0], [1.0, 1.0]]

    References:
        Box & Muller 1958 (torch's generator).
    """
    if not std >= 0:
        raise RuntimeError(f"normal expects std >= 0.0, but found std {std}; pass a standard deviation")
    _fill(w, generator, lambda base: base.normal_(mean, std, generator=generator))


def fill_uniform(w: Tensor, low: float, high: float, generator: torch.Generator | None) -> None:
    """Write independent entries, uniform between two bounds.

    Args:
        w: (*), any floating dtype and layout; numbers are drawn in float32, then rounded.
        low: lower bound.
        high: upper bound, at least `low`.
        generator: source of randomness; default: torch's own.

    Example:
        >>> w = torch.empty(100)
        >>> fill_uniform(w, 2.0, 3.0, None); bool(((w >= 2) & (w <= 3)).all())
        True

    References:
        None.
    """
    if not low <= high:
        raise RuntimeError(f"uniform expects low <= high, but found low={low} > high={high}; swap them")
    _fill(w, generator, lambda base: base.uniform_(low, high, generator=generator))


def standard_normal(shape: tuple[int, ...], w: Tensor, generator: torch.Generator | None) -> Tensor:
    """Independent N(0, 1) numbers, drawn in float32 and handed over in float64 for further arithmetic.

    Args:
        shape: how many.
        w: the tensor they are for; says which device to draw on if there is no generator.
        generator: source of randomness; default: torch's own.

    Returns:
        (*shape) numbers.

    Example:
        >>> standard_normal((3,), torch.empty(1), None).dtype
        torch.float64

    References:
        None.
    """
    drawn = torch.empty(shape, dtype=torch.float32, device=_device(w, generator)).normal_(generator=generator)
    return drawn.to(wide(drawn))


def fill_by_quantile(
    w: Tensor, quantile: Callable[[Tensor], Tensor], generator: torch.Generator | None
) -> None:
    """Write quantile(u) for independent u, uniform on [0, 1), in float64 and rounded to nearest at the end.

    Args:
        w: (*), any floating dtype and layout.
        quantile: inverse distribution function, elementwise on float64 tensors.
        generator: source of randomness; default: torch's own.

    Example:
        >>> w = torch.empty(100)
        >>> fill_by_quantile(w, lambda u: u + 5, None); bool(((w >= 5) & (w <= 6)).all())
        True

    References:
        Devroye 1986, Non-Uniform Random Variate Generation, II.2.
    """
    if w.is_meta:
        return
    whole = torch.empty(w.shape, dtype=w.dtype, device=_device(w, generator))
    # In pieces: a float64 copy of a large embedding would be twice its size.
    for piece in whole.view(-1).split(_CHUNK):
        u = torch.empty(piece.shape, dtype=wide(piece), device=piece.device)
        piece.copy_(quantile(u.uniform_(generator=generator)))
    w.copy_(whole)


def wide(x: Tensor) -> torch.dtype:
    """The widest dtype that a tensor's device computes in.

    Args:
        x: any tensor.

    Returns:
        float64, or float32 on devices without it.

    Example:
        >>> wide(torch.empty(1))
        torch.float64

    References:
        None.
    """
    return torch.float32 if x.device.type == "mps" else torch.float64


def _device(w: Tensor, generator: torch.Generator | None) -> torch.device:
    return w.device if generator is None else generator.device


def _fill(w: Tensor, generator: torch.Generator | None, draw: Callable[[Tensor], object]) -> None:
    if w.is_meta:
        return
    device = _device(w, generator)
    # torch's kernels draw different numbers for other dtypes and for strided memory.
    if w.dtype is torch.float32 and w.is_contiguous() and w.device == device:
        draw(w)
    elif w.is_contiguous() and device.type == "cpu":
        _fill_in_pieces(w, draw)
    else:
        whole = torch.empty(w.shape, dtype=torch.float32, device=device)
        draw(whole)
        w.copy_(whole)


def _fill_in_pieces(w: Tensor, draw: Callable[[Tensor], object]) -> None:
    """Like drawing a float32 tensor of w's size and rounding it, without the memory for all of it."""
    flat, size = w.view(-1), w.numel()
    # torch's CPU kernels go through a stream in blocks of 16, and differently below 16 numbers: pieces that
    # begin at a multiple of 16 and aren't shorter than that are the pieces of one large draw.
    starts = range(0, max(1, size - 15), _CHUNK)
    buffer = torch.empty(min(size, _CHUNK + 15), dtype=torch.float32, device="cpu")
    for start in starts:
        stop = size if start == starts[-1] else start + _CHUNK
        piece = buffer[: stop - start]
        draw(piece)
        flat[start:stop].copy_(piece)
