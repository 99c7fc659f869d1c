"""Random sequences of an optimizer's calls, beside a twin that keeps nothing.

The twin is an optimizer made anew for each step, of its own weights and states, and its gradients are given whole.
"""

import copy
import functools
import gc
import io
import math
import pickle
import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octavo.optim import SGD, Adam, AdamW, Muon, update_in_backward
from octavo.tensor.stored_gradient import StoredGradient
from octavo.weights.stored import StoredWeight
from tests.support.trained import by_hand

KINDS: dict[str, Any] = {
    "AdamW": AdamW,
    "Adam": functools.partial(Adam, weight_decay=0.1),
    "SGD": functools.partial(SGD, momentum=0.9),
    "Muon": functools.partial(Muon, adamw={}, ns_steps=1),
}
WEIGHTS = [((5, 200), torch.bfloat16), ((7, 1), torch.float32), ((2, 3, 4, 5), torch.float32), ((300,), torch.bfloat16)]
WEIGHTS += [((), torch.float32), ((0, 4), torch.bfloat16)]
HUGE = 1 << 30
WAYS = [None, 0, 1000, HUGE]  # how many bytes wait in backward; None: there are no updates in backward


class Subject:
    """Weights and an optimizer, and the same of the twin: ``weights``, ``states`` and the groups' ``options``."""

    def __init__(self, kind: str, moments: str, master: str | None, stored: bool, coded: bool, skips: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in WEIGHTS]
        self.params = [nn.Parameter(value) for value in values]
        if stored and kind != "SGD":
            self.params[0] = nn.Parameter(StoredWeight.cast(values[0]))
        self.coded, self.skips, self.count, self.first = coded, skips, 0, len(values)
        options = {"moments": moments, "master": master, "skip_nonfinite": skips, "seed": 5}
        self.make = functools.partial(KINDS[kind], lr=0.01, **options)
        self.weights = copy.deepcopy(self.params)
        self.states: list[dict[str, Any]] = [{} for _ in values]
        self.options: dict[str, float] = {}
        self.hooked: list[bool] = []
        self.optimizer = self.optimizer_of(self.params, coded)
        self.attached()

    def optimizer_of(self, params: list[nn.Parameter], coded: bool) -> Any:
        """Return an optimizer of these weights; weights that came later are groups of their own."""
        optimizer = self.make(params[: self.first], gradient_storage="fp8" if coded else None)
        for param in params[self.first :]:
            optimizer.add_param_group({"params": [param]})
        for group in optimizer.param_groups:
            group |= self.options
        return optimizer

    def attached(self) -> None:
        """The optimizer has seen which weights there are, and which are frozen."""
        before = [*self.hooked, *[False] * (len(self.params) - len(self.hooked))]
        self.hooked = [param.requires_grad or had for param, had in zip(self.params, before, strict=True)]

    # --- steps --------------------------------------------------------------------------------------------------------

    def step(self, reached: list[int], how: str, fault: bool, to_none: bool, removed: bool) -> None:
        """A step of micro-batches, each with a loss of the weights that are bits of a number."""
        handle, scaler = self.optimizer.in_backward, torch.amp.GradScaler("cpu", init_scale=1024.0)
        if how == "dropped" and handle is not None and handle.threshold != HUGE:
            how = "plain"  # its gradients have been used
        if how == "scaled" and handle is not None:
            how = "plain"
        grads = [self.gradients(number, mask) for number, mask in enumerate(reached)]
        spoiled = fault and (self.skips or how == "scaled") and self.spoil(grads)
        if how == "closure":
            self.attached()  # before the closure is called
        gradients_of_step = self.whole(grads)
        before = [part.clone() for param in self.params for part in self.parts(param)]

        def backward() -> None:
            for number, grads_of_batch in enumerate(grads):
                losses = [self.read(self.params[at]).mul(grad).sum() for at, grad in grads_of_batch.items()]
                with self.optimizer.accumulate() if number < len(grads) - 1 else nullcontext():
                    if losses:
                        loss = torch.stack([loss.float() for loss in losses]).sum()
                        (scaler.scale(loss) if how == "scaled" else loss).backward()

        if how == "closure":
            self.optimizer.step(backward)
        else:
            backward()
            kinds = [isinstance(param.grad, StoredGradient) for param in self.params]
            assert all(kinds[at] == (self.coded and self.hooked[at]) for at in grads[-1])
            if removed and handle is not None:
                handle.remove()
            if how == "dropped":
                self.optimizer.zero_grad()
                gradients_of_step = [None] * len(gradients_of_step)
            if how == "scaled" and any(grads):
                scaler.step(self.optimizer)
            else:
                self.optimizer.step()
        self.attached()
        self.optimizer.zero_grad(set_to_none=to_none)
        if spoiled:
            assert all(map(torch.equal, before, [part for param in self.params for part in self.parts(param)]))
        self.twin_steps(gradients_of_step, spoiled)
        self.count += 1

    @staticmethod
    def read(param: nn.Parameter) -> Tensor:
        return param.dequantize() if isinstance(param, StoredWeight) else param

    def gradients(self, number: int, mask: int) -> dict[int, Tensor]:
        """The gradients of a micro-batch, by the weights' numbers."""
        generator = torch.Generator().manual_seed(10 * self.count + number)
        drawn_gradients = [torch.randn(p.shape, generator=generator).to(p.dtype) * 4**number for p in self.params]
        return {at: grad for at, grad in enumerate(drawn_gradients) if mask >> at & 1 and self.params[at].requires_grad}

    @staticmethod
    def spoil(grads: list[dict[int, Tensor]]) -> bool:
        """Put a NaN into a gradient, if there is one."""
        full = [grad for grads_of_batch in grads for grad in grads_of_batch.values() if grad.numel()]
        if full:
            full[-1].view(-1)[0] = math.nan
        return bool(full)

    def whole(self, grads: list[dict[int, Tensor]]) -> list[Tensor | None]:
        """Return each weight's gradient after the micro-batches of a step."""
        totals: list[Tensor | None] = []
        for at, param in enumerate(self.params):
            wide = self.coded and self.hooked[at]
            handle = self.optimizer.in_backward
            is_zeroed = handle is not None and handle.leaves_zeros and param in handle._updated_last_step
            total = None if param.grad is None and not is_zeroed else torch.zeros(param.shape, dtype=param.dtype)
            for grads_of_batch in grads:
                if at in grads_of_batch:
                    grad = grads_of_batch[at].float() if wide else grads_of_batch[at]
                    total = grad if total is None else total + grad
            if wide and at in grads[-1] and total is not None and total.numel():
                rounded = nn.Parameter(total)
                rounded.grad = total
                by_hand(rounded)
                total = rounded.grad
            totals.append(total)
        return totals

    def twin_steps(self, gradients: list[Tensor | None], spoiled: bool) -> None:
        twin = self.optimizer_of(self.weights, False)
        twin.skip_nonfinite, twin.skip = False, torch.tensor(1.0) if spoiled else None
        for weight, state, grad in zip(self.weights, self.states, gradients, strict=True):
            twin.state[weight] = state
            if grad is not None:
                weight.grad_dtype = grad.dtype
                weight.grad = grad
        twin.step()
        for weight in self.weights:
            weight.grad = None

    # --- between steps ------------------------------------------------------------------------------------------------

    def update_otherwise(self, threshold: int | None) -> None:
        """Begin or end updates in backward."""
        if self.optimizer.in_backward is not None:
            self.optimizer.in_backward.remove()
        if threshold is not None and not self.coded and not self.skips:
            update_in_backward(self.optimizer, threshold)

    def load(self) -> None:
        """Go on with a new optimizer that loads the state of the one before."""
        self.update_otherwise(None)
        file = io.BytesIO()
        torch.save(self.optimizer.state_dict(), file)
        file.seek(0)
        self.optimizer, self.hooked = None, []
        gc.collect()  # the hooks of the one before
        self.optimizer = self.optimizer_of(self.params, self.coded)
        self.optimizer.load_state_dict(torch.load(file, weights_only=True))
        self.attached()

    def go_on_with_a_copy(self, pickled: bool) -> None:
        """Go on with a copy; the original stays as it was."""
        both = self.params, self.optimizer
        self.params, self.optimizer = pickle.loads(pickle.dumps(both)) if pickled else copy.deepcopy(both)
        self.hooked = []
        self.attached()

    def replace_tensors(self, whose: str) -> None:
        """The same values in other memory."""
        for param in self.params:
            state = self.optimizer.state.get(param, {})
            if whose == "weights" and not isinstance(param, StoredWeight):
                old = param.data
                param.data = old.clone()
                old.fill_(99.0)  # nobody's now
            elif whose == "state, one by one":
                state.update({name: value.clone() for name, value in state.items()})
            elif whose == "state" and state:
                self.optimizer.state[param] = {name: value.clone() for name, value in state.items()}

    def replace_parameter(self, at: int) -> None:
        """Replace a parameter, as accelerate's FSDP2 does; its state begins anew."""
        for group in self.optimizer.param_groups:
            for number, param in enumerate(group["params"]):
                if param is self.params[at] and not isinstance(param, StoredWeight):
                    self.params[at] = group["params"][number] = nn.Parameter(param.detach().clone())
                    self.states[at], self.hooked[at] = {}, False
                    self.optimizer.state.pop(param, None)

    def add_group(self) -> None:
        if len(self.params) < self.first + 2:
            self.params.append(nn.Parameter(torch.full((3, 130), 0.5)))
            self.weights.append(copy.deepcopy(self.params[-1]))
            self.states.append({})
            self.optimizer.add_param_group({"params": [self.params[-1]]})
            self.optimizer.param_groups[-1] |= self.options
            self.attached()

    def set_option(self, name: str, value: float) -> None:
        self.options[name] = value
        for group in self.optimizer.param_groups:
            group[name] = value

    def freeze(self, at: int, frozen: bool) -> None:
        self.params[at].requires_grad_(not frozen)

    # --- comparison ---------------------------------------------------------------------------------------------------

    @staticmethod
    def parts(param: nn.Parameter) -> list[Tensor]:
        stored = isinstance(param, StoredWeight)
        return [param.qdata.view(torch.uint8), param.scale_inv] if stored else [param.detach()]

    def check(self) -> None:
        for at, (param, weight, state) in enumerate(zip(self.params, self.weights, self.states, strict=True)):
            assert all(map(torch.equal, self.parts(param), self.parts(weight))), f"weight {at}"
            actual = self.optimizer.state.get(param, {})
            if any(not here and there.get("step") == 0 for here, there in ((state, actual), (actual, state))):
                continue  # a load keeps it, or leaves it out, as the first step will begin it; the next step compares
            assert actual.keys() == state.keys(), f"state of weight {at}"
            assert all(torch.equal(actual[name], state[name]) for name in state), f"state of weight {at}"


def drawn(chosen: random.Random) -> tuple[str, dict[str, Any]]:
    """Return the next action and its arguments; a step more often than anything else."""
    at, flag = chosen.randrange(len(WEIGHTS)), chosen.random() < 0.5
    step = {
        "reached": [chosen.randrange(1, 1 << len(WEIGHTS) + 2) for _ in range(chosen.randint(1, 3))],
        "how": chosen.choice(("plain", "plain", "closure", "scaled", "dropped")),
        "fault": chosen.random() < 0.3,
        "to_none": flag,
        "removed": chosen.random() < 0.3,
    }
    others = {
        "update_otherwise": {"threshold": chosen.choice(WAYS)},
        "load": {},
        "go_on_with_a_copy": {"pickled": flag},
        "replace_tensors": {"whose": chosen.choice(("weights", "state", "state, one by one"))},
        "replace_parameter": {"at": at},
        "add_group": {},
        "set_option": {"name": chosen.choice(("lr", "weight_decay")), "value": chosen.choice((0.0, 0.03))},
        "freeze": {"at": at, "frozen": flag},
    }
    return chosen.choice([*5 * [("step", step)], *others.items()])


def play(seed: int) -> None:
    """Twelve things that happen to an optimizer of any kind."""
    chosen = random.Random(seed)
    options: dict[str, Any] = {
        "kind": chosen.choice(list(KINDS)),
        "moments": chosen.choice(("fp32", "bf16", "fp8")),
        "master": chosen.choice(("auto", "split16", "fp32", None)),
        "stored": chosen.random() < 0.5,
        "coded": chosen.random() < 0.4,
        "skips": chosen.random() < 0.4,
    }
    threshold, history = chosen.choice(WAYS), list[Any]()
    try:
        subject = Subject(**options)
        subject.update_otherwise(threshold)
        for _ in range(12):
            history.append(drawn(chosen))
            name, arguments = history[-1]
            getattr(subject, name)(**arguments)
            subject.check()
    except Exception as error:
        error.add_note(f"seed {seed}: {options}, {threshold} bytes, {history}")
        raise


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(15, 1200, 15))])
def test_an_optimizer_and_its_twin(first):
    for seed in range(first, first + 15):
        play(seed)
