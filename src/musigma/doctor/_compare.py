"""Train the original and the treated model side by side, on the same batches, and keep the curves."""

import copy
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from musigma import graph as _graph
from musigma.doctor._case import Case
from musigma.doctor._treat import inputs_of, portable
from musigma.doctor.probes import _calls
from musigma.doctor.probes._losses import chance_of

__all__ = ["Comparison", "Run", "compare"]

Progress = Callable[[str, int, int, float], None]


@dataclass
class Run:
    """How one model trained.

    Args:
        losses: the loss of every step, before that step's update.
        accuracies: (steps taken, accuracy on held-out data) where it was measured; empty where there is none.
        seconds: spent in the training steps alone.
    """

    losses: list[float] = field(default_factory=list)
    accuracies: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0

    def steps_to(self, accuracy: float) -> int | None:
        """The first step at which this accuracy was measured or exceeded; None where it never was."""
        return next((step for step, value in self.accuracies if value >= accuracy), None)


@dataclass(frozen=True)
class Comparison:
    """Two runs on the same batches in the same order.

    Args:
        original: the model as it was given.
        treated: the treated copy.
        expected_loss: ln C where the loss is a plain cross entropy over C classes, else None.
        goal: the accuracy whose first step is reported.
    """

    original: Run
    treated: Run
    expected_loss: float | None
    goal: float

    def to_dict(self) -> dict[str, Any]:
        """The curves as plain JSON types."""
        return {
            "expected_loss": self.expected_loss,
            "goal": self.goal,
            **{
                name: {
                    "losses": run.losses,
                    "accuracies": [list(pair) for pair in run.accuracies],
                    "seconds": run.seconds,
                    "steps_to_goal": run.steps_to(self.goal),
                }
                for name, run in (("original", self.original), ("treated", self.treated))
            },
        }


def compare(
    case: Case,
    treated: nn.Module,
    *,
    epochs: int = 1,
    steps: int | None = None,
    goal: float = 0.95,
    evaluate_every: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Comparison:
    """Train copies of the original and of the treated model on the same batches, with fresh optimizers.

    Both take each batch in turn, so neither sees other data, and each has a random stream of its own that
    starts at the same seed. The given models are not changed, and the global random state stays as it was.

    Args:
        case: with a `loader` of (inputs, targets) batches; `loss`, `optimizer` and `test` as it has them.
            Without an optimizer Adam at rate 1e-3 trains; an optimizer instance gives its class and its
            defaults. A scheduler that is a factory steps once an epoch.
        treated: from `treat`.
        epochs: passes over the loader.
        steps: stop after so many batches; all of them where None.
        goal: the accuracy whose first step is reported.
        evaluate_every: steps between measurements of the test accuracy; once an epoch where None, and always
            before the first step and after the last.
        seed: what the loader's and the models' random numbers start from.
        progress: called as `progress(name, step, total, loss)` after each step of "original" and "treated".

    Returns:
        the two runs.

    Raises:
        ValueError: the case has no loader, the loader no batch, epochs or steps below 1.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from musigma.doctor import Case, compare
        >>> x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
        >>> net = nn.Linear(4, 2)
        >>> case = Case(net, x, loss=nn.CrossEntropyLoss(), loader=[(x, (x[:, 0] > 0).long())])
        >>> result = compare(case, net, epochs=3)
        >>> len(result.original.losses), result.original.losses == result.treated.losses
        (3, True)
    """
    if case.loader is None:
        raise ValueError(
            "comparing needs data to train on: give the case a loader of (inputs, targets) batches"
        )
    for name, value in (("epochs", epochs), ("steps", 1 if steps is None else steps)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}")
    total = _total(case.loader, epochs, steps)
    with _calls.forked_rng(case.model, seed):
        runners = [_Runner(n, m, case, seed) for n, m in (("original", case.model), ("treated", treated))]
        for runner in runners:
            runner.evaluate(case.test)
        for step, (batch, last_of_epoch) in enumerate(_stream(case.loader, epochs, steps), start=1):
            for runner in runners:
                loss = runner.step(batch)
                if progress is not None:
                    progress(runner.name, step, total or step, loss)
                due = last_of_epoch if evaluate_every is None else step % evaluate_every == 0
                if due or step == total:
                    runner.evaluate(case.test)
                if last_of_epoch:
                    runner.end_epoch()
        for runner in runners:
            runner.evaluate(case.test)
    if not runners[0].run.losses:
        raise ValueError("the loader must give at least one batch; it gave none")
    return Comparison(runners[0].run, runners[1].run, runners[0].expected_loss, goal)


def _total(loader: Iterable[Any], epochs: int, steps: int | None) -> int | None:
    try:
        whole = len(loader) * epochs  # type: ignore[arg-type]  # an iterable without a length raises
    except TypeError:
        return steps
    return whole if steps is None else min(whole, steps)


def _stream(loader: Iterable[Any], epochs: int, steps: int | None) -> Iterator[tuple[Any, bool]]:
    """(batch, whether it is the epoch's last), over all epochs, at most `steps`."""

    def whole() -> Iterator[tuple[Any, bool]]:
        for _ in range(epochs):
            held: list[Any] = []
            for batch in loader:
                if held:
                    yield held.pop(), False
                held.append(batch)
            if held:
                yield held.pop(), True

    yield from islice(whole(), steps)


class _Runner:
    """One of the two models, with an optimizer, a random stream and a clock of its own."""

    def __init__(self, name: str, model: nn.Module, case: Case, seed: int) -> None:
        self.name, self.run = name, Run()
        self.expected_loss: float | None = None
        self._model = copy.deepcopy(_graph.unwrap(model)).train()
        self._loss = case.loss
        factory = portable(case.optimizer)
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = (
            torch.optim.Adam(parameters, lr=1e-3) if factory is None else _made(factory, parameters)
        )
        scheduler = case.scheduler
        self._scheduler = (
            None if scheduler is None or hasattr(scheduler, "step") else scheduler(self._optimizer)
        )
        self._streams = _Streams(seed)

    def step(self, batch: Any) -> float:
        """One training step; the loss before it."""
        inputs, targets = split(batch)
        start = time.perf_counter()
        with self._streams.own():
            self._optimizer.zero_grad(set_to_none=True)
            output = _calls.call(self._model, inputs)
            value, _ = _calls.loss_of(output, targets, self._loss)
            if value is None:
                raise ValueError("the model puts out nothing that a loss could be taken of")
            value.backward()
            self._optimizer.step()
        loss = float(value.detach())
        self.run.seconds += time.perf_counter() - start
        if not self.run.losses and self._loss is not None:
            chance = chance_of(output, targets, loss)
            self.expected_loss = chance.value if chance is not None and chance.classes else None
        self.run.losses.append(loss)
        return loss

    def evaluate(self, test: Any) -> None:
        """Measure the accuracy on held-out data, once per step count; nothing where there are no classes."""
        taken = len(self.run.losses)
        if test is None or (self.run.accuracies and self.run.accuracies[-1][0] == taken):
            return
        right = count = 0
        self._model.eval()
        with torch.no_grad(), self._streams.own():
            for batch in [test] if _is_pair(test) else test:
                hits = _hits(self._model, batch)
                if hits is None:
                    break
                right, count = right + int(hits.sum()), count + hits.numel()
        self._model.train()
        if count:
            self.run.accuracies.append((taken, right / count))

    def end_epoch(self) -> None:
        """Let the scheduler know."""
        if self._scheduler is not None:
            self._scheduler.step()


def _made(factory: Any, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    optimizer = factory(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer) and not hasattr(optimizer, "zero_grad"):
        raise TypeError(
            f"the optimizer factory must return an optimizer; it returned {type(optimizer).__name__}"
        )
    return optimizer


def split(batch: Any) -> tuple[Any, Any]:
    """A loader's batch as (inputs, targets); targets None where it is inputs alone."""
    return (batch[0], batch[1]) if _is_pair(batch) else (inputs_of(batch, pairs=False), None)


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, list | tuple) and len(batch) == 2


def _hits(model: nn.Module, batch: Any) -> Tensor | None:
    inputs, targets = split(batch)
    outputs = _calls.floating_outputs(_calls.call(model, inputs))
    if not outputs or not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    scores = outputs[0]
    # Classes on axis 1, as torch wants them, or last.
    for moved in (scores.movedim(1, -1), scores) if scores.ndim > 1 else ():
        if moved.shape[:-1] == targets.shape:
            return moved.argmax(-1) == targets
    return None


class _Streams:
    """torch's and Python's global random streams, as one runner would have them to itself."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: tuple[Any, ...] | None = None

    @contextmanager
    def own(self) -> Iterator[None]:
        """Go on where this runner's streams stopped; afterwards the global ones are as they were."""
        outside = self._get()
        if self._states is None:
            torch.manual_seed(self._seed)
            random.seed(self._seed)
        else:
            self._set(self._states)
        try:
            yield
        finally:
            self._states = self._get()
            self._set(outside)

    @staticmethod
    def _get() -> tuple[Any, ...]:
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return torch.get_rng_state(), random.getstate(), devices

    @staticmethod
    def _set(states: tuple[Any, ...]) -> None:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if states[2]:
            torch.cuda.set_rng_state_all(states[2])
