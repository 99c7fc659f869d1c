"""See what FP8 does to a training: which tensors of which layers are flushed, clipped or rounded too much, and when.

While a training runs, ``recorder.py`` writes a record; later ``load`` reads it, the tests of ``rules.py`` look for
faults in it, ``diagnose`` makes findings of what they see, and ``verdict`` says whether FP8 is the cause.

| question | file |
|---|---|
| what is counted in a recorded step, and when does it reach the host? | ``recorder.py`` |
| what is counted of casts, weights and outputs? | ``rows.py``, ``weight_updates.py``, ``module_outputs.py`` |
| what would the same step give in high precision? | ``twin.py``, which compares, by the files of the next four rows |
| which forwards did the step run, and which gradients did they get? | ``notes.py`` |
| how does a step run again without a trace? | ``rerun.py``; one forward: ``forwards.py``, ``module_state.py`` |
| how are gradients compared, and with what the loss does? | ``products.py``, ``slope.py`` |
| does the program still compute what it did at first? | ``first_batch.py`` |
| which files has a record, and what do their numbers mean? | ``record.py``; what tests read of it: ``training.py`` |
| which faults are known, and how is one added? | ``rules.py``; those of casts: ``incidents.KINDS``, ``findings.py`` |
| how is one looked for? | by what it reads: ``of_steps.py``, ``of_weights.py``, ``of_layers.py`` |
| which fault explains which other one? | ``incidents.py``; ``findings.py`` returns causes before effects |
| what changed first, whatever it is? | ``departures.py`` |
| is FP8 the cause? | ``verdicts.py``, by the twin |
| which cast would be better, and in which layer would it matter? | ``remedies.py``, ``what_if.py`` |
| where was the first inf or NaN? | ``faults.py``, which needs no record |
| how is all that shown? | ``report.py``, ``command.py`` |

A record is the folder of a run. In a shape, ``records`` is the number of recorded steps.
"""

from octavo.inspect.faults import Fault, FaultError, FaultTrace, trace_faults
from octavo.inspect.findings import diagnose
from octavo.inspect.incidents import Finding
from octavo.inspect.record import Record, load
from octavo.inspect.recorder import Recorder
from octavo.inspect.verdicts import verdict
from octavo.inspect.what_if import compare

__all__ = [
    "Fault",
    "FaultError",
    "FaultTrace",
    "Finding",
    "Record",
    "Recorder",
    "compare",
    "diagnose",
    "load",
    "record",
    "trace_faults",
    "verdict",
]

record = Recorder  # with octavo.inspect.record(model, to=folder) as recorder: ...
