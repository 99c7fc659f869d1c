"""See what FP8 does to a training: which tensors of which layers are flushed, clipped or rounded too much, and when."""

from octavo.inspect.findings import Finding, diagnose
from octavo.inspect.record import Record, load
from octavo.inspect.recorder import Recorder

__all__ = ["Finding", "Record", "Recorder", "diagnose", "load", "record"]

record = Recorder  # with octavo.inspect.record(model, to=folder) as recorder: ...
