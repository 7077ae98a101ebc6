"""Remove biases that a normalization subtracts again."""

from torch import nn

from musigma import surgery
from musigma.doctor import _treatments
from musigma.doctor._finding import Finding
from musigma.doctor._treatments import Applied, NotApplicable, Patient
from musigma.doctor.probes._words import counted


@_treatments.treatment("remove_bias", mends=("NRM301",), order=20, keeps_function=True)
def apply(patient: Patient, findings: tuple[Finding, ...]) -> Applied:
    """`musigma.surgery.remove_bias`, with its certificate.

    It shifts the running means by the biases that are gone, for eval mode to stay the same. Statistics that
    had not seen a batch yet go back to 0 and 1, so that they still look like what they are.
    """
    unused = _unused(patient.model)
    model, certificate = surgery.remove_bias(patient.model, patient.exam.inputs)
    if not certificate.changed:
        raise NotApplicable("; ".join(certificate.refused) or "no bias could be removed")
    for path in unused:
        model.get_submodule(path).reset_running_stats()  # type: ignore[operator]  # a norm's method
    count = len(certificate.changed)
    return Applied(
        model,
        f"removed {counted(count, 'bias')} that a normalization cancels; the outputs differ by at most "
        f"{certificate.difference:.2g}",
        {"difference": certificate.difference, "changed": list(certificate.changed)},
    )


def _unused(model: nn.Module) -> list[str]:
    """The modules in training whose running statistics have not seen a batch."""
    found = []
    for path, module in model.named_modules():
        mean, var = getattr(module, "running_mean", None), getattr(module, "running_var", None)
        if mean is None or var is None or not module.training or not hasattr(module, "reset_running_stats"):
            continue
        if not bool(mean.any()) and bool((var == 1).all()):
            found.append(path)
    return found
