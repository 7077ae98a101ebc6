"""Turn the other convention's momentum into torch's."""

from musigma.doctor import _treatments
from musigma.doctor._finding import Finding
from musigma.doctor._treatments import Applied, NotApplicable, Patient
from musigma.doctor.probes._words import called


@_treatments.treatment("momentum", mends=("NRM306",), order=30)
def apply(patient: Patient, findings: tuple[Finding, ...]) -> Applied:
    """1 − momentum where it looks like the weight of the old value; torch's default where it is 0."""
    changed = {}
    for path in dict.fromkeys(w for f in findings for w in f.where):
        module = patient.model.get_submodule(path)
        momentum = getattr(module, "momentum", None)
        if isinstance(momentum, float | int):
            # 0.9 and 0.99 are how others write 0.1 and 0.01; rounded, so that 1 − 0.9 is 0.1.
            changed[path] = round(1 - momentum, 12) if 0 < momentum < 1 else 0.1
            setattr(module, "momentum", changed[path])  # noqa: B010 - mypy takes a module's attributes for tensors
    if not changed:
        raise NotApplicable("none of the layers named has a momentum")
    told = ", ".join(f"{called(path)} to {value:g}" for path, value in changed.items())
    return Applied(
        patient.model, f"set the momentum (the weight of the new value) of {told}", {"momentum": changed}
    )
