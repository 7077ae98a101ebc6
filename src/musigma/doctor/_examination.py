"""What a rule is given: the case, on a copy, with every probe measured when first asked for and then kept."""

import copy
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from musigma import graph as _graph
from musigma.doctor._case import Case, Intent, Loss, OptimizerLike, SchedulerLike
from musigma.doctor.probes import _calls
from musigma.doctor.probes._channels import (
    CHANNEL_NORMS,
    ChannelMeasure,
    measure_channels,
    training_twin,
)
from musigma.doctor.probes._coupling import Coupling, measure_coupling
from musigma.doctor.probes._data import InputMeasure, measure_data
from musigma.doctor.probes._layers import looks_fresh
from musigma.doctor.probes._losses import Chance, chance_of
from musigma.doctor.probes._modes import ModesCompared, compare_modes
from musigma.doctor.probes._pass import Pass, take_pass
from musigma.doctor.probes._stacks import Stack, find_stacks
from musigma.doctor.probes._step import Step, Stepper, settle
from musigma.doctor.probes._trace import Trace, take_trace
from musigma.doctor.probes._weights import WeightMeasure, measure_weights
from musigma.surgery import CancelledBias, cancelled_biases

__all__ = ["Examination"]

# The model's own noise starts from one number, so that two examinations of one model agree.
_SEED = 0


class Examination:
    """One model under examination. Rules read it; they never change what they get.

    Args are those of `musigma.doctor.examine`. The model is copied together with its optimizer and scheduler,
    so whatever is measured or stepped is a copy.

    Mode: with intent "train" or "finetune" a model handed over in eval mode is examined in train mode, since
    that is what it is about to do; otherwise it is examined as it is. `modes` keeps the caller's flags.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        targets: Any = None,
        *,
        loss: Loss | None = None,
        optimizer: OptimizerLike | None = None,
        scheduler: SchedulerLike | None = None,
        mask: Tensor | None = None,
        independent: bool = False,
        intent: Intent | None = None,
    ) -> None:
        inner = _graph.unwrap(model)
        self.modes: Mapping[str, bool] = {name: m.training for name, m in inner.named_modules()}
        self.model, self.optimizer, self.scheduler = _copy(inner, optimizer, scheduler)
        if intent in ("train", "finetune") and not inner.training:
            self.model.train()
        self.inputs, self.targets, self.loss = inputs, targets, loss
        self.mask, self.independent, self.intent = mask, independent, intent

    @classmethod
    def of(cls, case: Case) -> "Examination":
        """The examination of a case."""
        return cls(
            case.model,
            case.inputs,
            case.targets,
            loss=case.loss,
            optimizer=case.optimizer,
            scheduler=case.scheduler,
            mask=case.mask,
            independent=case.independent,
            intent=case.intent,
        )

    @cached_property
    def failure(self) -> Exception | None:
        """What the model (or the loss) raised on the given batch; None where it ran."""
        try:
            self._attempt = self._record(self.model)
        except Exception as raised:
            return raised
        return None

    @cached_property
    def trace(self) -> Trace:
        """One recorded forward and one backward; raises what the model raised."""
        if self.failure is not None:
            raise self.failure
        return self._attempt

    @property
    def graph(self) -> _graph.Graph:
        """The model as it ran."""
        return self.trace.graph

    @cached_property
    def step(self) -> Step:
        """The same after one optimizer step on another copy."""
        return self._first_step()[0]

    @cached_property
    def settled(self) -> Step:
        """The same after as many steps as it takes until no sleeping parameter wakes any more."""
        return settle(*self._first_step())

    def _first_step(self) -> tuple[Step, Stepper]:
        stepper = Stepper(self.model, self.optimizer)
        moved = stepper.step(self.trace.gradients)
        return Step(stepper.model, moved, stepper.said, 1, self._look, self._record), stepper

    def _look(self, model: nn.Module) -> Pass:
        return take_pass(model, self.inputs, self.targets, self.loss, seed=_SEED)

    def _record(self, model: nn.Module) -> Trace:
        return take_trace(model, self.inputs, self.targets, self.loss, seed=_SEED)

    @cached_property
    def modes_compared(self) -> ModesCompared | None:
        """The same batch in train and in eval mode; None where there is no floating output."""
        return compare_modes(self.model, self.inputs, self.modes)

    @cached_property
    def channels(self) -> tuple[ChannelMeasure, ...]:
        """Every call of a BatchNorm or an InstanceNorm, with what it sees and what it has stored."""
        if not any(node.op in CHANNEL_NORMS for node in self.graph):
            return ()
        return measure_channels(self.model, self.inputs, seed=_SEED)

    @cached_property
    def channels_in_training(self) -> tuple[ChannelMeasure, ...]:
        """The same in the mode in which the model trains; empty where it raises there (a batch of one)."""
        if not self.channels:
            return ()
        twin = training_twin(self.model, self.modes)
        if twin is self.model:
            return self.channels
        try:
            return measure_channels(twin, self.inputs, seed=_SEED)
        except Exception:
            return ()

    @cached_property
    def coupling(self) -> Coupling | None:
        """Whether one example's output depends on the others; None where that can't be asked."""
        return measure_coupling(self.model, self.inputs, seed=_SEED)

    @cached_property
    def cancelled_biases(self) -> tuple[CancelledBias, ...]:
        """The biases that normalizations subtract again."""
        if not any(node.op in _graph.kinds.CENTERING_NORMS for node in self.graph):
            return ()
        return cancelled_biases(self.model, self.inputs, seed=_SEED)

    @cached_property
    def data(self) -> tuple[InputMeasure, ...]:
        """Every tensor of the batch."""
        return measure_data(self.model, self.inputs, self.targets)

    @cached_property
    def weights(self) -> Mapping[str, WeightMeasure]:
        """Every parameter's moments, by name."""
        return measure_weights(self.model)

    @cached_property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The copy's parameters by name; a tied one once, under its first name."""
        return dict(self.model.named_parameters())

    @cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """The plain stacks of weight layers, without normalization or sums between them."""
        return find_stacks(self.graph, self.trace.layers)

    @cached_property
    def fresh(self) -> bool:
        """Whether the weights behave as if drawn independently of the data, as an initialization leaves them.

        A trained weight has aligned with what it receives: its output's second moment differs from what
        independent weights of the same variance would give. Rules about initialization are silent then.
        """
        return self.intent not in ("inference", "finetune") and looks_fresh(self.trace.layers)

    @cached_property
    def chance(self) -> Chance | None:
        """What the given loss is for a net that knows nothing; None where the loss isn't a plain one."""
        given = self.loss is not None and self.targets is not None
        return chance_of(self.trace.output, self.targets, self.trace.loss) if given else None

    @cached_property
    def batch(self) -> int:
        """How many examples the batch holds; 1 where nothing has a batch axis."""
        return _calls.batch_size(self.inputs) or 1


def _copy(model: nn.Module, optimizer: Any, scheduler: Any) -> tuple[nn.Module, Any, Any]:
    try:
        # Together: the memo maps the optimizer's parameters and the scheduler's optimizer onto the copies.
        twin, own, plan = copy.deepcopy((model, optimizer, scheduler))
    except Exception as raised:
        raise TypeError(
            f"{type(model).__name__} can't be copied with copy.deepcopy ({raised}), and the doctor only "
            "works on a copy; detach or delete tensors that a forward has left on its modules"
        ) from raised
    if isinstance(optimizer, torch.optim.Optimizer):
        _check_optimizer(model, optimizer)
    return twin, own, plan


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    mine = {id(p) for p in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = sum(id(p) not in mine for p in held)
    if foreign == len(held):
        raise ValueError(
            f"optimizer must hold parameters of the model; none of its {len(held)} is: build it after "
            "the model, or pass a factory such as `lambda parameters: torch.optim.SGD(parameters, lr=0.1)`"
        )
