"""One scheme, one function: each fills a tensor in place and declares the law it keeps."""

from musigma.init.schemes._blocks import block_constant_
from musigma.init.schemes._constant import constant_, ones_, zeros_
from musigma.init.schemes._depth import depth_scaled_, small_init_, wang_
from musigma.init.schemes._fixed import normal_, normal_hundredth_, normal_tenth_, uniform_, uniform_centered_
from musigma.init.schemes._he import he_normal_, he_uniform_
from musigma.init.schemes._identity import dirac_, identity_
from musigma.init.schemes._lecun import lecun_normal_, lecun_uniform_
from musigma.init.schemes._orthogonal import delta_orthogonal_, orthogonal_
from musigma.init.schemes._recurrent import gru_update_bias_, lstm_forget_bias_
from musigma.init.schemes._scheme import SCHEMES, Law, Sample, Scheme
from musigma.init.schemes._sparse import sparse_
from musigma.init.schemes._stacked import stacked_
from musigma.init.schemes._torch_default import torch_default_, torch_default_bias_
from musigma.init.schemes._truncated import truncated_normal_
from musigma.init.schemes._variance_scaling import variance_scaling_
from musigma.init.schemes._xavier import xavier_normal_, xavier_uniform_

__all__ = [
    "SCHEMES",
    "Law",
    "Sample",
    "Scheme",
    "block_constant_",
    "constant_",
    "delta_orthogonal_",
    "depth_scaled_",
    "dirac_",
    "gru_update_bias_",
    "he_normal_",
    "he_uniform_",
    "identity_",
    "lecun_normal_",
    "lecun_uniform_",
    "lstm_forget_bias_",
    "normal_",
    "normal_hundredth_",
    "normal_tenth_",
    "ones_",
    "orthogonal_",
    "small_init_",
    "sparse_",
    "stacked_",
    "torch_default_",
    "torch_default_bias_",
    "truncated_normal_",
    "uniform_",
    "uniform_centered_",
    "variance_scaling_",
    "wang_",
    "xavier_normal_",
    "xavier_uniform_",
    "zeros_",
]
