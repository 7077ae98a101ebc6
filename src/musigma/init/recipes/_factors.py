"""What a residual sum multiplies its two sides by."""

from __future__ import annotations

from torch import Tensor, nn

from musigma.graph import Branch, Buffer, Edge, Graph, Node, Parameter, kinds


def skip_factor(graph: Graph, branch: Branch, model: nn.Module) -> float | None:
    """The factor α of α·x + f(x), up to one that both sides share.

    Args:
        graph: the model as it ran.
        branch: one of its residual branches.
        model: the model, whose scalars are read.

    Returns:
        The factor of the skip path over that of the branch; 1 where nothing scales; None where a factor
        can't be read (a vector, a tensor on the meta device, arithmetic).

    Example:
        >>> import torch
        >>> from musigma.graph import record
        >>> class Block(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.f = nn.Linear(4, 4)
        ...     def forward(self, x):
        ...         return 2.5 * x + self.f(x) / 2
        >>> block = Block()
        >>> graph = record(block, torch.zeros(1, 4))
        >>> skip_factor(graph, graph.residual_branches()[0], block)
        5.0

    References:
        None.
    """
    factor = _alpha(branch)
    for node in branch.skip:
        number = _number(graph, node, model) if node.op in kinds.SCALINGS else 1.0
        if number is None:
            return None
        factor *= number
    for node in branch.scalings:
        number = _number(graph, node, model)
        if not number:
            return None
        factor /= number
    return factor


def skip_scales(branch: Branch) -> dict[str, Node]:
    """The parameters that a skip path is multiplied by.

    Args:
        branch: a residual branch.

    Returns:
        Parameter name → the node that multiplies.
    """
    return {
        source.name: node
        for node in branch.skip
        if node.op == "mul"
        for source in node.inputs
        if isinstance(source, Parameter)
    }


def _alpha(branch: Branch) -> float:
    """torch.add(input, other, alpha=…) scales `other`."""
    alpha = branch.add.options.get("alpha", 1)
    if not isinstance(alpha, int | float) or alpha == 0:
        return 1.0
    other = branch.add.arguments.get("other", ())
    ends = any(isinstance(s, Edge) and int(s) == branch.end.index for s in other)
    return 1 / float(alpha) if ends else float(alpha)


def _number(graph: Graph, node: Node, model: nn.Module) -> float | None:
    """The constant that a product or a quotient holds beside the signal."""
    number: object = node.options.get("other", node.options.get("input"))
    for source in node.inputs:
        if isinstance(source, Parameter | Buffer):
            number = _read(model, source)
        elif not graph.is_live(source):
            return None
    if not isinstance(number, int | float) or not number:
        return None
    return 1 / float(number) if node.op == "div" else float(number)


def _read(model: nn.Module, source: Parameter | Buffer) -> float | None:
    path, _, leaf = source.name.rpartition(".")
    try:
        tensor = getattr(model.get_submodule(path), leaf)
    except AttributeError:
        return None
    readable = isinstance(tensor, Tensor) and tensor.numel() == 1 and not tensor.is_meta
    return float(tensor.detach()) if readable else None
