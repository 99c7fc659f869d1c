"""Random sequences of everything that can touch a layer: nothing is stale and nothing is read in halves.

Hypothesis finds the sequences and shortens those that fail. A few examples run by default, thousands in the full set.
"""

import copy
import warnings
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import kernels, recipes
from octavo.scaling.delayed import State, empty_state
from octavo.scaling.recipe import WEIGHT
from octavo.weights.stored import local_stored
from octavo.weights.ways import InFP8
from tests.support.helpers import FP8_RECIPES
from tests.support.sharded_weights import whole_stored

TOKENS, IN, OUT, HISTORY = 16, 64, 32, 2

RECIPES = FP8_RECIPES | {"delayed": lambda: recipes.delayed(HISTORY)}
STORABLE = ("dynamic", "delayed", "blockwise")


class InFlight(NamedTuple):
    """A forward whose backward is still to come, and its twin's."""

    y: Tensor
    x: Tensor
    twin: nn.Module
    twin_y: Tensor
    twin_x: Tensor


class Twice(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        """Exact in any format."""
        return 2 * weight


class HandWritten:
    """An optimizer that torch knows nothing of."""

    def __init__(self, params: list[Any]) -> None:
        self.params = params

    def step(self) -> None:
        with torch.no_grad():
            for p in self.params:
                if p.grad is not None:
                    p.sub_(0.05 * p.grad)


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "octavo": lambda p: octavo.optim.AdamW(p, lr=0.05),
    "octavo's SGD": lambda p: octavo.optim.SGD(p, lr=0.05),
    "by hand": HandWritten,
}

WRITES: dict[str, Any] = {  # in place, seen by a counter
    "mul_": lambda p, factor: p.mul_(factor),
    "copy_": lambda p, factor: p.copy_(p * factor),
    "foreach": lambda p, factor: torch._foreach_mul_([p], factor),
    "inference mode": lambda p, factor: torch.inference_mode()(p.mul_)(factor),
    "init": lambda p, factor: nn.init.constant_(p, factor),
}


class Subject:
    """The layer; ``mesh``: sharded by fully_shard over its ranks, each of which runs the same sequence."""

    weight_shape: tuple[int, ...] = (OUT, IN)

    def plain(self, dtype: torch.dtype) -> Any:
        """Return the module that convert gets."""
        return nn.Linear(IN, OUT, dtype=dtype)

    def fresh(self) -> Any:
        """A layer for the twin."""
        return octavo.nn.Linear(IN, OUT, recipe=self.layer.recipe)

    def __init__(self, recipe: str, stored: bool, dtype: torch.dtype = torch.float32, mesh: Any = None) -> None:
        torch.manual_seed(0)
        self.mesh, self.stored = mesh, stored and recipe in STORABLE
        storage = "fp8" if self.stored else None
        model = nn.Sequential(self.plain(dtype))
        octavo.convert(model, RECIPES[recipe](), select=lambda module, name: True, weight_storage=storage)
        self.layer: Any = model[0]
        self.model: nn.Module = model
        if mesh is not None:
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.layer, mesh=mesh)
            fully_shard(model, mesh=mesh)  # which stays gathered after forward
        self.recipe_name, self.draws = recipe, 0
        self.empty_state()
        self.moved()

    # --- what the twin remembers --------------------------------------------------------------------------------------

    def empty_state(self) -> None:
        """The twin's delayed state, as new."""
        self.state = State.empty(HISTORY)

    def moved(self) -> None:
        """Go on with the layer's other parameters, which nothing from earlier reaches."""
        self.in_flight: list[InFlight] = []
        self.gradients: dict[str, Tensor | None] = {"weight": None, "bias": None}
        self.optimizers: dict[str, Any] = {}
        self.kept_weights: octavo.nn.KeptWeights | None = None
        self.model.zero_grad()
        self.forget()

    def forget(self) -> None:
        """Let no earlier write be noticed."""
        self.gathered: float | None = None  # the amax of the weight when ranks cast it last
        self.known = False  # whether a training forward under delayed scaling has seen the weight
        self.written = self.stepped = False  # since then, by hand and by its optimizer
        self.disturbed = False  # since its last forward
        self.replaced = False  # since then; the new one may be an optimizer's too
        self.swapped = False  # since then, its storage, as some optimizers do

    def wrote(self) -> None:
        """The weight was written in place."""
        self.written = True

    def written_in_flight(self) -> None:
        """Note a write of weights: tensors in flight on ranks read it if weights are gathered anew for backward."""
        self.disturbed = True
        if self.mesh is not None and self.layer.fp8.gather.way(self.layer).kind != InFP8.kind:
            self.in_flight = []

    def parameter(self, name: str = "weight") -> Any:
        """The sharded one, where the layer is."""
        return self.layer._parameters[name]

    def whole(self, tensor: Tensor) -> Tensor:
        part = local_stored(tensor)
        if part is not None and part is not tensor:
            return whole_stored(part, tensor)
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[operator,no-any-return]

    def random(self, *shape: int) -> Tensor:
        """The same on all ranks."""
        self.draws += 1
        return torch.randn(*shape, generator=torch.Generator().manual_seed(self.draws)).to(self.parameter("bias").dtype)

    @torch.inference_mode(False)
    @torch.enable_grad()
    def twin(self, weight: Tensor) -> Any:
        """A layer that has cast nothing yet, with this weight."""
        twin = self.fresh()
        twin.weight = nn.Parameter(weight.detach().clone(), requires_grad=self.parameter("weight").requires_grad)
        twin.bias = nn.Parameter(self.whole(self.parameter("bias")).detach().clone())
        twin.train(self.layer.training)
        if self.layer.recipe.delayed is not None:
            twin.fp8.state = self.state
        return twin

    # --- operations -------------------------------------------------------------------------------------------------

    def forward(self, size: float = 1.0, mode: str = "grad", weight: Tensor | None = None) -> None:
        """A forward; in mode "grad" its backward may come."""
        x = size * self.random(TOKENS, IN)
        if mode == "inference" and self.mesh is not None:
            mode = "no_grad"  # FSDP2 itself cannot gather in inference mode
        with {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]():
            self.run(x, self.model, weight, keep=mode == "grad")

    def run(self, x: Tensor, call: Any, weight: Tensor | None = None, keep: bool = True) -> None:
        """Compare ``call`` of x with the twin's forward; ``weight``: the one it computes with, if not the layer's."""
        of_parameter = weight is None
        weight = self.whole(self.parameter("weight")) if weight is None else weight
        if self.mesh is not None and (self.disturbed or self.layer.recipe.delayed is not None):
            self.in_flight = []  # one set of codes serves all that are in flight
        self.disturbed = False
        delayed, training = self.layer.recipe.delayed is not None and not self.stored, self.layer.training
        if delayed and training and of_parameter:
            if self.known and (self.replaced or self.written or (self.swapped and not self.stepped)):
                empty_state(self.state, WEIGHT)
            self.known = True
            self.written = self.replaced = self.swapped = False
        twin, scale_now = self.twin(weight), float(self.state.scale[WEIGHT])
        used = scale_now
        if delayed and self.mesh is not None and self.layer.fp8.gather.way(self.layer).kind == InFP8.kind:
            amax = float(weight.abs().max())
            moved = self.gathered not in (None, amax) and not self.stepped
            used = 0.0 if moved or used * amax > 2 * 448 else used  # far larger than before
            self.gathered = amax
        if (training and of_parameter) or self.mesh is not None:
            self.stepped = False
        self.state.scale[WEIGHT] = used
        x_of_layer, twin_x = (t.detach().clone().requires_grad_(keep) for t in (x, x))
        twin_y = twin(twin_x)
        self.state.scale[WEIGHT] = scale_now
        y = call(x_of_layer)
        assert torch.equal(y, twin_y), f"output is off by {(y - twin_y).abs().max()} of {twin_y.abs().max()}"
        if keep:
            self.in_flight.append(InFlight(y, x_of_layer, twin, twin_y, twin_x))

    def backward(self, which: int = 0, factor: float = 1.0, again: bool = False) -> None:
        """Backward of one of the forwards in flight; ``factor``: between its weight and the parameter.

        ``again``: twice over the same graph, of which the second changes no delayed state.
        """
        if not self.in_flight:
            return
        y, x, twin, twin_y, twin_x = self.in_flight.pop(which % len(self.in_flight))
        gradient, again = self.random(*y.shape), again and self.mesh is None
        y.backward(gradient, retain_graph=again)
        if again:
            y.backward(gradient)
        twin_y.backward(gradient)
        assert x.grad is not None and twin_x.grad is not None
        wanted = twin_x.grad * (1 + again)
        assert torch.equal(x.grad, wanted), f"the input's gradient is off by {(x.grad - wanted).abs().max()}"
        for _ in range(1 + again):
            self.add_gradients({name: self.mean_of_ranks(getattr(twin, name).grad) for name in self.gradients}, factor)
        self.compare_gradients()

    def mean_of_ranks(self, gradient: Tensor | None) -> Tensor | None:
        """What FSDP2 makes of a gradient; it is each rank's own, unless one has rolled its amax histories alone."""
        if gradient is not None and self.mesh is not None and self.mesh.size() > 1:
            gradient = gradient / self.mesh.size()
            dist.all_reduce(gradient, group=self.mesh.get_group())
        return gradient

    def add_gradients(self, new: dict[str, Tensor | None], factor: float = 1.0) -> None:
        """Add to the growth that is expected of the parameters' gradients."""
        for name, gradient in new.items():
            if gradient is not None:
                gradient = gradient * factor if name == "weight" else gradient
                old = self.gradients[name]
                self.gradients[name] = gradient.clone() if old is None else old + gradient

    def compare_gradients(self) -> None:
        """The layer's gradients are the twins'."""
        for name, wanted in self.gradients.items():
            gradient = self.parameter(name).grad
            assert (gradient is None) == (wanted is None)
            assert gradient is None or torch.equal(self.whole(gradient), wanted), f"the {name}'s gradient"

    def unroll(self, calls: int = 3) -> None:
        """Call the layer several times, with one backward pass of all calls."""
        if self.mesh is not None:
            return
        in_flight, self.in_flight, before = self.in_flight, [], self.state
        for call in range(calls):
            self.run(self.random(TOKENS, IN) * 4**call, self.model)
        calls_here, self.in_flight = self.in_flight, in_flight
        gradients = [self.random(*one.y.shape) * 4**call for call, one in enumerate(calls_here)]
        torch.autograd.backward([one.y for one in calls_here], gradients)
        sums: dict[str, Tensor | None] = dict.fromkeys(self.gradients)
        amaxes = []
        for one, gradient in reversed(list(zip(calls_here, gradients, strict=True))):
            if (delayed := self.layer.recipe.delayed) is not None:
                one.twin.fp8.state = state = before.clone()
                plan = one.twin_y.grad_fn.plan  # type: ignore[union-attr]
                one.twin_y.grad_fn.plan = plan._replace(layer=plan.layer._replace(state=state))  # type: ignore[union-attr]
            one.twin_y.backward(gradient)
            if delayed is not None:
                amaxes.append(state.amax_history[:, 0])
            assert torch.equal(one.x.grad, one.twin_x.grad)  # type: ignore[arg-type]
            for name, old in sums.items():
                new = getattr(one.twin, name).grad
                sums[name] = new if old is None else old + new
        if amaxes and self.layer.training:
            roles = torch.stack(amaxes).amax(0).view(3, 1, 1).unbind()
            amaxes_of_roles = [None if role == WEIGHT and self.stored else amax for role, amax in enumerate(roles)]
            kernels.delayed_update(*before, *amaxes_of_roles, *self.layer.recipe.delayed_update)
        self.add_gradients(sums)
        self.compare_gradients()

    def step(self, name: str = "SGD") -> None:
        """A step of an optimizer that owns the layer's parameters."""
        if self.stored:
            name, self.in_flight = "octavo", []  # their backward would read codes that were written since, and raise
        elif self.mesh is not None and name == "fused":
            name = "SGD"
        if name not in self.optimizers:
            self.optimizers[name] = OPTIMIZERS[name](list(self.model.parameters()))
        self.written_in_flight()
        self.optimizers[name].step()
        if name == "by hand":
            if self.gradients["weight"] is not None:
                self.wrote()
        else:
            self.stepped = True

    def other_step(self, rank: int = 0) -> None:
        """A step of an optimizer that owns nothing of it; on one rank only."""
        if self.mesh is not None and self.mesh.get_rank() != rank:
            return
        other = nn.Parameter(torch.ones(1))
        other.grad = torch.ones(1)
        torch.optim.SGD([other], lr=0.1).step()

    def zero_grad(self, to_none: bool = True) -> None:
        self.model.zero_grad(set_to_none=to_none)
        self.gradients = {n: None if to_none or g is None else torch.zeros_like(g) for n, g in self.gradients.items()}

    def write(self, name: str = "mul_", factor: float = 8.0) -> None:
        """Write the weight under no_grad."""
        self.written_in_flight()
        parameter = self.parameter()
        if self.stored and (self.mesh is not None or name not in ("copy_", "init")):
            return
        with torch.no_grad():
            if self.stored:
                self.in_flight = []
                parameter.copy_(parameter.dequantize() * factor)
            else:
                unseen = self.mesh is not None and name == "foreach" and self.layer.recipe.delayed is not None
                if unseen and self.layer.fp8.gather.way(self.layer).kind != InFP8.kind:
                    return  # torch moves no version of a DTensor then, so that its history stays
                WRITES[name](parameter, factor)
                if unseen:
                    return
        self.wrote()

    def write_data(self, replace: bool = False, factor: float = 8.0) -> None:
        """Write the weight through ``.data``, and tell octavo of it where nothing else can."""
        if self.stored and self.mesh is None and not (replace or self.parameter().requires_grad):
            self.written_in_flight()
            self.in_flight = []
            with warnings.catch_warnings(action="ignore", category=UserWarning):
                self.parameter().data += factor * torch.ones(())
            return self.wrote()
        if self.stored or (self.mesh is not None and (replace or self.layer.recipe.delayed is not None)):
            return
        self.written_in_flight()
        parameter = self.parameter()
        if replace:
            parameter.data = parameter.data * factor
            self.swapped = True
            return
        parameter.data.mul_(factor)
        if self.mesh is None:
            octavo.nn.invalidate(self.layer)
            empty_state(self.state, WEIGHT)
            self.kept_weights = None

    def rest(self) -> None:
        """Take a step that updates nothing, by an optimizer with masters: the weight stays as it was written."""
        if self.stored or self.parameter("weight").dtype == torch.float32 or self.mesh is not None:
            return
        if "masters" not in self.optimizers:
            self.optimizers["masters"] = octavo.optim.AdamW(self.model.parameters(), lr=0.0, master="split24")
        before = self.parameter("weight").detach().clone()
        self.optimizers["masters"].step()
        torch.testing.assert_close(self.parameter("weight").detach(), before, rtol=1e-2, atol=1e-4)
        self.stepped = True

    def set_recipe(self, recipe: str = "dynamic") -> None:
        """Set another recipe, or the same anew."""
        if (self.stored or self.mesh is not None) and recipe not in STORABLE:
            return
        if self.mesh is not None and self.in_flight:
            return
        octavo.set_recipe(self.model, RECIPES[recipe]())
        if recipe != "delayed" or self.recipe_name != "delayed":
            self.empty_state()
        self.recipe_name, self.kept_weights = recipe, None
        self.forget()

    def load(self, assign: bool = False) -> None:
        """Load other weights by load_state_dict."""
        state = {n: value if value.dtype == torch.uint8 else 2 * value for n, value in self.model.state_dict().items()}
        if self.stored or self.mesh is not None:
            assign = False
        if self.stored:
            self.in_flight = []
        self.model.load_state_dict(state, assign=assign)
        empty_state(self.state)  # the same one that backwards of forwards in flight read
        self.forget()
        self.written_in_flight()
        self.kept_weights = None
        if assign:
            self.moved()

    def replace(self) -> None:
        if self.mesh is None and not self.stored:
            self.layer.weight = nn.Parameter(self.random(*self.weight_shape))
            was_known = self.known
            self.moved()
            self.known = self.replaced = was_known

    def call_functionally(self) -> None:
        """Call with other parameters by functional_call, and compute the backward."""
        if self.mesh is not None or self.stored or self.layer.recipe.delayed is not None:
            return
        replaced = {"0.weight": nn.Parameter(self.random(*self.weight_shape)), "0.bias": self.parameter("bias")}
        call = partial(torch.func.functional_call, self.model, replaced)
        self.run(self.random(TOKENS, IN), call, replaced["0.weight"], keep=False)

    def parametrize(self) -> None:
        """A forward and backward while the weight is computed from the parameter."""
        if self.mesh is not None or self.stored or self.layer.recipe.delayed is not None:
            return  # under delayed scaling it counts as a write: torch sets the parameter to itself
        in_flight, self.in_flight = self.in_flight, []
        parameter = self.parameter()
        parametrize.register_parametrization(self.layer, "weight", Twice())
        self.layer._parameters["weight"] = parameter  # for this class; the module itself looks elsewhere
        try:
            self.run(self.random(TOKENS, IN), self.model, 2 * parameter.detach())
            self.backward(0, 2.0)
        finally:
            del self.layer._parameters["weight"]
            parametrize.remove_parametrizations(self.layer, "weight", leave_parametrized=False)
        self.in_flight = in_flight

    def copy(self) -> None:
        """Go on with a deep copy."""
        if self.mesh is None:
            self.model.zero_grad()
            self.in_flight = []
            self.model = copy.deepcopy(self.model)
            self.layer = self.model[0]  # type: ignore[index]
            self.moved()

    def to(self, dtype: torch.dtype = torch.bfloat16) -> None:
        """Go on in another dtype."""
        if self.mesh is None:
            noticed = "known", "written", "stepped", "replaced"  # by the layer, whatever it is moved to afterwards
            before = {name: getattr(self, name) for name in noticed}
            swapped = self.swapped or self.parameter("weight").dtype != dtype
            self.moved()
            self.model.to(dtype)
            vars(self).update(before, swapped=swapped)

    def train(self, training: bool = True) -> None:
        self.model.train(training)

    def freeze(self, frozen: bool = True) -> None:
        """Freeze the weight, or let it train again."""
        if self.mesh is None:
            self.zero_grad()
            self.in_flight = []
            self.parameter().requires_grad_(not frozen)

    def recompute(self, reentrant: bool = True) -> None:
        """A checkpointed forward and its backward at once."""
        in_flight, self.in_flight = self.in_flight if self.mesh is None else [], []
        self.run(self.random(TOKENS, IN), lambda x: checkpoint(self.model, x, use_reentrant=reentrant))
        self.backward()
        self.in_flight = in_flight

    def keep(self, anew: bool = True) -> None:
        if self.mesh is not None or self.stored or self.recipe_name not in ("dynamic", "blockwise") or self.in_flight:
            return
        if anew or self.kept_weights is None:
            self.kept_weights = octavo.nn.KeptWeights(self.model)
        self.kept_weights.cast()


class Routed(octavo.nn.GroupedLinear):
    """Experts of which each token has one already."""

    def forward(self, input: Tensor) -> Tensor:  # type: ignore[override]
        """Return the experts' output; one of the three experts gets no token."""
        return super().forward(input, torch.tensor([3, 3, TOKENS], dtype=torch.int32))


class GroupedSubject(Subject):
    """Linear layers of experts."""

    weight_shape = (3, OUT, IN)

    def __init__(self, recipe: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(recipe, stored=False, dtype=dtype)

    def plain(self, dtype: torch.dtype) -> Any:
        return Routed(3, IN, OUT, dtype=dtype)

    def fresh(self) -> Any:
        """A layer for the twin."""
        return Routed(3, IN, OUT, recipe=self.layer.recipe)

    def keep(self, anew: bool = True) -> None:
        """KeptWeights keep none of experts."""


FACTOR, FLAG = st.sampled_from((0.25, 8.0)), st.booleans()
DTYPE, RECIPE = st.sampled_from((torch.float32, torch.bfloat16)), st.sampled_from(list(RECIPES))
RULES = {
    "forward": {"size": st.sampled_from((1.0, 8.0)), "mode": st.sampled_from(("grad", "grad", "no_grad", "inference"))},
    "backward": {"which": st.integers(0, 3), "again": FLAG},
    "unroll": {"calls": st.integers(2, 3)},
    "step": {"name": st.sampled_from(list(OPTIMIZERS))},
    "other_step": {"rank": st.integers(0, 1)},
    "zero_grad": {"to_none": FLAG},
    "write": {"name": st.sampled_from(list(WRITES)), "factor": FACTOR},
    "write_data": {"replace": FLAG, "factor": FACTOR},
    "rest": {},
    "set_recipe": {"recipe": RECIPE},
    "load": {"assign": FLAG},
    "replace": {},
    "call_functionally": {},
    "parametrize": {},
    "copy": {},
    "to": {"dtype": DTYPE},
    "train": {"training": st.sampled_from((True, True, False))},
    "freeze": {"frozen": FLAG},
    "recompute": {"reentrant": FLAG},
    "keep": {"anew": FLAG},
}


class Layers(RuleBasedStateMachine):
    """A layer of any recipe and storage."""

    @initialize(recipe=RECIPE, stored=FLAG, dtype=DTYPE)
    def begin(self, recipe, stored, dtype):
        self.subject = Subject(recipe, stored, dtype)


class Experts(RuleBasedStateMachine):
    """Linear layers of experts, of any recipe."""

    @initialize(recipe=RECIPE, dtype=DTYPE)
    def begin(self, recipe, dtype):
        self.subject = GroupedSubject(recipe, dtype)


def _rule(name, arguments):
    def do(self, **arguments):
        getattr(self.subject, name)(**arguments)

    do.__name__ = name
    return rule(**arguments)(do)


for name, arguments in RULES.items():
    setattr(Layers, name, _rule(name, arguments))
    setattr(Experts, name, _rule(name, arguments))


def examples(count, steps):
    """Found anew each time in the full set; always the same ones by default."""
    limits: Any = {"max_examples": count, "stateful_step_count": steps, "deadline": None, "database": None}
    return settings(**limits, derandomize=count < 1000, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("count", [24, pytest.param(2000, marks=pytest.mark.full)])
def test_a_layer_on_one_device(count):
    run_state_machine_as_test(Layers, settings=examples(count, 30))


@pytest.mark.parametrize("count", [6, pytest.param(500, marks=pytest.mark.full)])
def test_experts_on_one_device(count):
    run_state_machine_as_test(Experts, settings=examples(count, 30))


def play(mesh, recipe, stored, steps):
    """A sequence on a sharded layer; an error is an answer, so that ranks stay together."""
    subject = Subject(recipe, stored, mesh=mesh)
    for name, arguments in steps:
        getattr(subject, name)(**arguments)


SHARDED = "forward backward step other_step zero_grad write write_data set_recipe load train recompute".split()
STEPS = st.one_of(*(st.tuples(st.just(name), st.fixed_dictionaries(RULES[name])) for name in SHARDED))
ROLLED_ON_ONE_RANK = "recompute other_step forward other_step backward step recompute forward backward".split()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("count", [15, pytest.param(1000, marks=pytest.mark.full)])
def test_a_layer_under_fsdp2(pool, ranks, count):
    @examples(count, 30)
    @given(RECIPE, FLAG, st.lists(STEPS, max_size=30))
    @example("delayed", False, [(name, {"rank": 1} if name == "other_step" else {}) for name in ROLLED_ON_ONE_RANK])
    def run(recipe, stored, steps):
        pool.run(play, (ranks,), recipe, stored, steps)

    run()
