"""INI210 loss-at-init: the first loss is far from what a net that knows nothing should have.

## What it does

Recognises the given loss by its value on the batch as a plain cross entropy, a binary one, or a mean
squared error, and compares it with what ignorance costs: ln C for C classes, ln 2, or the variance of
the targets. Logits of variance s² cost s²/2 above ln C, and a head with He's variance has s² = 2: the
rule fires from 2 above on (s² > 4), or where a squared error exceeds ten times the variance, beyond the
batch's sampling error. Weighted, smoothed, contrastive and summed losses aren't recognised, and it
stays silent.

A fresh net can't be right either. The rule fires below ln C, beyond the sampling error, where `NLLLoss`
gets numbers that are no log-probabilities; and where a true cross entropy is below half of the entropy of
the batch's own classes, and stays there whatever the order of the weights: so it is neither luck nor
learned. A squared error may start small: restoring nets hand their input on. Fitted models, whose
weights have aligned with the data, are silent.

## Why it hurts

A net that is confident at random has to unlearn that first: the first hundred steps shrink the logits,
with gradients that push all examples the same way, and a learning rate that suits the rest is too large
for them. For a regression it means that the outputs' offset or scale is not the targets'.

Without a log_softmax the loss is no likelihood: raw logits can lower it without end by growing, a softmax's
outputs are at least bounded, and barely give a gradient. A fresh net that is right has seen the answers:
the targets, or something made of them, are among the inputs, and what it learns is to copy them.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 27))
nn.init.normal_(net[2].weight)
x = torch.randn(270, 16, generator=torch.Generator().manual_seed(0))
case = Case(net, x, torch.arange(270) % 27, loss=nn.CrossEntropyLoss())
```

## Use instead

```python
import torch
from torch import nn
from musigma.doctor import Case

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 27))
nn.init.normal_(net[2].weight, std=0.01)
nn.init.zeros_(net[2].bias)
x = torch.randn(270, 16, generator=torch.Generator().manual_seed(0))
case = Case(net, x, torch.arange(270) % 27, loss=nn.CrossEntropyLoss())
```

## Fix safety

The treatment shrinks the last layer's weights until the loss is within reach of chance; the net can
represent what it could before. Not for a trained model, whose head means something. Targets are not
touched: standardize them where the error is theirs. A loss below chance is not treated: the loss or the
data have to be put right.

## References

Karpathy 2022, "Building makemore part 3" (27 characters, a loss of 27 instead of 3.3).
"""

from collections.abc import Iterator
from typing import Any

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes._losses import Chance

# s²/2 for logits of variance s² = 4, twice what a head with He's variance has.
_EXCESS = 2.0
# Outputs of variance 1 beside standardized targets give 2; an offset of three standard deviations gives 10.
_RATIO = 10.0
_SIGMAS = 3.0
# Where two classes are easily told apart, every other random net gives them the right answers, by luck: after
# eight more draws of the weights, one net in 512. Half of the entropy needs margins, not a mere tendency.
_DRAWS, _HALF = 8, 0.5


@_rules.rule("INI210", "loss-at-init", severity="warning", needs=("loss", "targets"))
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom for the model."""
    chance, loss = exam.chance, exam.trace.loss
    if exam.intent == "inference" or chance is None:
        return
    limit = _RATIO * chance.value if chance.kind == "mean_squared_error" else chance.value + _EXCESS
    if loss - _SIGMAS * chance.error > limit:
        yield _above(exam, chance, loss)
    elif chance.classes and exam.fresh and _knows_too_much(exam, chance, loss):
        yield _below(exam, chance, loss)


def _knows_too_much(exam: Examination, chance: Chance, loss: float) -> bool:
    """Whether the loss is below what a net can reach that has seen no targets."""
    if chance.answers in _MISTAKEN:
        return loss + _SIGMAS * chance.error < chance.value
    least = _HALF * chance.floor - _SIGMAS * chance.error
    return loss < least and all(exam.loss_of_another_draw(seed) < least for seed in range(_DRAWS))


# What a negative log-likelihood gets instead of log-probabilities -> what is wrong, what to do.
_MISTAKEN = {
    "raw": (
        "the negative log-likelihood gets raw logits, a log_softmax is missing",
        "use nn.CrossEntropyLoss, or put log_softmax(..., dim=1) behind the last layer",
    ),
    "softmax": (
        "the negative log-likelihood gets probabilities, a softmax stands where a log_softmax belongs",
        "use nn.CrossEntropyLoss without the softmax, or log_softmax in its place",
    ),
}


def _above(exam: Examination, chance: Chance, loss: float) -> Symptom:
    fix = "standardize the targets, or set the output bias to their mean and start the last layer small"
    if chance.classes:
        fix = "draw the last layer with LeCun's variance, or start it at 0; biases at 0"
    why, fix = _MISTAKEN.get(chance.answers, ("", fix))
    return Symptom(
        where=_heads(exam) or ("",),
        message=f"the loss starts at {loss:.4g}, and {_known(chance)}{why and ': '}{why}.",
        evidence=_evidence(exam, chance, loss),
        fix=fix,
    )


def _below(exam: Examination, chance: Chance, loss: float) -> Symptom:
    leaked = (
        f"on these targets constant answers cost at least {chance.floor:.4g}, and the targets seem to have "
        "leaked into the inputs",
        "look for the targets, or something made of them, among the inputs",
    )
    why, fix = _MISTAKEN.get(chance.answers, leaked)
    return Symptom(
        where=("",),
        message=f"the loss starts at {loss:.4g}, and {_known(chance)}: a fresh net can't know more; {why}.",
        evidence=_evidence(exam, chance, loss),
        fix=fix,
    )


def _heads(exam: Examination) -> tuple[str, ...]:
    return tuple(str(s.layers[-1].weight) for s in exam.stacks if s.head and s.layers[-1].weight is not None)


def _evidence(exam: Examination, chance: Chance, loss: float) -> dict[str, Any]:
    return {
        "loss": loss,
        "chance": chance.value,
        "floor": chance.floor,
        "kind": chance.kind,
        "classes": chance.classes,
        "answers": chance.answers,
        "standard_error": chance.error,
        "output_second_moments": [s.layers[-1].produced for s in exam.stacks if s.head],
    }


def _known(chance: Chance) -> str:
    if chance.kind == "mean_squared_error":
        return f"answering the targets' mean would cost their variance, {chance.value:.4g}"
    return f"a uniform guess over {chance.classes} classes costs ln {chance.classes} = {chance.value:.4g}"
