"""Faults in what joins features, one guard, reset or ignore list each, and the cell of the table that finds it.

``python -m tests.support.seams.mutants [part of a file's name]`` makes each in a copy of octavo and runs its cell,
which has to fail; it prints what the cell says. A process is forked for each, which imports octavo anew.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
WARM = ("torch._dynamo", "torch.distributed.fsdp", "gfloat", "ml_dtypes")  # nothing that imports octavo


class Mutant(NamedTuple):
    """In ``file`` of octavo/, ``old`` (there once) is replaced by ``new``; (feature, situation) is the cell."""

    file: str
    old: str
    new: str
    feature: str
    situation: str


MODULE, WRITES, PASS = "nn/recipe_module.py", "nn/weight_writes.py", "kernels/backward_pass.py"
DELAYED, UPDATE, PRODUCTS = "scaling/delayed.py", "kernels/reference/delayed_update.py", "autograd/products.py"
BACKWARD, GATHER, GROUP = "optim/in_backward.py", "nn/gather.py", "nn/gather_group.py"
OFTEN, BY_HAND = "one module called 64 times", "descent through torch._foreach_"
BETWEEN, TOLD = "a recipe set between forward and backward", "descent through .data, octavo.nn.invalidate"
IN_BACKWARD, STORED = "updates in backward", "FP8 weights"
MUTANTS = [
    # --- which recipe, which state
    Mutant(
        MODULE, "            drop_delayed_state(self)\n        if", "            pass\n        if", "delayed", BETWEEN
    ),
    Mutant(DELAYED, "for name in (STATE, LOADED)", "for name in (LOADED,)", "delayed", BETWEEN),
    Mutant(MODULE, "linear(input, widened(weight_NK), bias)", "linear(input, weight_NK, bias)", STORED, BETWEEN),
    Mutant(MODULE, "empty_state(state_of(self), WEIGHT)", "pass", "delayed", BY_HAND),
    Mutant(MODULE, "empty_state(state_of(self), WEIGHT)", "empty_state(state_of(self))", "delayed", BY_HAND),
    Mutant(MODULE, "if not self.training:  # the weight", "if False:  #", "delayed", "evaluation between steps"),
    Mutant(MODULE, '        if f"{prefix}weight" in state_dict:', "        if False:", "delayed", "load_state_dict"),
    Mutant("nn/using.py", "= state.clone()", "= state", "delayed", "octavo.using between steps"),
    Mutant(
        "nn/using.py", "= state.on(device_of(module))", "= state_of(module)", "delayed", "octavo.using between steps"
    ),
    Mutant(
        DELAYED,
        "return State(*(tensor.clone() for tensor in self))",
        "return self",
        "delayed",
        "octavo.using between steps",
    ),
    Mutant(
        DELAYED,
        'if self.scale.is_meta or device.type == "meta":',
        "if False:",
        "delayed",
        "meta, to_empty, reset_parameters",
    ),
    # --- who wrote a weight
    Mutant(WRITES, "self._key == _key_of(weight)", "True", "KeptWeights", BY_HAND),
    Mutant(WRITES, "weight.stride(), version_of(weight),", "weight.stride(),", "KeptWeights", BY_HAND),
    Mutant(WRITES, "id(weight), OPTIMIZER_STEPS.by_hand(weight)", "id(weight), 0", "delayed", BY_HAND),
    Mutant(WRITES, "by_step = before[1][0] != place[0]", "by_step = False", "delayed", "as it is"),
    Mutant(WRITES, 'module.__dict__["kept_operands"] = None', "pass", "KeptWeights", TOLD),
    Mutant(WRITES, "            empty_state(state_of(module), WEIGHT)", "            pass", "delayed", TOLD),
    Mutant(
        "step_count.py",
        "known.step, known.version = self.count, version_of(parameter)",
        "known.step = self.count",
        "delayed",
        "as it is",
    ),
    # --- the backward pass
    Mutant(PASS, "if task == -1 or _tasks.get(device) != task:", "if task == -1:", "delayed", "as it is"),
    Mutant(PASS, "if task == -1 or _tasks.get(device) != task:", "if True:", "delayed", OFTEN),
    Mutant(PASS, "torch.where(rolled, ", "torch.where(rolled & False, ", "delayed", OFTEN),
    Mutant(
        DELAYED, "if is_gradient or (not ", "if is_gradient and (not ", "delayed", "one module in three checkpoints"
    ),
    Mutant(
        DELAYED, "if is_gradient or (", "if is_gradient or False and (", "delayed", "one module in three checkpoints"
    ),
    Mutant(DELAYED, "SAC_IGNORED_OPS.add(", "(", "delayed", "selective checkpointing"),
    Mutant(UPDATE, "[max(amax, newest), *older] if raises", "[amax, *older] if raises", "delayed", OFTEN),
    Mutant(UPDATE, "torch.where(again, before[1], ", "torch.where(again & False, before[1], ", "delayed", OFTEN),
    Mutant(
        PRODUCTS, "plan._replace(state=state, commits=False)", "plan._replace(state=state)", "delayed", "backward twice"
    ),
    Mutant(
        PRODUCTS,
        "if keeps_graph():",
        "if False:",
        "delayed",
        "backward twice",
    ),
    Mutant(
        PRODUCTS,
        "        return True\n",
        "        return False\n",
        "dynamic",
        "octavo.using between steps",
    ),
    # --- weights in FP8
    Mutant("tensor/stored_shards.py", "(self.rest, False, ", "(None, False, ", STORED, "a pickled module"),
    # --- updates in backward, gradients in FP8, schedules
    Mutant(BACKWARD, "        if self._accumulating:", "        if False:", IN_BACKWARD, "accumulation"),
    Mutant(
        BACKWARD,
        "            self._updated.clear()\n            self._pending",
        "            self._pending",
        IN_BACKWARD,
        "an exception in backward",
    ),
    Mutant(
        BACKWARD,
        "        self._updated.clear()\n        self._unended",
        "        self._unended",
        IN_BACKWARD,
        "as it is",
    ),
    Mutant(
        BACKWARD, 'if getattr(self.optimizer, "found_inf", None) is not None:', "if False:", IN_BACKWARD, "GradScaler"
    ),
    Mutant(
        BACKWARD, "        self._look()\n        self._forget_used()", "        self._look()", IN_BACKWARD, "as it is"
    ),
    Mutant(
        "optim/gradients.py", "        if not self._accumulating:", "        if True:", "FP8 gradients", "accumulation"
    ),
    Mutant(
        "schedule/schedule.py",
        "phase.from_step is not None and self.steps >= phase.from_step",
        "phase.from_step is not None and self.steps > phase.from_step",
        "schedule",
        "as it is",
    ),
    # --- gathers
    Mutant(GATHER, "if for_backward and self.codes is not None:", "if self.codes is not None:", "dynamic", "FSDP2"),
    Mutant(GROUP, ", *ranks, device=", ", device=", "dynamic", "FSDP2"),
    Mutant(GROUP, "cast.margin, kept)", "cast.margin)", "delayed", "FSDP2"),
    Mutant("nn/convert.py", "own.gather.used, own.gather.agreed = None, False", "pass", "schedule", "FSDP2"),
]


def finds(mutant: Mutant, root: Path) -> str:
    """What its cell says in a process that has not imported octavo yet; nothing, if all is well."""
    sys.path.insert(0, str(root))
    os.chdir(root)  # from where ranks import
    os.environ["PYTHONPATH"] = str(root)
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    cells = importlib.import_module("tests.support.seams.cells")
    ranks = cells.SITUATIONS[mutant.situation].ranks
    try:
        if not ranks:
            return str(cells.fault(None, mutant.feature, mutant.situation))
        pool = importlib.import_module("tests.support.pool").Pool()
        try:
            return str(max(pool.run(cells.fault, ranks, mutant.feature, mutant.situation, seconds=120)))
        finally:
            pool.stop()
    except BaseException as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"


def in_copy(mutant: Mutant) -> str:
    """The same of a copy of the repository with the mutant, in a fork."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shutil.copytree(ROOT / "octavo", root / "octavo", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "tests", root / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        path = root / "octavo" / mutant.file
        path.write_text(path.read_text().replace(mutant.old, mutant.new))
        if child := os.fork():
            os.waitpid(child, 0)
        else:
            warnings.simplefilter("ignore")
            (root / "said").write_text(finds(mutant, root))
            os._exit(0)
        return (root / "said").read_text()


if __name__ == "__main__":
    for name in WARM:
        importlib.import_module(name)
    left = 0
    for mutant in MUTANTS:
        if all(part in mutant.file for part in sys.argv[1:]):
            said = in_copy(mutant)
            left += not said
            cell = f"{mutant.feature} x {mutant.situation}"
            print(f"{mutant.file}: {mutant.old.strip()!r}, {cell}: {said[:120] or 'NOT FOUND'}", flush=True)
    sys.exit(f"{left} are not found" if left else 0)
