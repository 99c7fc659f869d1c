"""Numbers in prose, made of the committed results: ``report`` writes them into their sentences.

A sentence is a part of a page's text in which each ``{}`` stands for a number. Line breaks don't count. A page that
has a sentence of SENTENCES not once is an error: who rewrites the prose rewrites it here too.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

from benchmarks.common.pages import Row, read, signed
from benchmarks.kernels import kernels
from benchmarks.training import parity
from benchmarks.training.memory_kinds import KINDS
from benchmarks.training.quality_study import BASELINES, OWN, Runs

NUMBER = r"([+\N{MINUS SIGN}-]?\d+(?:,\d{3})*(?:\.\d+)?)"
Numbers = Callable[[], Sequence[str]]


def rows_of(subject: str, **equal: str) -> list[Row]:
    """Return a subject's rows whose columns have these values."""
    return [row for row in read(subject) if all(row[column] == text for column, text in equal.items())]


def value(subject: str, column: str, **equal: str) -> float:
    """Return a number of the one row whose columns have these values."""
    (row,) = rows_of(subject, **equal)
    return float(row[column])


def ends(values: Sequence[float], digits: int) -> list[str]:
    """Return the smallest and the largest."""
    return [f"{extreme:,.{digits}f}".replace("-", "\N{MINUS SIGN}") for extreme in (min(values), max(values))]


def recording(recorded: str = "recorded_ms", percent: str = "percent_every_50") -> list[str]:
    """Return ms of recorded and other steps by recipe, and the percents that one recorded step in 50 adds."""
    rows = read("inspect_cost")
    times = [f"{float(row[column]):.0f}" for row in rows for column in (recorded, "step_ms")]
    return times + [f"{float(row[percent]):.2f}" for row in rows]


def recording_error() -> list[str]:
    """Return percents that unrecorded steps take more, and that tracing adds."""
    rows = read("inspect_cost")
    columns = ("percent_between", "percent_traced")
    return [end for column in columns for end in ends([float(row[column]) for row in rows], 1)]


def recording_ops() -> list[str]:
    """Return the ops that a recorded step adds, those of a step, and the percent that one step in 50 adds."""
    row = rows_of("inspect_cost", recipe="dynamic")[0]
    ops, percent = int(row["step_ops"]), float(row["percent_ops_every_50"])
    return [f"{ops * percent / 100 * 50:.0f}", str(ops), f"{percent:.1f}"]


def causes_of(draw: str) -> list[str]:
    """Return the number of runs of an earlier draw, and the percents whose cause is named first and among three."""
    places = [int(row["cause at"]) for row in rows_of("causes_earlier", of=draw)]
    return [str(len(places)), *(f"{sum(0 < at <= most for at in places) / len(places):.0%}"[:-1] for most in (1, 3))]


def host_forwards() -> list[str]:
    """Return the least and most ms of Python of an eager Linear's forward."""
    whats = re.compile(r"Linear \w+, forward$")
    return ends([float(row["us"]) / 1e3 for row in read("gpu_host") if whats.match(row["what"])], 2)


def host_by_torchao() -> list[str]:
    """Return the least and most of torchao's host time that a layer with backward takes, in eager and compiled."""
    rows = [row for row in read("gpu_host") if row["what"].endswith("forward + backward")]
    kinds = ("Linear ", "compiled Linear ")
    return [
        end
        for kind in kinds
        for end in ends([float(row["by_torchao_tensorwise"]) for row in rows if row["what"].startswith(kind)], 2)
    ]


def casts_by_copy() -> list[str]:
    """Return how many casts and norms reach their aim, of how many, and the others' number, least and most share."""
    rows = [row for row in rows_of("kernels", shape="16384x8192") if kernels.has_aim(row["op"])]
    shares = [float(row["of_peak"]) for row in rows]
    others = [share for share in shares if share < kernels.AIM]
    return [str(len(shares) - len(others)), str(len(shares)), f"{kernels.AIM:g}", str(len(others)), *ends(others, 2)]


def triton_products() -> list[str]:
    """Return TFLOP/s on the H100 of Triton's products of blocks, and of torch's."""
    products = ("1x128 . 128x128", "1x128 . 1x128")
    names = [f"{name}, {by}, fast" for by in ("Triton", "torch") for name in products]
    return [f"{value('kernels', 'rate', op=name, shape='8192x8192x8192'):,.0f}" for name in names]


def predicted_rates(device: str, size: int, *products: str) -> list[str]:
    """Return predicted TFLOP/s of products of this size: each by the slower estimate, if it differs, and the faster."""
    rates = []
    for product in products:
        (row,) = rows_of("predicted_products", device=device, shape=f"{size}x{size}x{size}", product=product)
        rates += sorted({float(row["serial_tflops"]), float(row["tflops"])})
    return rounded(rates, 0)


def checkpointed_bytes() -> list[str]:
    """Return what checkpointed inputs in FP8 take, by those as they are: the inputs, and all that is saved."""
    plain, fp8 = (rows_of("checkpointing", inputs=inputs) for inputs in ("as they are", "FP8"))
    return [f"{float(fp8[0][column]) / float(plain[0][column]):.3f}" for column in ("MiB of inputs", "MiB in all")]


def checkpointed_losses() -> list[str]:
    """Return the least and the most percent by which a loss is higher with checkpointed inputs in FP8."""
    losses = [[float(row["loss"]) for row in rows_of("checkpointing", inputs=i)] for i in ("as they are", "FP8")]
    return ends([100 * (fp8 / plain - 1) for plain, fp8 in zip(*losses, strict=True)], 2)


def saved(column: str, *kinds: str) -> float:
    """Return bytes that a Llama saves for backward under delayed(), of these kinds or of all but weights' codes."""
    rows = rows_of("saved_bytes", model="Llama", recipe="delayed")
    return sum(float(row[column]) for row in rows if row["kind"] in kinds or (not kinds and row["kind"] != "weights"))


def llama_gaps(*variants: str) -> list[str]:
    """Return mean gaps of a small Llama's losses from bf16's."""
    rows = [[float(row["gap_percent"]) for row in rows_of("llama_convergence", variant=each)] for each in variants]
    return [signed(statistics.fmean(gaps)) for gaps in rows]


def planned_errors(**equal: str) -> list[float]:
    """Return percents by which published steps are planned too fast."""
    return [
        100 * (float(row["modelled_by_published"]) - 1) for row in rows_of("communication_model_published", **equal)
    ]


def errors_of_dense_models() -> list[str]:
    """Return the largest error of dense models' steps by Megatron and of Llama 3's paper, in percent."""
    rows = [row for row in read("communication_model_published") if row["model"] != "DeepSeek-V3"]
    errors = [
        abs(float(row["modelled_by_published"]) - 1) for row in rows if row["published"].startswith(("Mega", "Llama"))
    ]
    return [f"{100 * max(errors):.0f}"]


def steps_of_titan() -> list[str]:
    """Return published and planned gains of compiling, and then of FP8, of torchtitan's 8B on 8 GPUs."""
    rows = rows_of("communication_model_published", model="8B", gpus="8", tokens_a_step="131072")
    eager, compiled, fp8 = ([float(row[f"{kind}_tokens"]) for kind in ("published", "modelled")] for row in rows)
    return [
        f"{after / before:.2f}"
        for slow, fast in ((eager, compiled), (compiled, fp8))
        for before, after in zip(slow, fast, strict=True)
    ]


def memory_of_titan() -> list[str]:
    """Return the largest errors of planned memory, in percent: without tensor parallelism, and with it."""
    errors = {False: 0.0, True: 0.0}
    for row in read("communication_model_published"):
        if row["published_gib"]:
            tensor, error = (
                row["layout"].startswith("TP"),
                abs(float(row["modelled_gib"]) / float(row["published_gib"]) - 1),
            )
            errors[tensor] = max(errors[tensor], 100 * error)
    return [f"{errors[False]:.0f}", f"{errors[True]:.0f}"]


def memory_of_variants() -> list[str]:
    """Return the GB of a training by kinds' sum, each choice on top of the one before."""
    return [f"{sum(int(row[kind]) for kind in KINDS) / 1e9:.0f}" for row in read("memory_kinds")]


def bytes_a_parameter() -> list[str]:
    """Return the bytes of weights, masters and moments, all in FP8, by the number of parameters."""
    row = read("memory_kinds")[-1]
    return [f"{sum(int(row[kind]) for kind in ('weights', 'masters', 'moments')) / int(row['parameters']):.2f}"]


def gap(experiment: str, size: str = "0.5M", beside: Sequence[str] = BASELINES) -> list[str]:
    """Return an experiment's mean loss above that of others, by default bf16, and its standard error, in percent."""
    difference = Runs(read("quality")).gap([experiment], size, OWN, beside)
    assert difference is not None, (experiment, size)
    return [f"{difference.mean:.2f}".replace("-", "\N{MINUS SIGN}"), f"{difference.error:.2f}"]


def parity_of(*arms: str, growth: bool = False) -> list[str]:
    """Return arms' mean gaps after the longest training, or what a doubling adds to them, and half their intervals."""
    losses = parity.Losses(read("quality"))
    changes = [losses.growth(arm) if growth else losses.gap(arm) for arm in arms]
    return [f"{x:.2f}".replace("-", "\N{MINUS SIGN}") for change in changes for x in (change.mean, change.half)]


def repeats_of_bf16() -> list[float]:
    """Return percents between the losses of runs in bf16 of one seed, of the smallest size."""
    losses = Runs(read("quality")).by_seed(BASELINES, "0.5M", OWN).values()
    return [100 * abs(math.log(one / other)) for of_seed in losses for one, other in combinations(of_seed, 2)]


def compiled_differences(backend: str, what: str, *recipes: str) -> list[float]:
    """Return the largest differences of compiled steps from eager's; without recipes, of all in FP8."""
    rows = rows_of("compile_matrix", backend=backend, what=what)
    return [
        float(row["difference"])
        for row in rows
        if row["recipe"] in recipes or (not recipes and row["recipe"] != "high_precision")
    ]


def moved(form: str, part: str, direction: str) -> float:
    """Return the GB that a part of a compiled Llama moves."""
    return value("compiled_bytes", "gb", form=form, part=part, direction=direction)


def study(case: str, quantity: str, digits: int = 0) -> str:
    """Return a number that the study of the optimizer's state measured."""
    return f"{value('optimizer_state', 'measured', case=case, quantity=quantity):.{digits}f}"


def gathered(column: str, *recipes: str) -> list[float]:
    """Return what recipes gather, by bf16's bytes, from bf16 weights on 2 and 4 ranks."""
    rows = rows_of("communication", masters="bfloat16")
    return [float(row[column]) for row in rows if row["recipe"] in recipes]


def rounded(values: Sequence[float], digits: int) -> list[str]:
    """Return numbers with so many decimals."""
    return [f"{number:,.{digits}f}" for number in values]


def gathered_cells(*recipes: str) -> list[str]:
    """Return two cells: the weights that recipes gather, and all that is gathered, by bf16's bytes."""
    return [rounded([max(gathered(column, *recipes))], 3)[0] for column in ("weights_by_bf16", "all_gathered_by_bf16")]


def gains_of_pairs() -> list[str]:
    """Return the least and most percent that pairs gain on a layout with tensor or expert parallelism."""
    rows = [row for row in read("communication_model") if row["precision"] in ("+ reduction", "+ pairs")]
    speeds = [float(row["modelled_speedup"]) for row in rows]
    gains = [100 * (after / before - 1) for before, after in zip(speeds[::2], speeds[1::2], strict=True)]
    parallel = [gain for gain, row in zip(gains, rows[::2], strict=True) if "TP" in row["layout"]]
    return ends(parallel, 0)


def reduced(digits: int, *cells: tuple[str, int], column: str = "error") -> list[str]:
    """Return percents that variants of a reduction of gradients leave, each on so many ranks."""
    return rounded([value("fp8_reduce", column, variant=variant, ranks=str(ranks)) for variant, ranks in cells], digits)


def reduced_losses(*variants: str) -> list[str]:
    """Return each variant's mean loss above that of both orders of a reduction in bf16, in percent."""
    names = "bf16", "bf16, ranks reversed", *variants
    losses = [[float(row["val_loss"]) for row in rows_of("fp8_reduce_training", variant=name)] for name in names]
    pairs = (
        [math.log(loss / math.sqrt(a * b)) for loss, a, b in zip(of, *losses[:2], strict=True)] for of in losses[2:]
    )
    return rounded([100 * statistics.fmean(gaps) for gaps in pairs], 3)


def adapted(scheme: str, low: str = "no master", models: Sequence[str] = ("default", "small")) -> list[str]:
    """Return the mean gaps of a schedule's losses from bf16's, in nats a byte, by model."""
    rows = [rows_of("adaptive", model=model, low=low, scheme=scheme) for model in models]
    return [signed(statistics.fmean(float(row["gap"]) for row in of_model), 4) for of_model in rows]


def adapted_row(scheme: str) -> list[str]:
    """Return a schedule's gaps, percents of operations in FP8, and mean bytes a parameter, each of two models."""
    rows = [rows_of("adaptive", model=model, low="no master", scheme=scheme) for model in ("default", "small")]
    shares, sizes = (
        [statistics.fmean(float(row[column]) for row in of_model) for of_model in rows]
        for column in ("fp8_flops_percent", "mean_bytes")
    )
    return adapted(scheme) + rounded(shares, 0) + rounded(sizes, 1)


AUTOCAST = "training step in autocast"
GROUPED = ("1x128 . 128x128, rows in groups", "1x128 . 1x128, terms in groups")
SENTENCES: Mapping[str, Mapping[str, Numbers]] = {
    "README.md": {
        "Two bf16 runs of one seed, which differ in last bits, end {} % apart": lambda: rounded(
            [math.sqrt(statistics.fmean(each**2 for each in repeats_of_bf16()))], 2
        ),
        "`dynamic` ends {} ± {} % above bf16 after 20 bytes a parameter": lambda: parity_of("dynamic"),
        "a parameter takes [{} bytes](docs/weights.md)": bytes_a_parameter,
        "A Llama converted with `fuse=True` saves [{}](docs/modules.md#models-as-they-come) of the bytes": lambda: (
            rounded([saved("fused") / saved("bf16")], 2)
        ),
    },
    "docs/adaptive.md": {
        "| all low | {} | {} | | {} %, {} % | {}, {} |": lambda: adapted_row("fp8"),
        "| low, then high at 70 % | {} | {} | 3 of 3, 8 of 8 | {} %, {} % | {}, {} |": lambda: adapted_row(
            "fp8-then-bf16@0.7"
        ),
        "| at 80 % | {} | {} | 3 of 3, 8 of 8 | {} %, {} % | {}, {} |": lambda: adapted_row("fp8-then-bf16@0.8"),
        "| at 90 % | {} | {} | 3 of 3, 8 of 8 | {} %, {} % | {}, {} |": lambda: adapted_row("fp8-then-bf16@0.9"),
        "| `auto` | {} | {} | 3 of 3, 8 of 8 | {} %, {} % | {}, {} |": lambda: adapted_row("auto"),
        "| high, then low at 30 % | {} | {} | 2 of 3, 6 of 8 | {} %, {} % | {}, {} |": lambda: adapted_row(
            "bf16-then-fp8@0.3"
        ),
        "with a master of 8 more bits ({} instead of {} for all low": lambda: [
            number for scheme in ("fp8-then-bf16@0.7", "fp8") for number in adapted(scheme, "split16", ["small"])
        ],
        "FP8 products alone ({} instead of {}, 2 of 8)": lambda: [
            number for scheme in ("fp8-then-bf16@0.7", "fp8") for number in adapted(scheme, "products", ["small"])
        ],
    },
    "docs/communication.md": {
        "| `dynamic`, `delayed` | {} | {} | 1, of 4 bytes a weight |": lambda: gathered_cells("dynamic", "delayed"),
        "| `blockwise` | {} | {} | 0; 1 where": lambda: gathered_cells("blockwise"),
        "| `rowwise` | {} | {} | 1, of 4 bytes a column |": lambda: gathered_cells("rowwise"),
        "| `mx` | {} | {} | 0 |": lambda: gathered_cells("mx"),
        "Pairs gain {} to {} % with tensor or expert parallelism": gains_of_pairs,
    },
    "docs/compile.md": {
        "Outside of autocast the largest difference is {}·10⁻⁷, from `high_precision`": lambda: rounded(
            [
                1e7
                * max(
                    float(row["difference"])
                    for row in rows_of("compile_matrix", backend="inductor", recipe="high_precision")
                    if row["what"] != AUTOCAST
                )
            ],
            0,
        ),
        "That changes `high_precision` by {}.": lambda: rounded(
            compiled_differences("inductor", AUTOCAST, "high_precision"), 4
        ),
        "On this CPU no step of the table has one: FP8 recipes change by {}·10⁻⁷ at most": lambda: rounded(
            [1e7 * max(compiled_differences("inductor", AUTOCAST))], 1
        ),
        "octavo's for rotary positions also copies the values, {} GB a block": lambda: rounded(
            [
                moved("fuse=True, compiled", "rotary positions", "forward")
                - moved("converted, compiled", "rotary positions", "forward")
            ],
            2,
        ),
    },
    "docs/guides/troubleshooting.md": {
        "Two bf16 runs that differ in last bits end up to {} % apart on a small model": lambda: rounded(
            [max(repeats_of_bf16())], 1
        ),
        "an eager Linear's forward takes [{} to {} ms of Python]": host_forwards,
    },
    "docs/guides/which-recipe.md": {
        "On a small GPT a head under `dynamic()` costs {} % of the loss": lambda: gap(
            "dynamic, head too", beside=["dynamic"]
        )[:1],
        "the mean gap from bf16 is {} % with the head in bf16, {} % with `dynamic_with_output_hp()`, "
        "{} % with `rowwise()` and {} % with `dynamic()`": lambda: llama_gaps(
            "dynamic", *(f"dynamic, head {recipe}" for recipe in ("dynamic_with_output_hp", "rowwise", "dynamic"))
        ),
        "A head under `dynamic()` costs {} % more": lambda: gap("dynamic, head too", beside=["dynamic"])[:1],
    },
    "docs/inspect.md": {
        "a recorded step takes {} ms instead of {} (`dynamic`), or {} instead of {} (`delayed`), so that recording one "
        "step in 50 adds {} and {} %": recording,
        "it takes {} ms instead of {} (`dynamic`), or {} instead of {} (`delayed`): {} and {} %": lambda: recording(
            "with_twin_ms", "percent_with_twin_every_50"
        ),
        "Steps that were not recorded took {} to {} % more": lambda: recording_error()[:2],
        "what tracing faults takes, {} to {} %, in part": lambda: recording_error()[2:],
        "{} ops in addition to the demo's {}, so that one step in 50 adds {} % of the launches": recording_ops,
        "The counts of a layer, or of one expert, take {} KB": lambda: rounded(
            [value("inspect_cost", "bytes_a_layer", recipe="dynamic") / 1e3], 1
        ),
        "{} runs, of which they name the cause first in {} %, and among three in {} %": lambda: causes_of(
            "more variations"
        ),
    },
    "docs/kernels.md": {
        "is {} to {} of torchao's, and {} to {} compiled": host_by_torchao,
        "{} of the {} casts and norms that have an aim reach it, {} of copy bandwidth. The other {} are between {}, a "
        "gradient in two block scalings with its sum, and {}": casts_by_copy,
        "On Hopper it sums in blocks at {} and {} TFLOP/s, where torch's reaches {} and {}": triton_products,
        "1×128 by 128×128 with rows in groups reaches {} to {} TFLOP/s, 1×128 by 1×128 with terms in groups {}. At "
        "4096³, with groups of 512, they reach {} and {}": lambda: (
            predicted_rates("H200", 8192, *GROUPED) + predicted_rates("H200", 4096, *GROUPED)
        ),
        "for an H200 at 4096³, 1×128 by 128×128 reaches {} to {} TFLOP/s, 1×128 by 1×128 {}, 1×32 {} to {}": lambda: (
            predicted_rates("H200", 4096, "1x128 . 128x128", "1x128 . 1x128", "1x32 . 1x32")
        ),
        "For a B200 1×32 reaches {}, and {} at 8192³": lambda: [
            *predicted_rates("B200", 4096, "1x32 . 1x32"),
            *predicted_rates("B200", 8192, "1x32 . 1x32"),
        ],
        "a whole step took {} of bf16's time": lambda: rounded(
            [1 / value("llama_step", "by_bf16", variant="octavo blockwise")], 2
        ),
    },
    "docs/many-gpus.md": {
        "{} billion parameters, blocks of seven matrices that take {} MB in bf16": lambda: (
            rounded([float(read("sharded_load")[0]["parameters"]) / 1e9], 3)
            + rounded([float(read("sharded_load")[0]["block_mb"])], 0)
        ),
    },
    "docs/modules.md": {
        "keeps {} of the bytes of its layers' inputs, and {} of all bytes that it saves": checkpointed_bytes,
        "the loss of a GPT of 64 features is {} % to {} % higher than with unrounded inputs": checkpointed_losses,
        "only the inputs shrink, which are {} % of the bytes that bf16 saves": lambda: rounded(
            [100 * saved("bf16", "inputs of layers") / saved("bf16")], 0
        ),
    },
    "docs/plan.md": {
        "For dense models of Megatron and of the Llama 3 paper the plan is within {} %": errors_of_dense_models,
        "The plan is {} to {} % too fast under FSDP": lambda: ends(
            planned_errors(published="torchtitan, 12/2024", layout="FSDP"), 0
        ),
        "compiling, published {}, planned {}; then FP8, published {}, planned {}": steps_of_titan,
        "Context parallelism on 4 and 8 ranks is planned {} and {} % too fast": lambda: rounded(
            planned_errors(layout="CP 4") + planned_errors(layout="CP 8"), 0
        ),
        "Tensor parallelism on 8 ranks with 16 sequences a micro-batch is planned {} % too fast": lambda: rounded(
            planned_errors(layout="TP 8"), 0
        ),
        "Memory is within {} % of torchtitan's readings, except under tensor parallelism ({} % too little)": (
            memory_of_titan
        ),
    },
    "docs/study/gradient-reduction.md": {
        "In E4M3 it is {} % of the mean gradient on 2 ranks and {} % on 64": lambda: reduced(
            2, ("E4M3", 2), ("E4M3", 64)
        ),
        "The bf16 ring's own error, {} % on 2 ranks, grows to {} %": lambda: reduced(1, ("bf16", 2), ("bf16", 64)),
        "of each server's mean: {} % on 2 × 2 ranks, {} % on 2 × 8, {} % on 8 × 8": lambda: reduced(
            1, ("E4M3, servers of 2", 4), ("E4M3, servers of 8", 16), ("E4M3, servers of 8", 64)
        ),
        "{} % of the mean on 2 ranks, {} % on 64. - **A run ends": lambda: reduced(
            0, ("E4M3", 2), ("E4M3", 64), column="noise"
        ),
        "E4M3 is {} ± 0.004 % above bf16's loss (as 2 × 2 ranks {} ± 0.004 %), E5M2 {} ± 0.004 %": lambda: (
            reduced_losses("E4M3", "E4M3, servers of 2", "E5M2")
        ),
        "another matter**: {} % on 2 ranks, {} % on 64": lambda: reduced(
            1, ("E4M3, one scale a tensor, FP8 sums", 2), ("E4M3, one scale a tensor, FP8 sums", 64)
        ),
    },
    "docs/study/training-quality.md": {
        "`dynamic` ends {} ± {} % and `blockwise` {} ± {} % above bf16 after 20 bytes a parameter": lambda: parity_of(
            "dynamic", "blockwise"
        ),
        "a doubling of the training adds {} ± {} % and {} ± {} %": lambda: parity_of(
            "dynamic", "blockwise", growth=True
        ),
    },
    "docs/study/optimizer-state.md": {
        "What it costs: {} % rms error of each update at (0.9, 0.999), {} % at (0.9, 0.95), against {} % and {} % of "
        "bf16 moments": lambda: [
            study(f"{kind}, β = (0.9, {beta2})", "rms error of m / √v, %", digits)
            for kind, digits in (("fp8", 0), ("bf16", 1))
            for beta2 in ("0.999", "0.95")
        ],
        "would have saturated m in {} % of the steps and √v in {} %, by up to {} % and {} %": lambda: [
            study(case, quantity) for quantity in ("grew, % of steps", "growth: largest") for case in ("m", "√v")
        ],
        "m/√v is {} and {} times what it should be": lambda: [
            study(case, "rms m / √v kept / exact", 2) for case in ("fp8, to nearest", "v in E4M3, per tensor, clipped")
        ],
    },
    "docs/weights.md": {
        "That is {} bytes a parameter in all": bytes_a_parameter,
        "{} GB in bf16 with state in float32, {} with FP8 products, then {}, {}, {} and {} with moments": (
            memory_of_variants
        ),
    },
}


def written(page: str, text: str) -> str:
    """Return a page's text with the numbers of its SENTENCES made anew."""
    for sentence, numbers in SENTENCES.get(page, {}).items():
        words = (r"\s+".join(map(re.escape, part.split(" "))) for part in sentence.split("{}"))
        matches = list(re.finditer(NUMBER.join(words), text))
        values = numbers()
        if len(matches) != 1 or len(values) != sentence.count("{}"):
            raise ValueError(f"{page} has {len(matches)} times, and should have once, with {values}: {sentence}")
        for place in range(len(values), 0, -1):
            start, end = matches[0].span(place)
            text = text[:start] + values[place - 1] + text[end:]
    return text
