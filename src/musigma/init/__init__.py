"""Put the spread of a model's weights right: schemes with declared laws, true fans, exact gains."""

from musigma.init._activations import Activation
from musigma.init._apply import apply
from musigma.init._constant import constant_, ones_, zeros_
from musigma.init._fans import Fans, fans
from musigma.init._fixed import normal_, normal_hundredth_, normal_tenth_, uniform_, uniform_centered_
from musigma.init._gains import ActivationMoments, gain, moments_of
from musigma.init._he import he_normal_, he_uniform_
from musigma.init._identity import dirac_, identity_
from musigma.init._lecun import lecun_normal_, lecun_uniform_
from musigma.init._names import generator_for
from musigma.init._orthogonal import delta_orthogonal_, orthogonal_
from musigma.init._packing import blocks
from musigma.init._per_block import per_block
from musigma.init._recurrent import gru_update_bias_, lstm_forget_bias_
from musigma.init._report import ApplyReport, Written
from musigma.init._scheme import SCHEMES, Law, Sample, Scheme
from musigma.init._sparse import sparse_
from musigma.init._torch_default import torch_default_, torch_default_bias_
from musigma.init._truncated import truncated_normal_
from musigma.init._variance_scaling import variance_scaling_
from musigma.init._xavier import xavier_normal_, xavier_uniform_

__all__ = [
    "SCHEMES",
    "Activation",
    "ActivationMoments",
    "ApplyReport",
    "Fans",
    "Law",
    "Sample",
    "Scheme",
    "Written",
    "apply",
    "blocks",
    "constant_",
    "delta_orthogonal_",
    "dirac_",
    "fans",
    "gain",
    "generator_for",
    "gru_update_bias_",
    "he_normal_",
    "he_uniform_",
    "identity_",
    "lecun_normal_",
    "lecun_uniform_",
    "lstm_forget_bias_",
    "moments_of",
    "normal_",
    "normal_hundredth_",
    "normal_tenth_",
    "ones_",
    "orthogonal_",
    "per_block",
    "sparse_",
    "torch_default_",
    "torch_default_bias_",
    "truncated_normal_",
    "uniform_",
    "uniform_centered_",
    "variance_scaling_",
    "xavier_normal_",
    "xavier_uniform_",
    "zeros_",
]
