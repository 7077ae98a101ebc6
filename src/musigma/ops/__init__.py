"""Arithmetic on tensors: six ops that compute, one that updates, each with a readable reference."""

from musigma.ops._activations import ACTIVATIONS, activate, check_activation
from musigma.ops._add_row_norm.op import add_row_norm
from musigma.ops._affine.op import affine
from musigma.ops._batch_norm.op import batch_norm
from musigma.ops._define import OPS, ErrorSample, Op, Sample, leaves_home, transforms_active
from musigma.ops._group_norm.op import group_norm
from musigma.ops._kernels import Kernel, Mode, direct, kernels, selected, use_kernels
from musigma.ops._memory import empty_cache, memory_cached, set_cache_limit
from musigma.ops._moments.op import moments
from musigma.ops._numerics import memory_format
from musigma.ops._row_norm.op import row_norm
from musigma.ops._running.op import running_arithmetic_, running_update_

__all__ = [
    "ACTIVATIONS",
    "OPS",
    "ErrorSample",
    "Kernel",
    "Mode",
    "Op",
    "Sample",
    "activate",
    "add_row_norm",
    "affine",
    "batch_norm",
    "check_activation",
    "direct",
    "empty_cache",
    "group_norm",
    "kernels",
    "leaves_home",
    "memory_cached",
    "memory_format",
    "moments",
    "row_norm",
    "running_arithmetic_",
    "running_update_",
    "selected",
    "set_cache_limit",
    "transforms_active",
    "use_kernels",
]
