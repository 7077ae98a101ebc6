"""The rules: probes measure, rules judge. One rule is one file, `rules/<family>/<code>_<name>.py`.

How to write a rule
===================

1. The docstring of the file is the documentation (`musigma explain CODE` and the docs page are that text). It
   begins with `CODE name: one sentence.` and has the sections `## What it does`, `## Why it hurts`,
   `## Example`, `## Use instead`, `## Fix safety`, `## References`. Example and Use
   instead hold a fenced python block that imports what it uses and defines `case = Case(...)`. A generic
   test (`tests/doctor/test_rules.py`) runs both: the Example must fire this code, Use instead must not.

2. One decorated generator yields what it saw; the registry adds code, name, severity and treatment:

       from musigma.doctor import _rules
       from musigma.doctor._examination import Examination
       from musigma.doctor._rules import Symptom

       @_rules.rule("NRM306", "momentum-convention", severity="warning")
       def check(exam: Examination) -> Iterator[Symptom]:
           for norm in exam.trace.norms:
               if ...:
                   yield Symptom(where=(norm.path,), message="...", evidence={...}, fix="...")

   `needs=("mask",)` keeps the rule silent where the caller gave no mask; `on_failure=True` has it judge also
   when the model raised (then `exam.failure` is the exception and `exam.trace` is not there).

3. What to measure with: nothing is computed by hand, every mean and variance is a `Moments`.

   - `exam.model` (a copy, in the mode examined), `exam.modes` (the caller's `.training` flag of every
     module), `exam.inputs`, `.targets`, `.loss`, `.mask`, `.independent`, `.intent`,
     `.parameters` (name -> parameter)
   - `exam.trace`: one recorded forward and one backward: `.graph`, `.nodes` (a `NodeMeasure` per graph
     node: moments of its output overall, per unit, between examples; zeros; gradient moments), `.norms` (a
     `NormMeasure` per normalization call), `.entries` (what reaches the first weight layers), `.loss`,
     `.gradients` (parameter name -> gradient, None where there is none)
   - `exam.step`: another copy after one optimizer step, and `exam.settled`: after as many steps as it takes
     until no parameter wakes any more; what looks dead or constant at step 0 is judged there. `.after` is
     one forward and backward of it (loss, gradients, output), `.trace` the same with every node measured
   - `exam.stacks` (plain stacks of weight layers), `exam.fresh` (weights as an initialization leaves them),
     `exam.chance` (the loss of a net that knows nothing)
   - `exam.modes_compared`: the same batch in train and in eval mode, noise averaged out
   - `exam.channels` (every BatchNorm and InstanceNorm call: what it sees, how many independent values that is
     worth, what it has stored), `exam.channels_in_training` (the same in train mode), `exam.cancelled_biases`
     (biases that norms subtract again), `exam.coupling` (whether examples depend on their batch mates)
   - `exam.data` (moments of every input), `exam.weights` (moments of every parameter)

   Each is measured when a rule first asks for it and then kept. A probe that more than one rule could use
   goes to `probes/`; a measurement of a single rule may stay in the rule's file.

4. A threshold is derived (sampling error, theory) or measured, and the derivation stands one line above it.
   NaN compares false: write conditions so that a NaN measurement stays silent. What merely wastes is "info"
   or "warning", never "error".
"""
