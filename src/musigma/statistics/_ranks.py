"""The moments of all ranks together: gathered, merged in rank order, and differentiable to any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from musigma.statistics._calls import Caller, Exchange, ledger_of

if dist.is_available():
    from torch._C._distributed_c10d import AllgatherOptions

HEADER = 4
FIRST = 2048
"""Numbers in the first message of an exchange, as many for all layers: where messages of different sizes meet
gloo ends the process, and so the headers can be compared first. (16 KB take no longer than one.)"""

Triple = tuple[Tensor, Tensor, Tensor]


def merged(triple: Triple, merge: Callable[[Tensor], Triple], group: dist.ProcessGroup | None) -> Triple:
    """Count, mean and M2 of all ranks together, of this rank's own.

    Args:
        triple: count, mean and M2, the count of the mean's shape.
        merge: of all ranks' triples, (ranks, 3, *shape).
        group: the process group; the default one if None.
    """
    mean = triple[1]
    if mean.device.type != "cpu" or torch.compiler.is_compiling():
        # Elsewhere than on the CPU a wait stops the device, and a graph can hold no counters.
        return merge(_Gather.apply(torch.stack(triple), group))
    known = group or dist.group.WORLD
    assert known is not None
    caller = ledger_of(known).caller(f"Moments{list(mean.shape)}.all_reduce")
    result: Triple = _Merge.apply(*triple, merge, known, caller)
    return result


def exchange(mine: Tensor, group: dist.ProcessGroup, caller: Caller, direction: str) -> Tensor:
    """Every rank's tensor, stacked in rank order, on every rank.

    Args:
        mine: on the CPU; of one shape on all ranks that make the same call.

    Raises:
        RuntimeError: the ranks make different calls, or one of them does not come.
    """
    meeting = Exchange(group, caller, direction)
    values = mine.reshape(-1).to(torch.float64)
    head = values.new_zeros(FIRST)
    head[:HEADER] = torch.tensor(meeting.header(values.numel()), dtype=head.dtype)
    fits = min(values.numel(), FIRST - HEADER)
    head[HEADER : HEADER + fits] = values[:fits]
    heads = _gathered(head, meeting)
    headers = heads[:, :HEADER].tolist()
    if any(header != headers[0] for header in headers):
        error = meeting.failure("they have met in different calls")
        meeting.ledger.reset()
        raise error
    parts = heads[:, HEADER : HEADER + fits]
    if fits < values.numel():
        parts = torch.cat([parts, _gathered(values[fits:], meeting)], 1)
    return parts.reshape(-1, *mine.shape).to(mine.dtype)


def _gathered(mine: Tensor, meeting: Exchange) -> Tensor:
    out = mine.new_empty(dist.get_world_size(meeting.group), mine.numel())
    options = AllgatherOptions()
    if meeting.caller.timeout is not None:
        options.timeout = meeting.caller.timeout
    meeting.finish(lambda: meeting.group.allgather([list(out.unbind())], [mine], options))
    return out


class _Merge(torch.autograd.Function):
    """The merged triple of all ranks; the loss is the sum of theirs, and so are its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        count: Tensor,
        mean: Tensor,
        m2: Tensor,
        merge: Callable[[Tensor], Triple],
        group: dist.ProcessGroup,
        caller: Caller,
    ) -> Triple:
        ctx.group, ctx.caller = group, caller
        every = merge(exchange(torch.stack([count, mean, m2]), group, caller, "forward"))
        ctx.mark_non_differentiable(every[0])
        ctx.save_for_backward(count, mean, every[0], every[1])
        return every

    @staticmethod
    def backward(ctx: Any, _: Tensor, dmean: Tensor, dm2: Tensor) -> tuple[Tensor | None, ...]:
        own_count, own_mean, count, mean = ctx.saved_tensors
        dmean, dm2 = _Sum.apply(torch.stack([dmean, dm2]), ctx.group, ctx.caller).unbind()
        # mean = Σ nᵣ·meanᵣ / n and M2 = Σ M2ᵣ + nᵣ·(meanᵣ − mean)², where Σ nᵣ·(meanᵣ − mean) = 0
        share = own_count / torch.where(count > 0, count, 1.0)
        return None, dmean * share + 2 * dm2 * own_count * (own_mean - mean), dm2, None, None, None


class _Sum(torch.autograd.Function):
    """The sum over all ranks, in rank order; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: dist.ProcessGroup, caller: Caller) -> Tensor:
        ctx.group, ctx.caller = group, caller
        total, *others = exchange(mine, group, caller, "backward").unbind()
        for other in others:
            total = total + other
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Sum.apply(grad, ctx.group, ctx.caller), None, None


class _Gather(torch.autograd.Function):
    """Every rank's tensor, stacked in rank order; its gradient is summed over the ranks that used it."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, mine.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None
