"""Remove biases that a normalization subtracts again."""

from musigma import surgery
from musigma.doctor import _treatments
from musigma.doctor._finding import Finding
from musigma.doctor._treatments import Applied, NotApplicable, Patient


@_treatments.treatment("remove_bias", mends=("NRM301",), order=20, keeps_function=True)
def apply(patient: Patient, findings: tuple[Finding, ...]) -> Applied:
    """`musigma.surgery.remove_bias`, with its certificate."""
    model, certificate = surgery.remove_bias(patient.model, patient.exam.inputs)
    if not certificate.changed:
        raise NotApplicable("; ".join(certificate.refused) or "no bias could be removed")
    return Applied(
        model,
        f"removed {len(certificate.changed)} biases that a normalization cancels; the outputs differ by at "
        f"most {certificate.difference:.2g}",
        {"difference": certificate.difference, "changed": list(certificate.changed)},
    )
