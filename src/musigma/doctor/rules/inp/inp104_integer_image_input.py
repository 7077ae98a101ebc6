"""INP104 integer-image-input: an image with values 0 to 255 reaches the first layer.

## What it does

Looks for the range of 8-bit pixels where an image or a video reaches the first layer with weights without
having been scaled on the way: whole numbers between 0 and 255 with some above 16 (also where the image
comes flattened to a row), or, since resizing makes fractions and overshoots at edges, any values from −48
to 303 with some above 128.

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
from musigma.doctor.probes._words import called

# The digits of scikit-learn end at 16; a batch of 8-bit images that never exceeds it would be all but black.
_DARKEST = 16
# Resized images are no whole numbers any more, and other data are neither: half of the range must be in use.
_HALF = 128
# The negative weights of torch's bicubic kernel sum to 3/16 halfway between pixels: an edge from 0 to 255
# overshoots by as much, on either side.
_OVERSHOOT = 255 * 3 / 16


@_rules.rule("INP104", "integer-image-input", severity="warning")
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom per first weight layer that receives raw 8-bit images."""
    grids = {m.name for m in exam.data if _is_grid(m.shape)}
    for entry in exam.trace.entries:
        grid = _is_grid(entry.shape) or bool(grids.intersection(entry.inputs))
        whole = entry.integral and entry.low >= 0 and _DARKEST < entry.high <= 255
        resized = entry.low >= -_OVERSHOOT and _HALF < entry.high <= 255 + _OVERSHOOT
        if not ((whole and (grid or _is_row(entry.shape))) or (resized and grid)):
            continue
        values = "whole values" if entry.integral else "values"
        yield Symptom(
            where=entry.inputs,
            message=f"an image with {values} from {entry.low:.4g} to {entry.high:.4g} reaches "
            f"{called(entry.node.module, root='the first layer')} unscaled.",
            evidence={
                "low": entry.low,
                "high": entry.high,
                "integral": entry.integral,
                "shape": list(entry.shape),
                "layer": entry.node.module,
            },
            fix="standardize: put musigma.inputs.Standardizer().fit(data).layer() in front of the model",
        )


def _is_grid(shape: tuple[int, ...]) -> bool:
    """An image or a video: 1, 3 or 4 channels behind the examples, behind the frames, or last."""
    places = {4: (1, -1), 5: (1, 2, -1)}.get(len(shape), ())
    return any(shape[at] in (1, 3, 4) for at in places)


def _is_row(shape: tuple[int, ...]) -> bool:
    """Rows of a square's length (times 3) from 8×8 up."""
    pixels = shape[-1] if len(shape) == 2 else 0
    return any(p >= 64 and isqrt(p) ** 2 == p for p in (pixels, pixels // 3 if pixels % 3 == 0 else 0))
