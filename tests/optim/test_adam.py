"""AdamW, Adam and SGD against torch's, and the cases that 8-bit moments meet."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octavo.kernels.step_numbers import adam_max_update
from octavo.optim import SGD, Adam, AdamW
from tests.support.memory import peak_bytes
from tests.support.trained import MASTERS, MOMENTS, moments_of, parameter, train

MOMENTUM = {"momentum": 0.9}
KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    **{kind.__name__: (kind, {}) for kind in (AdamW, Adam, SGD)},
    "momentum": (SGD, MOMENTUM),
    "Nesterov's": (SGD, MOMENTUM | {"nesterov": True}),
    "dampened": (SGD, MOMENTUM | {"dampening": 0.25}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("decay", "maximize"), [(0.0, False), (0.1, True)])
def test_float32_is_torchs_bit_for_bit_in_the_state_too(kind, decay, maximize):
    ours, rule = KINDS[kind]
    others = {} if ours is SGD else {"betas": (0.8, 0.9), "eps": 1e-4}
    names = ("step", "exp_avg", "exp_avg_sq") if ours is not SGD else ("momentum_buffer",) if rule else ()

    def trained(kind: type, **options: object) -> list[Tensor]:
        torch.manual_seed(0)
        params = [parameter(5, 7), parameter(3), parameter(2, 3, 4, 5), parameter(), parameter(1000, 200)]
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.02} | others]
        optimizer = kind(groups, lr=0.01, weight_decay=decay, maximize=maximize, **rule, **options)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        for seed in range(3):
            train(optimizer, 1, seed)
            schedule.step()
        assert [group["lr"] for group in optimizer.param_groups] == [0.005, 0.01]
        return [*params, *(optimizer.state[p][name] for p in params for name in names)]

    theirs = trained(getattr(torch.optim, ours.__name__), foreach=False)
    assert all(torch.equal(a, b) for a, b in zip(trained(ours, moments="fp32"), theirs, strict=True))


def test_gradients_too_large_for_a_second_moment_move_weights_as_float32_moments_do():
    ends = []
    for moments in MOMENTS:
        p = nn.Parameter(torch.ones(4, 128))
        optimizer = AdamW([p], lr=0.01, moments=MOMENTS[moments])
        for gradient in (1.0, 1e30, 1e30):
            p.grad = torch.full_like(p, gradient)
            optimizer.step()
        ends.append(p.detach().clone())
        for _ in range(30):  # and from then on by no more than any gradients can move them
            p.grad = torch.ones_like(p)
            optimizer.step()
        assert ((p - ends[-1]).abs() < 0.01 * 8).all(), moments
        saved = optimizer.state_dict()
        if moments == "fp32":
            other = AdamW([p], lr=0.01)
            with pytest.warns(UserWarning, match="was converted"):
                other.load_state_dict(saved)
            train(other, 1)
            assert p.isfinite().all()
    assert all(torch.allclose(end, ends[0], rtol=1e-3) for end in ends)


@pytest.mark.covering(1)
@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("master", MASTERS)
def test_the_adversarial_gradients_reach_the_bound_and_no_more(master, moments):
    beta1, beta2, steps, lr = 0.9, 0.999, 40, 2.0**-10
    p = nn.Parameter(torch.zeros(3, 200, dtype=torch.bfloat16))
    optimizer = AdamW([p], lr, (beta1, beta2), 1e-30, 0.0, moments=MOMENTS[moments], master=master, clip_update=True)
    for number in range(1, steps + 1):
        p.grad = torch.full((3, 200), (beta1 / beta2) ** (steps - number), dtype=torch.bfloat16)
        before = p.detach().float()
        optimizer.step()
        moved, limit = (p.detach().float() - before).abs(), lr * adam_max_update(number, beta1, beta2)
        assert p.isfinite().all()
        assert moved.max() <= limit + p.detach().abs().max() * 2.0**-7
    assert moved.mean() > 0.8 * limit
    assert all(value.isfinite().all() for value in optimizer.state[p].values())


@pytest.mark.parametrize("moments", MOMENTS)
def test_what_gets_no_gradient_stays_as_it_is(moments):
    embedding, matrix, unused = nn.Embedding(10, 200), parameter(4, 300), parameter(5)
    start = embedding.weight.detach().clone()
    optimizer = AdamW([embedding.weight, matrix, unused], weight_decay=0.0, moments=MOMENTS[moments])
    for _ in range(3):
        optimizer.zero_grad()
        embedding(torch.tensor([1, 3])).sum().backward()
        matrix.grad = torch.zeros(4, 300)
        before = matrix.detach().clone()
        optimizer.step()
        assert torch.equal(matrix, before)
    touched, untouched = torch.tensor([1, 3]), torch.tensor([0, 2, 4, 5, 6, 7, 8, 9])
    assert torch.equal(embedding.weight[untouched], start[untouched])
    assert (embedding.weight[touched] != start[touched]).all()
    for moment in moments_of(optimizer, embedding.weight):
        assert (moment[untouched] == 0).all() and (moment[touched] != 0).all()
    assert unused not in optimizer.state


@pytest.mark.covering(1)
@pytest.mark.parametrize("master", ["auto", *MASTERS])
@pytest.mark.parametrize("moments", MOMENTS)
def test_strides_do_not_matter(master, moments):
    dtype = torch.float32 if master == "auto" else torch.bfloat16
    for start in (torch.randn(300, 40).t(), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)):
        start = start.to(dtype)
        strided, plain = nn.Parameter(start.clone()), nn.Parameter(start.contiguous())
        assert not strided.is_contiguous()
        optimizers = [AdamW([q], lr=0.1, moments=MOMENTS[moments], master=master) for q in (strided, plain)]
        for _ in range(2):
            plain.grad = torch.randn(start.shape).to(dtype)
            strided.grad = torch.empty_like(strided).copy_(plain.grad)
            for optimizer in optimizers:
                optimizer.step()
        assert torch.equal(strided, plain)
        assert strided.stride() == start.stride()


@pytest.mark.covering(1)
@pytest.mark.parametrize("moments", ["fp32", "fp8", "one scale"])
@pytest.mark.parametrize("master", ["auto", "split32", "split24"])
def test_a_step_needs_little_beside_the_state(master, moments, monkeypatch):
    monkeypatch.setattr("octavo.kernels.reference.optimizer_state.PIECE", 1 << 11)
    p = parameter(128, 1024, dtype=torch.float32 if master == "auto" else torch.bfloat16)
    optimizer = AdamW([p], moments=MOMENTS[moments], master=master)
    train(optimizer, 1)
    assert peak_bytes(optimizer.step) < p.numel()  # a quarter of one temporary in float32


def test_a_group_added_later_is_checked():
    optimizer = AdamW([parameter(3)])
    optimizer.add_param_group({"params": [parameter(4)], "lr": 1.0})
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        optimizer.add_param_group({"params": [parameter(4, dtype=torch.float64)]})
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]
    train(optimizer, 1)


def test_what_is_refused():
    p = parameter(3)
    for options, message in (
        ({"lr": -1.0}, "lr=-1.0 must be at least 0"),
        ({"lr": math.nan}, "lr=nan must"),
        ({"eps": -1.0}, "eps=-1.0 must"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0 must"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\) must be at least 0 and below 1"),
        ({"betas": (-0.1, 0.9)}, "betas="),
        ({"betas": (0.9, 0.99, 0.999)}, "betas=.*, two numbers"),
        ({"betas": 0.9}, "betas=0.9 .*, two numbers"),
        ({"moments": "fp4"}, "moments='fp4': use 'fp32', 'bf16', 'fp8' or a pair"),
        ({"master": "fp64"}, "master='fp64': use 'auto', 'split16', 'fp16_scaled', 'fp32'"),
    ):
        with pytest.raises(ValueError, match=message):
            AdamW([p], **options)
    with pytest.raises(TypeError, match="skip_nonfinite='no': use True or False"):
        AdamW([p], skip_nonfinite="no")
    with pytest.raises(ValueError, match=r"betas=.*, two numbers"):
        AdamW([{"params": [p], "betas": (0.9, 0.99, 0.999)}])
    with pytest.raises(ValueError, match="dense real weights"):
        AdamW([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    with pytest.raises(ValueError, match="dense real weights"):
        AdamW([nn.Parameter(torch.eye(2).to_sparse())])
    embedding = nn.Embedding(4, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="dense gradients only"):
        AdamW(embedding.parameters()).step()
