"""See what FP8 does to a training: which tensors of which layers are flushed, clipped or rounded too much, and when."""

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
