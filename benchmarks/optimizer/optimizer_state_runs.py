"""Adam's state: its range, updates without v, the bound R_t, scales; derived, and measured in a small GPT."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.optimizer.optimizer_state_rounding import BLOCK, FORMATS, Row, Sizes, read, rounded
from octavo import E4M3, PerTensor
from octavo.kernels.step_numbers import adam_max_update, bound_after
from octavo.optim import E4M4, AdamW, Moment
from octavo.train import GPT, Batches, ModelConfig, load_corpus, next_byte_loss

BETAS = (0.9, 0.999)
BATCH, LR, DECAY = 16, 3e-3, 0.1  # as in optimizer_convergence
WIDE = ModelConfig(width=128, layers=2, heads=2, context=64)  # rows of whole blocks
SMALL = ModelConfig(width=64, layers=2, heads=2, context=64)


def percent(flags: Tensor) -> float:
    """Return the percentage of elements that are true."""
    return 100 * float(flags.float().mean())


# 2. range


def octaves(sizes: Sizes) -> list[Row]:
    """Return octaves of |g| from the largest that a scaling unit holds to its smallest subnormal; flushed shares."""
    generator = torch.Generator().manual_seed(0)
    rows, cols = (512, 1024) if sizes.samples > 1 << 14 else (8, 1024)
    spread = {(rows, 1): 1.0, (1, cols): 1.0, (rows, cols): 0.5}  # octaves
    sigma = torch.exp2(sum(sd * torch.randn(shape, generator=generator) for shape, sd in spread.items()))
    sigma[::64] *= 2.0**-12  # outputs and
    sigma[:, ::256] *= 2.0**-12  # inputs that are hardly used
    results = []
    for root in (False, True):
        for fmt in FORMATS:
            span = math.log2(fmt.max / fmt.smallest_subnormal) * (1.0 if root else 0.5)
            results.append(Row("range", f"{'√v' if root else 'v'}, {fmt}", "octaves of g", span))
    return results + flushed_shares("range", sigma, (None, 256, 128, 32))


def flushed_shares(study: str, sigma: Tensor, units: tuple[int | None, ...]) -> list[Row]:
    """Return the percentage of √v that reads 0, to nearest, by scaling unit (elements of a row; None: all)."""
    rows = []
    for root in (False, True):
        wide = sigma if root else sigma.square()
        held = sigma > 0
        for fmt in FORMATS:
            for unit in units:
                scaled = wide * (fmt.max / block_amax(wide, unit).clamp(min=1e-30))
                share = percent((rounded(scaled, fmt, None) == 0)[held])
                name = "flushed, tensor, %" if unit is None else f"{unit}, %"
                rows.append(Row(study, f"{'√v' if root else 'v'}, {fmt}", name, measured=share))
    return rows


def block_amax(wide: Tensor, unit: int | None) -> Tensor:
    """Return the amax of each element's scaling unit; units end with the row."""
    if unit is None:
        return wide.amax()
    padded = torch.nn.functional.pad(wide, (0, -wide.shape[1] % unit))
    return padded.unflatten(1, (-1, unit)).amax(-1).repeat_interleave(unit, 1)[:, : wide.shape[1]]


def without_v(sizes: Sizes) -> list[Row]:
    """Return the update of an element whose v was flushed, in steady noise: m / |g| is a Cauchy variable."""
    rows = []
    for beta1, beta2 in ((0.9, 0.999), (0.9, 0.95)):
        torch.manual_seed(0)
        of_m = math.sqrt((1 - beta1) / (1 + beta1))
        m, g = of_m * torch.randn(sizes.samples), torch.randn(sizes.samples)
        u = ((beta1 * m + (1 - beta1) * g) / (math.sqrt(1 - beta2) * g.abs())).abs()
        limit = adam_max_update(10**6, beta1, beta2)
        clipped = float(u.clamp(max=limit).square().mean())
        middle = of_m / math.sqrt(1 - beta2)
        case = f"β = {beta1}, {beta2}"
        rows.append(Row("without v", case, "median of u", middle, float(u.median())))
        rows.append(Row("without v", case, "u > R, %", None, percent(u > limit)))
        far = 200 / math.pi * beta1 * middle / 100
        rows.append(Row("without v", case, "u > 100, %", far, percent(u > 100)))
        rows.append(Row("without v", case, "rms of u, clipped to R", None, math.sqrt(clipped)))
        rows.append(Row("without v", case, "rms of u with v", of_m))
        rows.append(Row("without v", case, "share that doubles Σu², %", None, 100 * of_m**2 / clipped))
    return rows


# 4. the bound


def bound(sizes: Sizes) -> list[Row]:
    """Return R_t, the update of its worst sequence, and that of gradients drawn at random."""
    rows = []
    for beta1, beta2 in ((0.9, 0.999), (0.9, 0.95), (0.95, 0.95)):
        case = f"{beta1}, {beta2}"
        rows += [Row("bound", case, f"R at t = {t}", adam_max_update(t, beta1, beta2)) for t in (2, 10, 100)]
        steps = 1000
        worst = ((beta1 / beta2) ** (steps - torch.arange(1, steps + 1, dtype=torch.float64)))[:, None]
        rows.append(
            Row("bound", case, "R at t = 1000", adam_max_update(steps, beta1, beta2), adam(worst, beta1, beta2))
        )
        rows.append(Row("bound", case, "R without end", adam_max_update(10**6, beta1, beta2)))
        torch.manual_seed(0)
        drawn = torch.randn(200, max(sizes.samples // 200, 1), dtype=torch.float64)
        rows.append(Row("bound", case, "largest, normal g", None, adam(drawn, beta1, beta2)))
        paper = (1 - beta1) / math.sqrt(1 - beta2)
        rows.append(Row("bound", case, "Adam paper's", max(paper, 1.0)))
    return rows


def adam(gradients: Tensor, beta1: float, beta2: float) -> float:
    """Return the largest |m_hat| / sqrt(v_hat) over gradients [steps, sequences], in the last step."""
    m, v = torch.zeros_like(gradients[0]), torch.zeros_like(gradients[0])
    for g in gradients:
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    steps = gradients.shape[0]
    return float((m.abs() / (1 - beta1**steps) / (v / (1 - beta2**steps)).sqrt()).max())


def trained(sizes: Sizes) -> list[Row]:
    """Train a GPT in float32; return each amax's growth a step, its bound's distance, the shares that are flushed."""
    torch.manual_seed(0)
    model = GPT(WIDE)
    optimizer = AdamW(model.parameters(), LR, BETAS, 1e-8, DECAY, moments="fp32")
    matrices = [p for p in model.parameters() if p.ndim == 2]
    growth: dict[str, list[float]] = {"weight": [], "m": [], "√v": []}
    slack: dict[str, list[float]] = {"weight": [], "m": [], "√v": []}
    before: list[dict[str, float]] = []
    for step in steps_of(model, optimizer, sizes.trained):
        lr = optimizer.param_groups[0]["lr"]
        for p, old in zip(matrices, before, strict=False):
            new, g = amaxes(optimizer, p), float(p.grad.abs().max())  # type: ignore[union-attr]
            limits = {
                "weight": bound_after(old["weight"], lr, adam_max_update(step, *BETAS), DECAY),
                "m": BETAS[0] * old["m"] + (1 - BETAS[0]) * g,
                "√v": math.sqrt(BETAS[1] * old["√v"] ** 2 + (1 - BETAS[1]) * g * g),
            }
            for name, limit in limits.items():
                growth[name].append(100 * (new[name] / old[name] - 1))
                slack[name].append(100 * (limit / new[name] - 1))
        before = [amaxes(optimizer, p) for p in matrices]
    rows = []
    for name in growth:
        grew = [value for value in growth[name] if value > 0]
        rows.append(Row("amax", name, "grew, % of steps", None, 100 * len(grew) / len(growth[name])))
        for kind, values in (("growth", growth[name]), ("bound above", slack[name])):
            values = sorted(values)
            rows.append(Row("amax", name, f"{kind}, %: median", None, statistics.median(values)))
            rows.append(Row("amax", name, f"{kind}: 99th", None, values[int(0.99 * len(values))]))
            rows.append(Row("amax", name, f"{kind}: largest", None, values[-1]))
    return rows + trained_range(optimizer, matrices)


def steps_of(model: GPT, optimizer: Any, steps: int, scale: float = 1.0, losses: list[float] | None = None) -> Any:
    """Train as optimizer_convergence does; yield the number of each step after it."""
    batches = Batches(load_corpus(None), SMALL.context, BATCH, 0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LR * min((step + 1) / 50, 0.5 * (1 + math.cos(math.pi * step / steps)))
        optimizer.zero_grad()
        loss = next_byte_loss(model(batches.training(step)[0]), batches.training(step)[1])
        (loss * scale).backward()
        optimizer.step()
        if losses is not None:
            losses.append(float(loss.detach()))
        yield step + 1


def amaxes(optimizer: AdamW, p: Any) -> dict[str, float]:
    """Return the largest of a weight, of its m and of its √v."""
    state = optimizer.state[p]
    tensors = {"weight": p.detach(), "m": state["exp_avg"], "√v": state["exp_avg_sq"]}
    return {name: float(t.abs().max()) ** (0.5 if name == "√v" else 1.0) for name, t in tensors.items()}


def trained_range(optimizer: AdamW, matrices: list[Any]) -> list[Row]:
    """Return the shares of the trained second moments that are flushed to 0, all matrices together."""
    per_matrix = [flushed_shares("trained", optimizer.state[p]["exp_avg_sq"].sqrt(), (None, 128, 32)) for p in matrices]
    held = [int((optimizer.state[p]["exp_avg_sq"] > 0).sum()) for p in matrices]
    rows = []
    for same in zip(*per_matrix, strict=True):
        share = sum(row.measured * count for row, count in zip(same, held, strict=True)) / sum(held)  # type: ignore[operator]
        rows.append(Row("trained", same[0].case, same[0].quantity, None, share))
    return rows


def traffic(sizes: Sizes) -> list[Row]:
    """Return bytes an element that a step moves: bf16 gradient and weight, codes, an 8-bit remainder, blocks of 128."""
    moments, weight, gradient, scales = 2.0, 3.0, 2.0, 2 * 4 / BLOCK
    inward, outward = gradient + moments + weight, moments + weight
    ways = {
        "block in registers": (inward + scales, outward + scales),
        "previous amax": (inward, outward),
        "computed twice": (inward + gradient + moments, outward),
        "bounded, a weight": (inward, outward),
        "bounded, moments: amax of g first": (inward + gradient, outward),
        "float32 copies of the moments": (inward + 3 * 8.0, outward + 2 * 8.0),
    }
    rows = []
    for name, (inward, outward) in ways.items():
        rows += [Row("traffic", name, "read", inward), Row("traffic", name, "written", outward)]
        rows.append(Row("traffic", name, "both", inward + outward))
    return rows


# 5. scales


def scales(sizes: Sizes) -> list[Row]:
    """Train with the default's scales kept in float32 and in float16, the loss multiplied."""
    rows = []
    for factor, case in ((1.0, "loss"), (1e-4, "loss × 1e-4"), (1e-6, "loss × 1e-6")):
        for dtype_name in ("float32", "float16"):
            torch.manual_seed(0)
            model = GPT(SMALL)
            optimizer = AdamW(model.parameters(), LR, BETAS, 1e-30, DECAY, moments="fp8")
            losses: list[float] = []
            for _ in steps_of(model, optimizer, sizes.scaled, factor, losses):
                names = [(s, n) for s in optimizer.state.values() for n in s if n.endswith("scale_inv")]
                for state, name in names if dtype_name == "float16" else []:
                    state[name].copy_(state[name].half())
            final_loss = statistics.mean(losses[-50:])
            rows.append(Row("scales", case, f"final loss, scales in {dtype_name}", None, final_loss))
        for name in ("exp_avg", "exp_avg_sq"):
            rows.append(lost_scales(optimizer, name, case))
    return rows


def lost_scales(optimizer: AdamW, name: str, case: str) -> Row:
    """Return the percentage of a moment's blocks with gradients whose scale_inv is 0 in float16 at the end."""
    states = [state for p, state in optimizer.state.items() if p.ndim == 2]
    scale_invs = torch.cat([state[f"{name}_scale_inv"][state[f"{name}_scale_inv"] != 1].flatten() for state in states])
    quantity = "√v" if name == "exp_avg_sq" else "m"
    return Row("scales", case, f"float16 scales of {quantity} that are 0, %", None, percent(scale_invs == 0))


# 6. training


def in_training(sizes: Sizes) -> list[Row]:
    """Return the moments of a GPT in training beside float32 moments of the same gradients, at the end."""
    one_scale = Moment(E4M3, granularity=PerTensor())
    schemes: dict[str, Any] = {
        "fp8 (the default)": "fp8",
        "fp8, to nearest": (Moment(E4M3), Moment(E4M4, root=True)),
        "v in E4M3, per tensor, clipped": (one_scale, one_scale),
    }
    rows = []
    for name, moments in schemes.items():
        torch.manual_seed(0)
        model = GPT(SMALL)
        optimizer = AdamW(model.parameters(), LR, BETAS, 1e-8, DECAY, moments=moments)
        weights = [p for p in model.parameters() if p.ndim == 2]
        exact = [(torch.zeros(p.shape), torch.zeros(p.shape)) for p in weights]
        for _ in steps_of(model, optimizer, sizes.compared):
            for p, (m, v) in zip(weights, exact, strict=True):
                m.lerp_(p.grad, 1 - BETAS[0])  # type: ignore[arg-type]
                v.mul_(BETAS[1]).addcmul_(p.grad, p.grad, value=1 - BETAS[1])  # type: ignore[arg-type]
        logs, kept_u, exact_u = [], 0.0, 0.0
        for p, (m, v) in zip(weights, exact, strict=True):
            kept_m, kept_v = read(optimizer, p)
            held = (kept_v > 0) & (v > 0)
            logs.append((kept_v[held] / v[held]).log2() / 2)
            kept_u += float((kept_m[held].square() / kept_v[held]).sum())
            exact_u += float((m[held].square() / v[held]).sum())
        rows.append(Row("training", name, "√v kept / exact", None, 2.0 ** float(torch.cat(logs).mean())))
        rows.append(Row("training", name, "sd of its log2", None, float(torch.cat(logs).std())))
        rows.append(Row("training", name, "rms m / √v kept / exact", None, math.sqrt(kept_u / exact_u)))
    return rows


STUDIES: tuple[Callable[[Sizes], list[Row]], ...] = (octaves, without_v, bound, trained, traffic, scales, in_training)
