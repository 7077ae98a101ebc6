"""A model as it really ran: recorded op by op, and asked what follows what."""

from musigma.graph import _kinds as kinds
from musigma.graph._activations import Activation
from musigma.graph._graph import Graph
from musigma.graph._nodes import UNKNOWN, Buffer, Edge, Input, Node, Parameter, Source, TensorSpec, Unknown
from musigma.graph._norms import Norm, NormPath
from musigma.graph._record import record, unwrap
from musigma.graph._replay import rerun
from musigma.graph._residual import Branch
from musigma.graph._run import call, forked_rng, named_inputs
from musigma.graph._tensors import tensors

__all__ = [
    "UNKNOWN",
    "Activation",
    "Branch",
    "Buffer",
    "Edge",
    "Graph",
    "Input",
    "Node",
    "Norm",
    "NormPath",
    "Parameter",
    "Source",
    "TensorSpec",
    "Unknown",
    "call",
    "forked_rng",
    "kinds",
    "named_inputs",
    "record",
    "rerun",
    "tensors",
    "unwrap",
]
