"""One name for one operation, however it was spelled: `x += y`, `torch.add`, `Tensor.add_`."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

from torch.overrides import resolve_name

Function = Callable[..., Any]

_ALIASES: Final[dict[str, str]] = {
    alias: name
    for name, aliases in {
        "add": "__add__ __radd__ __iadd__",
        "sub": "__sub__ __rsub__ __isub__ rsub subtract",
        "mul": "__mul__ __rmul__ __imul__ multiply",
        "div": "__div__ __rdiv__ __idiv__ __truediv__ __rtruediv__ __itruediv__ divide true_divide",
        "floor_divide": "__floordiv__ __rfloordiv__ __ifloordiv__",
        "remainder": "__mod__ __rmod__ __imod__",
        "pow": "__pow__ __rpow__ __ipow__",
        "matmul": "__matmul__ __rmatmul__ __imatmul__",
        "mm": "_sparse_mm",
        "neg": "__neg__ negative",
        "abs": "__abs__ absolute",
        "bitwise_not": "__invert__",
        "bitwise_and": "__and__ __rand__ __iand__",
        "bitwise_or": "__or__ __ror__ __ior__",
        "bitwise_xor": "__xor__ __rxor__ __ixor__",
        "eq": "__eq__",
        "ne": "__ne__ not_equal",
        "lt": "__lt__ less",
        "le": "__le__ less_equal",
        "gt": "__gt__ greater",
        "ge": "__ge__ greater_equal",
        "getitem": "__getitem__",
        "setitem": "__setitem__ __delitem__",
        "bool": "__bool__ __nonzero__",
        "float": "__float__",
        "int": "__int__ __index__ __trunc__",
        "complex": "__complex__",
        "contains": "__contains__",
        "numpy": "__array__ __cuda_array_interface__",
        "dlpack": "__dlpack__ to_dlpack",
        "cat": "concat concatenate",
        "transpose": "t T mT H mH swapaxes swapdims adjoint numpy_T matrix_H",
        "movedim": "moveaxis",
        "view": "view_as _unsafe_view",
        "reshape": "reshape_as",
        "flatten": "ravel",
        "expand": "expand_as",
        "to": "type type_as double half bfloat16 long short char byte cpu cuda xpu to_dense",
        "clamp": "clip clamp_min clamp_max",
        "split": "split_with_sizes hsplit vsplit dsplit",
        "atleast": "atleast_1d atleast_2d atleast_3d",
        "sigmoid": "expit special_expit",
        "softmax": "special_softmax _softmax",
        "log_softmax": "special_log_softmax _log_softmax",
        "logsumexp": "special_logsumexp",
        "erf": "special_erf",
        "max_pool1d": "max_pool1d_with_indices",
        "max_pool2d": "max_pool2d_with_indices",
        "max_pool3d": "max_pool3d_with_indices",
        "adaptive_max_pool1d": "adaptive_max_pool1d_with_indices",
        "adaptive_max_pool2d": "adaptive_max_pool2d_with_indices",
        "adaptive_max_pool3d": "adaptive_max_pool3d_with_indices",
        "fractional_max_pool2d": "fractional_max_pool2d_with_indices",
        "fractional_max_pool3d": "fractional_max_pool3d_with_indices",
        "interpolate": "upsample upsample_nearest upsample_bilinear",
        "dropout": "native_dropout",
        "batch_norm": "native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit",
        "layer_norm": "native_layer_norm",
        "group_norm": "native_group_norm",
        "rms_norm": "_fused_rms_norm",
        "weight_norm": "_weight_norm _weight_norm_interface",
        "multi_head_attention": "multi_head_attention_forward _native_multi_head_attention",
        "logsigmoid": "log_sigmoid",
        "threshold": "_threshold",
    }.items()
    for alias in aliases.split()
}

# Casts by method, which would read as the escapes of the same name (`Tensor.float` against `float(x)`).
_CASTS: Final = frozenset(("float", "int", "bool", "double", "half", "long"))


def spelled(function: Function) -> str:
    """The function's own short name; of a property's getter or setter, the property's."""
    name = getattr(function, "__name__", type(function).__name__)
    if name in ("__get__", "__set__", "__delete__"):
        owner = getattr(getattr(function, "__self__", None), "__name__", "property")
        if name == "__get__":
            return "get_grad" if owner == "grad" else owner  # not torch.autograd.grad
        return f"set_{owner}"
    packet = getattr(function, "overloadpacket", None)  # torch.ops.aten.add.Tensor
    return getattr(packet, "__name__", name)


@lru_cache(maxsize=4096)
def op_name(function: Function) -> str:
    """The normalized op name of a function that a `TorchFunctionMode` was handed."""
    name = spelled(function)
    if name in _CASTS:
        return "to"
    if name in _ALIASES:
        return _ALIASES[name]
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return _ALIASES.get(name, name)


@lru_cache(maxsize=4096)
def overwrites_by_name(function: Function) -> bool:
    """Whether the name alone says that the first argument is written: `add_`, `+=`, `x[i] = y`."""
    name = spelled(function)
    if name.startswith("__") and name.endswith("__"):
        bare = name[2:-2]
        augmented = bare.startswith("i") and f"__{bare[1:]}__" in _ALIASES
        return bare in ("setitem", "delitem") or augmented
    return name.endswith("_") or name.startswith("set_")


@lru_cache(maxsize=4096)
def qualified(function: Function) -> str:
    """The function as torch spells it, for people: `torch.nn.functional.relu`."""
    return resolve_name(function) or spelled(function)
