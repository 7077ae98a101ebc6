"""Parameters for an optimizer, without weight decay on normalizations and biases."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from musigma.graph import Edge, Graph, Node, Parameter, forked_rng, kinds, record, unwrap
from musigma.surgery._layers import is_norm

WEIGHT, BIAS, NORM, EMBEDDING = "weight", "bias", "norm", "embedding"

_KNOWN = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)


def parameter_groups(
    model: nn.Module,
    example: Any = None,
    *,
    weight_decay: float,
    decay_embeddings: bool = True,
) -> list[dict[str, Any]]:
    """All parameters in two groups for an optimizer: with weight decay, and without.

    Without are weights and biases of normalizations, biases of everything, and the slopes of PReLU: shrinking
    them does not make the function simpler, and a norm's weight stands for a scale that the layer before it
    has lost. What a parameter is decides, not its number of dims: a bias of shape (1, c, 1, 1) is one, and
    a vector that scales no norm is none.

    Known layers say it by their type. Of modules from elsewhere the graph says it: a parameter that
    multiplies what was just normalized, in a norm written out by hand, is the norm's; one that is added is
    a bias. The graph is that of the model on the example, and without one that of each such layer on random
    input of its width.

    A parameter that is tied is one; where any of its uses is a weight's, it is a weight.

    Args:
        model: its layers must know their sizes (no lazy ones).
        example: what the model is called with; optional.
        weight_decay: of the first group.
        decay_embeddings: False moves the weights of embeddings to the second group, those tied to an output
            layer too.

    Returns:
        two dicts with "params", "param_names" and "weight_decay", each parameter in one of them, in the
        model's order.

    Raises:
        ValueError: a weight decay that is negative or not finite, or an uninitialized parameter.

    Example:
        >>> import torch, musigma as ms
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 1))
        >>> groups = ms.surgery.parameter_groups(net, weight_decay=0.1)
        >>> [(group["param_names"], group["weight_decay"]) for group in groups]
        [(['0.weight', '2.weight'], 0.1), (['0.bias', '1.weight', '1.bias', '2.bias'], 0.0)]
        >>> optimizer = torch.optim.AdamW(groups, lr=1e-3)

    References:
        Loshchilov & Hutter 2019, "Decoupled weight decay regularization"; van Laarhoven 2017, "L2
        regularization versus batch and weight normalization".
    """
    if not (weight_decay >= 0 and math.isfinite(weight_decay)):
        raise ValueError(f"weight_decay must be 0 or more, and finite; got {weight_decay}")
    model = unwrap(model)
    lazy = [name for name, p in model.named_parameters() if nn.parameter.is_lazy(p)]
    if lazy:
        raise ValueError(f"{', '.join(lazy)} is not initialized yet; call the model once on an example first")
    roles = _roles(model, example)
    spared = {BIAS, NORM}
    groups: list[dict[str, Any]] = [
        {"params": [], "param_names": [], "weight_decay": decay} for decay in (weight_decay, 0.0)
    ]
    for name, parameter in model.named_parameters():
        found = roles[id(parameter)]
        spare = found <= spared or (EMBEDDING in found and not decay_embeddings)
        group = groups[int(spare)]
        group["params"].append(parameter)
        group["param_names"].append(name)
    return groups


def _roles(model: nn.Module, example: Any) -> dict[int, set[str]]:
    """What each parameter is, at each of its uses."""
    used: dict[int, set[str]] = {}
    if example is not None:
        with torch.no_grad(), forked_rng(model):
            graph = record(model, example)
        for name, parameter in model.named_parameters():
            used[id(parameter)] = _in_graph(graph, name)
    roles: dict[int, set[str]] = {}
    for path, module in model.named_modules():
        own = [(n, p) for n, p in module._parameters.items() if p is not None]
        if not own:
            continue
        for name, parameter in own:
            found = _by_type(model, path, module, name)
            known = {found} if found else used.get(id(parameter)) or _on_its_own(module, name)
            roles.setdefault(id(parameter), set()).update(known)
    return roles


def _by_type(model: nn.Module, path: str, module: nn.Module, name: str) -> str | None:
    """What a parameter is, where the module's type says it."""
    if isinstance(module, ParametrizationList):  # of the tensor that it makes, in the module around it
        outer, _, rest = path.rpartition(".parametrizations")
        owner = model.get_submodule(outer if rest else "")
        return _by_type(model, outer, owner, rest.lstrip(".") or path.rpartition(".")[2]) or _named(path)
    if isinstance(module, nn.PReLU):
        return BIAS
    if is_norm(module):
        return NORM
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return EMBEDDING
    return _named(name) if isinstance(module, _KNOWN) else None


def _named(name: str) -> str:
    """In torch's own layers every bias is called one: bias, in_proj_bias, bias_hh_l0, bias_k."""
    return BIAS if "bias" in name.rpartition(".")[2].split("_") else WEIGHT


def _in_graph(graph: Graph, name: str) -> set[str]:
    return {role for node in graph.uses(name) for role in _at(graph, node, name)}


def _at(graph: Graph, node: Node, name: str) -> Iterator[str]:
    """What a parameter is to a node that it meets the signal in."""
    arguments = [a for a, sources in node.arguments.items() if any(_made_of(graph, s, name) for s in sources)]
    if node.op in kinds.NORMS:
        yield NORM
    elif node.op in kinds.EMBEDDINGS:
        yield EMBEDDING
    elif node.op == "prelu" or any("bias" in argument for argument in arguments):
        yield BIAS
    elif node.op in kinds.RECURRENT:
        yield _named(name)
    elif node.op in ("addmm", "addmv", "addbmm", "baddbmm"):
        yield BIAS if arguments == ["input"] else WEIGHT
    elif node.op in kinds.ADDITIONS | kinds.SUBTRACTIONS:
        yield BIAS
    elif node.op in kinds.SCALINGS and _scales_a_norm(graph, node):
        yield NORM
    elif node.op == "addcmul":  # bias + weight · normalized
        yield BIAS if arguments == ["input"] else NORM if _scales_a_norm(graph, node) else WEIGHT
    else:
        yield WEIGHT


def _made_of(graph: Graph, source: object, name: str) -> bool:
    canonical = graph.canonical(name)
    if isinstance(source, Parameter):
        return source.name == canonical
    if not isinstance(source, Edge) or graph.is_live(source):
        return False
    return any(name in graph.nodes[index].parameters for index in graph.ancestors(source))


def _scales_a_norm(graph: Graph, node: Node) -> bool:
    """Whether a product is part of a normalization, or of what one gave, under views and casts."""
    norms = {index for norm in graph.norms() for index in (part.index for part in norm.nodes)}
    if node.index in norms:
        return True
    for source in node.inputs:
        while isinstance(source, Edge) and graph.is_live(source):
            if int(source) in norms:
                return True
            before = graph.nodes[source]
            if before.op not in kinds.VIEWS or not before.inputs:
                break
            source = before.inputs[0]
    return False


def _on_its_own(module: nn.Module, name: str) -> set[str]:
    """What a parameter is in a layer from elsewhere, run by itself on random input of its width."""
    if any(module.children()):
        return {_named(name)}
    parameter: Tensor = module._parameters[name]  # type: ignore[assignment]  # the caller's: not None
    generator = torch.Generator().manual_seed(0)
    for width in dict.fromkeys((*reversed(parameter.shape), parameter.numel())):
        for shape in ((3, width), (3, 2, width), (3, width, 4, 4)):
            x = torch.randn(shape, generator=generator).to(parameter.device, parameter.dtype)
            try:
                with torch.no_grad(), forked_rng(module):
                    found = _in_graph(record(module, x), name)
            except Exception:  # whatever it raises where it takes something else
                continue
            if found:
                return found
    return {_named(name)}
