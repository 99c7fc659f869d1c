"""The first recorded batch, whose forward runs again in each recorded step, also of a run that goes on from another.

Files in the record's folder, of which a run that is resumed reads those of the run before it:

    batch-<rank>.npz    what it takes to run a rank's first forward again, as torch.save wrote it, under a CRC-32: once,
                        if the batch is small, and only tensors, numbers and texts are its arguments
    outputs.npz         what modules of rank 0 computed of it in the last recorded step
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.distributed.files import replacing
from octavo.distributed.ranks import Ranks
from octavo.inspect.forwards import Autocast, Forward, device_of
from octavo.inspect.module_outputs import ModuleOutputs, OutputChanges
from octavo.inspect.record import np
from octavo.private import pytree
from octavo.weights.fsdp2 import forget_failed_pass, on_this_rank

OUTPUTS = "outputs.npz"
LARGEST = 1 << 26  # bytes of a batch that is written
_NUMPY = 1  # the place of NumPy's state among the random states, whose array torch.load would not read


class FirstBatch:
    """Runs the first recorded batch again, and compares what modules compute of it with the run before.

    Args:
        model: whose forward it is.
        forward: this step's first one: the first batch, unless a run is resumed and all ranks find theirs.
        ranks: that train together.
        folder: the record's; None: nothing is written.
        resumes: whether to read what the run before wrote.
    """

    def __init__(
        self, model: nn.Module, forward: Forward, ranks: Ranks, folder: Path | None, resumes: bool = False
    ) -> None:
        self._model, self._ranks, self._outputs, self._runs = model, ranks, ModuleOutputs(model), True
        path = None if folder is None else folder / f"batch-{ranks.rank}.npz"
        earlier = _read(path, model, ranks) if path is not None and resumes else None
        if ranks.any(earlier is None):
            self._forward = forward._replace(delayed=[])
            if path is not None:
                with contextlib.suppress(OSError):  # the record says so when it is written
                    _write(path, self._forward, model, ranks)
        else:
            assert earlier is not None and folder is not None
            self._forward = earlier
            if ranks.rank == 0:
                self._outputs.go_on(folder / OUTPUTS, device_of(model))

    def is_of(self, model: nn.Module) -> bool:
        """Return whether a model's modules are those that are compared."""
        return self._outputs.is_of(model)

    def run(self, modes: Sequence[bool]) -> OutputChanges | None:
        """Run the first batch; return how far outputs moved; None from then on where that failed on a rank.

        Such as of an argument that can be read once. ``modes``: whether each module is in training, in this step.
        """
        if not self._runs:
            return None
        try:
            with torch.no_grad(), self._outputs.sampled():
                self._forward._replace(modes=modes).again(self._model)
        except Exception:
            if not forget_failed_pass(self._model):
                raise
            self._runs = False
        if self._ranks.any(not self._runs):
            self._runs = False
            return None
        moved = self._outputs.moved(device_of(self._model))
        return moved._replace(sums=self._ranks.sum(moved.sums))


def _setting(model: nn.Module, ranks: Ranks) -> list[Any]:
    """Return what has to be the same for a rank's batch to be its own: ranks, and its part of each parameter."""
    return [ranks.size, [[name, *on_this_rank(p).shape] for name, p in model.named_parameters()]]


def _write(path: Path, forward: Forward, model: nn.Module, ranks: Ranks) -> None:
    """Write a forward that runs again; remove an older one where this one can't be written."""
    leaves = pytree.tree_leaves(forward.arguments)
    are_plain = all(type(x) is Tensor or isinstance(x, int | float | str | None) for x in leaves)
    size = sum(x.nbytes for x in leaves if isinstance(x, Tensor))
    if not are_plain or size > LARGEST:
        return path.unlink(missing_ok=True)
    states = [*forward.random_states]
    states[_NUMPY] = [x.tolist() if isinstance(x, np.ndarray) else x for x in states[_NUMPY]]
    autocast = None if forward.autocast is None else tuple(forward.autocast)
    fields = forward._asdict() | {"random_states": states, "autocast": autocast}
    torch.save({"setting": _setting(model, ranks), "forward": fields}, saved := io.BytesIO())
    with replacing(path) as file:
        np.savez(file, saved=np.frombuffer(saved.getbuffer(), dtype="uint8"))


def _read(path: Path, model: nn.Module, ranks: Ranks) -> Forward | None:
    """Return the forward that a run wrote; None where there is none, or one of another model or other ranks."""
    with contextlib.suppress(Exception):  # whatever a damaged file makes torch raise: then it begins anew
        with np.load(path) as arrays:
            saved = io.BytesIO(arrays["saved"].tobytes())
        fields = torch.load(saved, map_location=device_of(model), weights_only=True)
        forward = Forward(**fields["forward"])
        is_own = fields["setting"] == _setting(model, ranks) and len(forward.modes) == len([*model.modules()])
        # generators' states lie on the CPU; the last one is the device's
        states = [state.cpu() if isinstance(state, Tensor) else state for state in forward.random_states]
        autocast = None if forward.autocast is None else Autocast(*forward.autocast)
        return forward._replace(random_states=states, autocast=autocast) if is_own else None
    return None
