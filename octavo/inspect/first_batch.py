"""The first recorded batch, which runs again in each recorded step, also of a run that goes on from another.

Its backward begins with the outputs themselves as their gradients, as of half their mean square: no label and no loss
is in what it computes.

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
from octavo.inspect.forwards import Autocast, Forward, RandomStates, backward, copy_of, device_of, map_tensors
from octavo.inspect.module_outputs import ModuleOutputs, OutputChanges
from octavo.inspect.notes import gets_gradient
from octavo.inspect.record import np
from octavo.private import pytree
from octavo.weights.fsdp2 import forget_failed_pass, on_this_rank

OUTPUTS = "outputs.npz"
LARGEST_BATCH = 1 << 26  # bytes of a batch that is written
SHARE, LEAST_ROWS = 4, 2  # one row of so many runs again, but at least so many: a norm over one has no variance


class FirstBatch:
    """Runs the first recorded batch again, and compares what forward and backward compute of it with the run before.

    Args:
        model: whose forward it is.
        forward: this step's first one: the first batch, unless a run is resumed and all ranks find theirs.
        ranks: that train together.
        folder: the record's.
        resumes: whether to read what the run before wrote.

    Attributes:
        outputs: compares those of the model's modules with the run before.
    """

    def __init__(self, model: nn.Module, forward: Forward, ranks: Ranks, folder: Path, resumes: bool) -> None:
        self._model, self._ranks, self.outputs = model, ranks, ModuleOutputs(model)
        path = folder / f"batch-{ranks.rank}.npz"
        earlier = _read(path, model, ranks) if resumes else None
        if ranks.any(earlier is None):
            whole = forward._replace(delayed=[], state=None)  # its modules' state is each step's
            self._forwards = [whole._replace(arguments=_part(whole.arguments)), whole]  # the first of them that runs
            self._path: Path | None = path
        else:
            assert earlier is not None
            self._forwards, self._path = [earlier], None
            if ranks.rank == 0:
                self.outputs.go_on(folder / OUTPUTS, device_of(model))

    def run(self, modes: Sequence[bool]) -> OutputChanges | None:
        """Run the first batch; return how far tensors moved; None where that failed on a rank.

        Where a part of it failed, the next call runs the whole; where that did too, as of an argument that can be read
        once, all later ones return None. ``modes``: whether each module is in training, in this step. No parameter may
        have a gradient, and none has one then.
        """
        if not self._forwards:
            return None
        has_failed, forward = False, self._forwards[0]._replace(modes=modes)
        try:
            with self.outputs.sampled():
                with torch.enable_grad():
                    all_outputs = forward.again(self._model)
                outputs = [*filter(gets_gradient, all_outputs)]
                backward(self._model, outputs, [y.detach() / max(1, y.shape[:-1].numel()) for y in outputs])
        except Exception:
            if not forget_failed_pass(self._model):
                raise
            has_failed = True
        finally:
            self._model.zero_grad()
        if self._ranks.any(has_failed):
            del self._forwards[0]
            return None
        del self._forwards[1:]
        if self._path is not None:
            with contextlib.suppress(OSError):  # the record says so when it is written
                _write(self._path, self._forwards[0], self._model, self._ranks)
            self._path = None  # it has the batch now
        moved = self.outputs.changes(device_of(self._model))
        return moved._replace(sums=self._ranks.sum(moved.sums))


def _part(arguments: Any) -> Any:
    """Return arguments with some of their rows, where all tensors have as many rows; else the arguments.

    These too where a tensor has no rows to cut, as a sparse or nested one, or may have indices of rows that are cut.
    """
    tensors: list[Tensor] = []
    map_tensors(tensors.append, arguments)
    rows = {x.shape[0] if x.shape else 0 for x in tensors}
    count = max(LEAST_ROWS, min(rows, default=0) // SHARE)
    try:
        if len(rows) != 1 or any(_may_index(x, count) for x in tensors):
            return arguments
        return map_tensors(lambda x: copy_of(x[:count]), arguments)  # copies, as views would hold the whole
    except Exception:
        return arguments


def _may_index(x: Tensor, count: int) -> bool:
    """Return whether a tensor's first rows may have an index of later ones, which on a GPU would end the process."""
    return x.dtype in (torch.int32, torch.int64) and bool((x[:count] >= count).any()) and bool((x < len(x)).all())


def _setting(model: nn.Module, ranks: Ranks) -> list[Any]:
    """Return what has to be the same for a rank's batch to be its own: ranks, and its part of each parameter."""
    return [ranks.size, [[name, *on_this_rank(p).shape] for name, p in model.named_parameters()]]


def _write(path: Path, forward: Forward, model: nn.Module, ranks: Ranks) -> None:
    """Write a forward that runs again; remove an older one where this one can't be written."""
    leaves = pytree.tree_leaves(forward.arguments)
    tensors = [x for x in leaves if type(x) is Tensor and x.layout is torch.strided and not x.is_nested]
    are_plain = len(tensors) == sum(not isinstance(x, int | float | str | None) for x in leaves)
    if not are_plain or sum(x.nbytes for x in tensors) > LARGEST_BATCH:
        return path.unlink(missing_ok=True)
    of_numpy = [x.tolist() if isinstance(x, np.ndarray) else x for x in forward.random_states.numpy]
    random_states = [*forward.random_states._replace(numpy=of_numpy)]  # torch.load would read no array
    fields = forward._asdict() | {"random_states": random_states, "autocast": tuple(forward.autocast)}
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
        # generators' states lie on the CPU, the device's too
        states = [state.cpu() if isinstance(state, Tensor) else state for state in forward.random_states]
        forward = forward._replace(random_states=RandomStates(*states), autocast=Autocast(*forward.autocast))
        return forward if is_own else None
    return None
