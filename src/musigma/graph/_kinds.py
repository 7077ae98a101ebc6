"""What the op names of a graph mean: one table, asked by init, surgery and the doctor.

The names are those of `Node.op`. An op may be of several kinds: `add_layer_norm` is a norm and an
addition. A family that is missing here is simply of no kind, and every walk stops at it.
"""

from __future__ import annotations

from typing import Final


def ops(names: str) -> frozenset[str]:
    """The op names in a text."""
    return frozenset(names.split())


# The same numbers under another shape, order, dtype, device or autograd history.
VIEWS: Final = ops("""
    view reshape flatten unflatten squeeze unsqueeze transpose permute movedim contiguous expand
    broadcast_to repeat_interleave repeat tile getitem select narrow slice index_select split chunk
    unbind tensor_split diagonal as_strided unfold alias detach data clone to real imag
    view_as_real view_as_complex atleast rot90 flip roll resolve_conj resolve_neg pixel_shuffle
    pixel_unshuffle channel_shuffle
    """)

# Views that keep every element, each exactly once: what a per-channel argument may walk through.
RESHAPES: Final = VIEWS - ops("""
    expand broadcast_to repeat_interleave repeat tile getitem select narrow slice index_select split
    chunk unbind tensor_split diagonal as_strided unfold real imag
    """)

# Views that hand on only a part of what they read.
SELECTIONS: Final = ops("""
    getitem select narrow slice index_select split chunk unbind tensor_split diagonal as_strided
    unfold real imag
    """)

# Nonlinearities that map each element by itself.
ACTIVATIONS: Final = ops("""
    relu relu6 leaky_relu prelu rrelu elu selu celu gelu silu mish softplus softsign softshrink
    hardshrink tanhshrink tanh sigmoid hardtanh hardsigmoid hardswish logsigmoid threshold glu
    """)

# Activations bounded on at least one side that flatten out there: units can saturate.
SATURATING: Final = ops("tanh sigmoid hardtanh hardsigmoid softsign relu6")

# Activations that are exactly zero on a half line: units can die.
RECTIFIERS: Final = ops("relu relu6 threshold")

# Activations of two inputs packed in one tensor: half of the features scale the other half.
GATES: Final = frozenset(("glu",))

SOFTMAXES: Final = ops("softmax log_softmax softmin gumbel_softmax")

# Norms by the axes of their moments. `weight_norm` and `normalize` act on weights and on lengths.
BATCH_NORMS: Final = ops("batch_norm sync_batch_norm")
LAYER_NORMS: Final = ops("layer_norm add_layer_norm row_norm")
RMS_NORMS: Final = ops("rms_norm add_rms_norm")
GROUP_NORMS: Final = ops("group_norm instance_norm")
NORMS: Final = BATCH_NORMS | LAYER_NORMS | RMS_NORMS | GROUP_NORMS | frozenset(("local_response_norm",))

# Norms that subtract the mean: a constant added before them over their axes cancels.
CENTERING_NORMS: Final = BATCH_NORMS | LAYER_NORMS | GROUP_NORMS

POOLINGS: Final = frozenset(
    f"{family}_pool{dim}d"
    for family in ("max", "avg", "lp", "adaptive_max", "adaptive_avg", "fractional_max")
    for dim in (1, 2, 3)
)
UPSAMPLINGS: Final = ops("interpolate upsample grid_sample fold max_unpool1d max_unpool2d max_unpool3d")
PADDINGS: Final = frozenset(("pad", "constant_pad_nd"))

DROPOUTS: Final = ops(
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout"
)

CONVOLUTIONS: Final = frozenset(("conv1d", "conv2d", "conv3d", "convolution"))
TRANSPOSED_CONVOLUTIONS: Final = frozenset(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"))
RECURRENT: Final = ops("lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")
ATTENTIONS: Final = ops("multi_head_attention scaled_dot_product_attention flex_attention")
EMBEDDINGS: Final = frozenset(("embedding", "embedding_bag"))

# Sums of products: with a parameter on one side they are a layer with a weight.
PRODUCTS: Final = ops(
    "linear bilinear matmul mm bmm mv addmm addmv addbmm baddbmm einsum tensordot inner dot"
)

# Ops that mix features with a weight of their own, when one of their arguments comes from a parameter.
WEIGHT_OPS: Final = (
    PRODUCTS
    | CONVOLUTIONS
    | TRANSPOSED_CONVOLUTIONS
    | RECURRENT
    | EMBEDDINGS
    | frozenset(("multi_head_attention",))
)

# Sums of two signals; the fused norms add the residual before they normalize.
ADDITIONS: Final = frozenset(("add", "add_layer_norm", "add_rms_norm"))
SUBTRACTIONS: Final = frozenset(("sub",))
SCALINGS: Final = frozenset(("mul", "div"))
CONCATENATIONS: Final = ops("cat stack hstack vstack dstack")

REDUCTIONS: Final = ops("""
    sum mean var std var_mean std_mean amax amin max min prod logsumexp norm vector_norm matrix_norm
    any all argmax argmin median nansum nanmean count_nonzero
    """)

# Elementwise arithmetic that is neither an activation nor one of the sums and scalings above.
ELEMENTWISE: Final = (
    ACTIVATIONS - GATES
    | ADDITIONS - NORMS
    | SUBTRACTIONS
    | SCALINGS
    | ops("""
        neg abs sign exp exp2 expm1 log log1p log2 log10 sqrt rsqrt square pow reciprocal erf erfc sin
        cos clamp maximum minimum where lerp addcmul addcdiv masked_fill floor ceil round trunc
        float_power nan_to_num gt ge lt le eq ne logical_not logical_and logical_or heaviside hypot
        sinh cosh tan asinh acosh atanh atan asin acos sinc erfinv logit xlogy frac fmod remainder
        """)
)

# Values leave torch here: what the program does with them the graph can't see.
ESCAPES: Final = ops("bool item tolist numpy float int complex contains equal allclose is_nonzero dlpack")

# Ops that read the shape of their input, not its values.
SHAPE_READERS: Final = ops(
    """
    zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones
    new_empty new_full new_tensor new_empty_strided
    """
)

# Ops that overwrite their target without reading it.
OVERWRITES: Final = ops("""
    copy fill zero normal uniform bernoulli random exponential geometric log_normal cauchy
    trunc_normal
    """)


def of(op: str) -> frozenset[str]:
    """The kinds that an op name belongs to, as the lower-case names of the sets above.

    Args:
        op: a `Node.op`.

    Returns:
        The names of the sets; empty for an op that the table does not know.

    Example:
        >>> sorted(of("tanh"))
        ['activations', 'elementwise', 'saturating']
    """
    return frozenset(name.lower() for name, ops in _TABLE.items() if op in ops)


_TABLE: Final[dict[str, frozenset[str]]] = {
    name: value for name, value in list(globals().items()) if name.isupper() and isinstance(value, frozenset)
}
