"""INP104 integer-image-input: an image with values 0 to 255 reaches the first layer.

## What it does

Looks for whole numbers between 0 and 255 with some above 16, where an image (or an image flattened to a
row) reaches the first layer with weights without having been scaled on the way.

## Why it hurts

The mean square of such pixels is of the order of 10⁴, so pre-activations start two orders of magnitude
too large: squashing units are saturated, logits are huge, and the loss begins far above ln C. All
pixels being positive, the gradients of one unit's weights share their sign and move together.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

generator = torch.Generator().manual_seed(0)
x = torch.randint(0, 256, (64, 3, 8, 8), generator=generator).float()
case = Case(nn.Conv2d(3, 4, 3), x)
```

## Use instead

```python
import torch
from torch import nn
import musigma as ms
from musigma.doctor import Case

generator = torch.Generator().manual_seed(0)
x = torch.randint(0, 256, (64, 3, 8, 8), generator=generator).float()
standardize = ms.inputs.Standardizer().fit(x).layer()
case = Case(nn.Sequential(standardize, nn.Conv2d(3, 4, 3)), x)
```

## Fix safety

As for INP101: an affine change of variables that the model must keep when it is used. A pretrained
model wants the mean and std it was trained with, not those of your data.

## References

LeCun, Bottou, Orr & Müller 1998, "Efficient BackProp", section 4.3.
"""

from collections.abc import Iterator
from math import isqrt

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes._entries import EntryMeasure

# The digits of scikit-learn end at 16; a batch of 8-bit images that never exceeds it would be all but black.
_DARKEST = 16


@_rules.rule("INP104", "integer-image-input", severity="warning")
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom per first weight layer that receives raw 8-bit images."""
    for entry in exam.trace.entries:
        if not (entry.integral and entry.low >= 0 and _DARKEST < entry.high <= 255 and is_image(entry)):
            continue
        yield Symptom(
            where=entry.inputs,
            message=f"an image with whole values from {entry.low:g} to {entry.high:g} reaches "
            f"{entry.node.module or 'the first layer'} unscaled.",
            evidence={
                "low": entry.low,
                "high": entry.high,
                "shape": list(entry.shape),
                "layer": entry.node.module,
            },
            fix="standardize: put musigma.inputs.Standardizer().fit(data).layer() in front of the model",
        )


def is_image(entry: EntryMeasure) -> bool:
    """Four axes with 1, 3 or 4 channels, or rows of a square's length (times 3) from 8×8 up."""
    if len(entry.shape) == 4:
        return entry.shape[1] in (1, 3, 4)
    pixels = entry.shape[-1] if len(entry.shape) == 2 else 0
    return any(p >= 64 and isqrt(p) ** 2 == p for p in (pixels, pixels // 3 if pixels % 3 == 0 else 0))
