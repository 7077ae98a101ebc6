"""Give every BatchNorm the statistics of the data."""

from musigma import surgery
from musigma.doctor import _treatments
from musigma.doctor._finding import Finding
from musigma.doctor._treatments import Applied, NotApplicable, Patient
from musigma.doctor.probes._words import counted


@_treatments.treatment("recalibrate", mends=("NRM304", "NRM305", "NRM307", "NRM326"), order=60)
def apply(patient: Patient, findings: tuple[Finding, ...]) -> Applied:
    """`musigma.surgery.recalibrate` on all batches."""
    model, certificate = surgery.recalibrate(patient.model, patient.batches)
    if not certificate.changed:
        raise NotApplicable("; ".join(certificate.refused) or "no layer keeps running statistics")
    return Applied(
        model,
        f"took the running statistics of {counted(len(certificate.changed), 'layer')} from "
        f"{counted(len(patient.batches), 'batch')}",
        {"changed": list(certificate.changed)},
    )
