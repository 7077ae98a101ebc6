"""Modules: torch.nn's normalization layers, and a few that torch lacks."""

from musigma.nn._affine import Affine
from musigma.nn._averaging import ema_multi_avg_fn
from musigma.nn._batch_norm import BatchNorm1d, BatchNorm2d, BatchNorm3d
from musigma.nn._batch_norm_lstm import BatchNormLSTM
from musigma.nn._frozen import FrozenBatchNorm, FrozenBatchNorm1d, FrozenBatchNorm2d, FrozenBatchNorm3d
from musigma.nn._group_norm import GroupNorm
from musigma.nn._identity import restore_identity_
from musigma.nn._instance_norm import InstanceNorm1d, InstanceNorm2d, InstanceNorm3d
from musigma.nn._layer_norm import LayerNorm, LayerNorm1d, LayerNorm2d, LayerNorm3d
from musigma.nn._layer_norm_rnn import LayerNormGRU, LayerNormLSTM, LayerNormRNN
from musigma.nn._norm_act import NormAct
from musigma.nn._residual import AddNorm, PreNorm
from musigma.nn._rms_norm import RMSNorm
from musigma.nn._split_batch_norm import SplitBatchNorm1d, SplitBatchNorm2d, SplitBatchNorm3d
from musigma.nn._standardize import Standardize, Unstandardize
from musigma.nn._statistics import nonfinite_statistics
from musigma.nn._sync_batch_norm import SyncBatchNorm

__all__ = [
    "AddNorm",
    "Affine",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "BatchNormLSTM",
    "FrozenBatchNorm",
    "FrozenBatchNorm1d",
    "FrozenBatchNorm2d",
    "FrozenBatchNorm3d",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "LayerNorm1d",
    "LayerNorm2d",
    "LayerNorm3d",
    "LayerNormGRU",
    "LayerNormLSTM",
    "LayerNormRNN",
    "NormAct",
    "PreNorm",
    "RMSNorm",
    "SplitBatchNorm1d",
    "SplitBatchNorm2d",
    "SplitBatchNorm3d",
    "Standardize",
    "SyncBatchNorm",
    "Unstandardize",
    "ema_multi_avg_fn",
    "nonfinite_statistics",
    "restore_identity_",
]
