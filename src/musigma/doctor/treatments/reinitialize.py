"""Draw the named weights anew, each at the scale that the activation behind it wants."""

from __future__ import annotations

import glob
from functools import partial
from typing import Any

from musigma import init
from musigma.doctor import _treatments
from musigma.doctor._finding import Finding
from musigma.doctor._treatments import Applied, NotApplicable, Patient
from musigma.doctor.probes._words import counted, listed
from musigma.graph import Graph


@_treatments.treatment(
    "reinitialize",
    mends=("INI201", "INI202", "INI205", "INI206", "INI207", "INI209", "INI216", "GRD501", "GRD502"),
    order=40,
)
def apply(patient: Patient, findings: tuple[Finding, ...]) -> Applied:
    """He's variance with the gain of what follows (LeCun's where nothing does), and biases of 0."""
    graph = patient.exam.graph
    parameters = dict(patient.model.named_parameters())
    named = dict.fromkeys(w for f in findings for w in f.where if w in parameters)
    weights = [w for w in named if parameters[w].ndim >= 2 and parameters[w].requires_grad]
    # A norm that keeps units off starts where norms start; nothing is drawn for it.
    norms = {str(f.evidence["norm"]) for f in findings if f.evidence.get("norm") in parameters}
    if not weights and not norms:
        raise NotApplicable("none of the places named is a trainable weight")
    rules: dict[str, Any] = {}
    said: dict[str, list[str]] = {}
    for weight in weights:
        label, scheme = _scheme(graph, weight)
        rules[glob.escape(weight)] = scheme
        said.setdefault(label, []).append(weight)
        bias = weight.removesuffix("weight") + "bias"
        if bias in parameters and parameters[bias].requires_grad:
            rules[glob.escape(bias)] = "zeros"
    rules |= {glob.escape(n): "zeros" if n.endswith("bias") else "ones" for n in norms}
    init.apply(patient.model, rules, seed=patient.seed)
    told = "; ".join(f"{label}: {listed(names, limit=3)}" for label, names in said.items())
    done = (
        [f"drew {counted(len(weights), 'weight')} anew ({told}) and set their biases to 0"] if weights else []
    )
    done += [f"put {listed(sorted(norms), limit=3)} back to where norms start"] if norms else []
    return Applied(
        patient.model,
        "; ".join(done),
        {"weights": weights, "norms": sorted(norms), "seed": patient.seed},
    )


def _scheme(graph: Graph, weight: str) -> tuple[str, Any]:
    found = graph.following_activation(weight)
    if found is None:
        return "LeCun", init.lecun_normal_
    try:
        init.gain((found.name, dict(found.kwargs)))
    except (TypeError, ValueError):
        return "LeCun", init.lecun_normal_
    activation = (found.name, dict(found.kwargs)) if found.kwargs else found.name
    return f"He for {found.name}", partial(init.he_normal_, nonlinearity=activation)
