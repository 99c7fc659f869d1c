"""A training step of a transformer on a mesh of GPUs: formulas of its time and of each rank's memory.

Nothing here is measured. Products, casts and the memory's bandwidth are those of a device's Rates; all else is assumed,
and named with its source in ``Hardware`` or in the docstring of what assumes it. None of it was fitted to the published
steps that docs/plan.md holds the results against.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from octavo import recipes
from octavo.cost.estimate import orthogonalising
from octavo.cost.rates import HIGH_PRECISION, PlanError, Rates, forms_of, rates_of
from octavo.cost.work import LinearWork
from octavo.scaling.recipe import Recipe

BF16, CODE, FLOAT = 2, 1, 4  # bytes
PAIR, SENT_PAIR = 1 + 4 / 128, 1 + 1 / 128  # bytes of a code and its share of 128's scale; sent, of its exponent
BLOCK = 128  # elements that share a scale by the recipe "blockwise"
# of a product's rate on a lone GPU, measured for seconds, the share that is published of others: 600 of 718 TFLOP/s in
# bf16, 1,125 of 1,309 in FP8 (pytorch/FBGEMM#2546, pytorch/ao#2784)
SUSTAINED = 0.84
RANKS = ("fsdp", "replicate", "tensor", "pipeline", "context", "expert")
# bytes an element of a master beside its bf16 weight, and of Adam's two moments: octavo.optim.AdamW's
STATES = {"float32": (4, 8), "FP8": (1, 2 * PAIR)}


@dataclass(frozen=True)
class Weight:
    """A parameter of a block, or of the rest of a model: a matrix, or a vector of one column."""

    rows: int
    cols: int = 1
    converted: bool = False
    split: Literal["in", "out", "experts", None] = None  # the features that tensor parallelism divides; whole experts
    held: int = 1  # how many of these matrices there are
    used: float = 1  # by how many of them a token is multiplied
    share: float = 1  # the share of blocks that have it

    @property
    def elements(self) -> float:
        """Elements of all these matrices."""
        return self.share * self.held * self.rows * self.cols


@dataclass(frozen=True)
class Shapes:
    """A transformer whose blocks are sharded one by one, the rest (embedding, last norm, head) with the root.

    ``elementwise``: elements that a block's forward reads or writes for a token between its products (norms, residuals,
    rotation, activation). ``saved``: bytes that a block saves for a token; None: its products' operands as they read
    them, and what attention and the activation read, in bf16.
    """

    name: str
    width: int
    layers: int
    block: tuple[Weight, ...]
    root: tuple[Weight, ...]
    attention: float  # features of a head's queries and values, the mean of both, times heads
    elementwise: float
    logits: float = 4 * BF16  # bytes that a step moves for one
    launches: float = 0  # kernels of a block between products, if the device waits for their launches
    saved: float | None = None
    heads: tuple[int, ...] = ()  # numbers of heads of queries and of keys; tensor parallelism divides each

    @property
    def parameters(self) -> float:
        """Number of the model's parameters."""
        return self.layers * sum(w.elements for w in self.block) + sum(w.elements for w in self.root)

    def flop(self, sequence: int) -> float:
        """Return FLOP of a token: 6 a parameter that multiplies it, and causal attention, without recomputation."""
        converted = self.layers * sum(w.share * w.used * w.rows * w.cols for w in self.block if w.converted)
        return 6.0 * (converted + self.root[-1].rows * self.root[-1].cols + sequence * self.attention * self.layers)

    def divided(self, tensor: int, pipeline: int, expert: int = 1) -> Shapes:
        """Return a rank's shapes before FSDP2 shards them; stages of a pipeline have equal parts of embedding, head."""

        def part(weight: Weight) -> Weight:
            if weight.split == "experts":
                return replace(weight, held=weight.held // expert)
            rows, cols = (tensor if weight.split == side else 1 for side in ("out", "in"))
            return replace(weight, rows=weight.rows // rows, cols=weight.cols // cols)

        root = tuple(replace(w, rows=math.ceil(w.rows / (tensor * pipeline))) if w.cols > 1 else w for w in self.root)
        layers = math.ceil(self.layers / pipeline)
        return replace(self, layers=layers, block=tuple(map(part, self.block)), root=root)


def sent(weights: Sequence[Weight], recipe: str, ranks: int, param_bytes: int = BF16) -> tuple[float, float]:
    """Return the bytes of one gather of weights over so many ranks, and of the amaxes that ranks share before it.

    Each rank has as many rows of a weight (the last one's padded): as bf16, or, of a converted one, a byte an element
    for each pair, and its scales. These are sent beside the codes where no scale is of several ranks' rows and each
    rank has as many: 4 bytes each, powers of two of ``mx`` one. Else ranks share an amax of 4 bytes for each.
    """
    tiles = {"rowwise": [(1, 0, 4), (0, 1, 4)], "blockwise": [(BLOCK, BLOCK, 4)], "mx": [(1, 32, 1), (32, 1, 1)]}
    whole: float = 0
    amaxes: float = 0
    for weight in weights:
        part, held = math.ceil(weight.rows / ranks), weight.share * weight.held
        elements, pairs = held * part * ranks * weight.cols, 0.0
        if not weight.converted or recipe == HIGH_PRECISION:
            whole += elements * param_bytes
            continue
        for rows, cols, size in tiles.get(recipe, [(0, 0, 4)]):
            count = (
                held * math.ceil(weight.rows / (rows or weight.rows)) * math.ceil(weight.cols / (cols or weight.cols))
            )
            apart = rows and weight.rows == part * ranks and part % rows == 0
            pairs += elements + size * count if apart else elements
            amaxes += 0 if apart else 4 * count
        whole += elements * param_bytes if ranks == 1 else pairs
    return whole, amaxes


def sustained(rates: Rates) -> Rates:
    """Return rates that servers sustain: products at SUSTAINED of measured rates; published ones as they are."""
    products = {
        kind: tuple((flop, SUSTAINED * rate) for flop, rate in points) for kind, points in rates.products.items()
    }
    return replace(rates, products=products) if rates.casts else rates


@dataclass(frozen=True)
class Hardware:
    """H100 SXM servers of 8 GPUs with a network card of 400 Gb/s a GPU. None of these is measured here."""

    rates: Rates = field(default_factory=lambda: sustained(rates_of("H100")))  # they name their sources
    attention_forward: float = 614e12  # FLOP/s: causal, 8,192 tokens, heads of 128 (pytorch/benchmark#2391)
    attention_backward: float = 490e12  # which computes 2.5 times the FLOP. Assumed: 0.8 of forward's
    nvlink: float = 370e9  # bytes/s each way of a GPU in NCCL's all-gathers inside a server (nccl-tests#212)
    network: float = 47e9  # bytes/s each way of a GPU's card (nccl-tests#290: 46 to 48 of 50 GB/s)
    server: int = 8  # GPUs in one
    latency: float = 20e-6  # seconds that a collective takes before its first byte. Assumed
    memory: float = 80e9  # bytes of a GPU

    @classmethod
    def of(cls, rates: Rates) -> Hardware:
        """Return servers of another device, assumed: attention faster as bf16 products are, NVLink of its generation.

        Raises:
            PlanError: for a device that is no GPU.
        """
        if "CPU" in rates.device:
            raise PlanError("--gpus: a mesh is planned of GPUs: add --device H100, H200 or B200")
        here, rates = cls(), sustained(rates)
        speed = rates.products[HIGH_PRECISION][-1][1] / here.rates.products[HIGH_PRECISION][-1][1]
        forward, backward = here.attention_forward * speed, here.attention_backward * speed
        return cls(rates, forward, backward, here.nvlink * (1 + ("B200" in rates.device)), memory=rates.memory)

    def wire(self, whole: float, ranks: int, stride: int, directly: bool = False) -> float:
        """Return seconds of an all-gather or a reduce-scatter of so many bytes in all, each rank ``stride`` GPUs apart.

        Each GPU takes in (n - 1) / n of the bytes over NVLink. Over the network a ring takes each byte into a server
        once, over the cards of the group's ranks there; the slower of the two counts. ``directly``: an all-to-all, in
        which each rank's card takes in the bytes that all ranks elsewhere have for it.
        """
        if ranks == 1:
            return 0.0
        here = self.here(ranks, stride)
        inside = whole * (here - 1 if directly else ranks - 1) / ranks / self.nvlink * (here > 1)
        servers = ranks / here
        arriving = (ranks - here) / ranks if directly else (servers - 1) / servers / here
        return max(inside, whole * arriving / self.network) + self.latency

    def here(self, ranks: int, stride: int) -> int:
        """Return how many of a group's ranks, ``stride`` GPUs apart, are in one server."""
        return max(1, min(ranks, self.server // stride))

    def exchange(self, whole: float, ranks: int, stride: int, levels: int) -> float:
        """Return seconds of all-to-alls that reduce so many bytes at one level or at two, one after the other."""
        if levels == 1:
            return self.wire(whole, ranks, stride, directly=True)
        here = self.here(ranks, stride)
        inside = self.wire(whole, here, stride, directly=True)
        return inside + self.wire(whole / here, ranks // here, self.server, directly=True)

    def link(self, ranks: int, stride: int, directly: bool = False) -> str:
        """Return the wires on which such a group waits longest."""
        inside = replace(self, network=math.inf).wire(1e12, ranks, stride, directly)
        return "NVLink" if self.wire(1e12, ranks, stride, directly) == inside else "network"


@dataclass(frozen=True)
class Precision:
    """The products and messages that are in FP8; each is octavo's way unless said otherwise.

    ``reduction``: at how many levels gradients are reduced as pairs in blocks of 128
    (``octavo.distributed.Fp8Reduction``): by an all-to-all of all ranks, or by one of a server's ranks and one of
    servers. The time of casts and sums is left out. 0: a reduce-scatter of bf16. ``pairs``: inputs and gradients that
    tensor and sequence parallelism gather, and tokens and gradients that expert parallelism dispatches, are codes,
    whose scale ranks share first. Gathered tensors are kept for backward; sums over ranks stay in bf16.
    ``elsewhere``: Megatron's and DeepSeek's way: forward keeps this rank's part of an input, which is gathered again in
    backward; a token is cast and sent over the network once for all its experts of a server.
    """

    name: str
    recipe: str = "dynamic"  # of the products, by its name in octavo.recipes; "bf16": none
    gathers: bool = False  # FSDP2 gathers weights in FP8, else in bf16
    reduction: int = 0
    pairs: bool = False
    elsewhere: bool = False
    state: str = "float32"  # weights, masters and moments: one of STATES
    regions: float = BF16  # bytes of an element that a recomputed layer keeps
    algorithm: str = "adamw"  # "muon": of the blocks' matrices

    @property
    def sent(self) -> int:
        """Bytes of an element of an input or a gradient that is gathered or dispatched."""
        return CODE if self.pairs else BF16


@dataclass(frozen=True)
class MeshLayout:
    """A step's division among GPUs."""

    gpus: int
    sequences: int  # of a step
    sequence: int = 8192  # tokens of one
    tensor: int = 1  # ranks of each kind of parallelism; of this kind with sequence parallelism
    pipeline: int = 1
    context: int = 1
    expert: int = 1  # among the ranks of data parallelism
    chunks: int = 1  # that the layers of a stage come in (interleaved 1F1B)
    recomputed: float = 0.0  # the share of layers whose forward runs again in backward
    replicate: int = 1  # groups of ranks of data parallelism that each hold all weights (HSDP, DDP)
    batch: int = 1  # sequences of a micro-batch

    @property
    def resharded(self) -> bool:
        """Whether FSDP2 frees weights after each use, gathers them twice a micro-batch, and reduces gradients in each.

        A pipeline does so once a step: a stage keeps its weights, and masters and moments are sharded (ZeRO-1, or FSDP2
        with reshard_after_forward=False).
        """
        return self.pipeline == 1

    @property
    def data(self) -> int:
        """Ranks of data parallelism."""
        return self.gpus // (self.tensor * self.pipeline * self.context)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a rank in a step."""
        return self.sequences // (self.data * self.batch)

    @property
    def sharded(self) -> int:
        """Ranks that the weights of a stage are sharded over."""
        return self.data * self.context // self.replicate

    @property
    def ranks(self) -> dict[str, int]:
        """{kind of RANKS: number of ranks}."""
        kinds = {kind: getattr(self, kind) for kind in RANKS[1:]}
        return {"fsdp": self.sharded // self.context} | kinds

    def __str__(self) -> str:
        return ",".join(f"{kind}={ranks}" for kind, ranks in self.ranks.items() if ranks > 1) or "fsdp=1"


class Wait(NamedTuple):
    """Collectives of a kind of parallelism: seconds, those of them that nothing hides, and their slowest wires."""

    seconds: float
    exposed: float
    link: str


@dataclass(frozen=True)
class Step:
    """Seconds of a step on each GPU: ``kinds`` of compute, and what nothing hides; TFLOP/s that the model needs."""

    kinds: Mapping[str, float]
    waits: Mapping[str, Wait]
    bubble: float
    optimizer: float
    seconds: float
    tflops: float


@dataclass(frozen=True)
class Stage:
    """One rank's compute and messages for a micro-batch.

    Backward takes twice what forward takes. Products have octavo.cost's rate whatever their size, those of experts
    together that of one of all their rows. Collectives take no SMs. Those of tensor and expert parallelism are waited
    for, as torch's functional collectives are. The exchange of keys and values of context parallelism and the
    activations between stages hide behind compute, and stages are equally long.
    """

    whole: Shapes
    layout: MeshLayout
    precision: Precision
    hardware: Hardware

    def __post_init__(self) -> None:
        """Raise PlanError for a layout by which the model does not divide, with one that does."""
        now, block = self.layout, self.whole.block
        split = [w.cols if w.split == "in" else w.rows for w in block if w.split in ("in", "out")]
        experts = [w.held for w in block if w.split == "experts"]
        whole = {"tensor": ("heads and features", [*self.whole.heads, *split] * bool(split))}
        for kind, (words, counts) in (whole | {"expert": ("experts", experts)}).items():
            ranks, common = getattr(now, kind), math.gcd(*counts) or 1
            if common % ranks:
                divisors = ", ".join(str(each) for each in range(1, min(common, 1024) + 1) if common % each == 0)
                sizes = ", ".join(map(str, sorted(set(counts)))) or "none known"
                raise PlanError(
                    f"{kind}={ranks} does not divide the model's {words} ({sizes}): {kind} may be {divisors}"
                )
        if self.precision.algorithm == "muon" and now.tensor > 1:
            raise PlanError(
                f"tensor={now.tensor}: Muon takes whole columns, which these ranks divide: tensor=1 would do"
            )
        if now.pipeline > self.whole.layers:
            raise PlanError(f"pipeline={now.pipeline}: there are {self.whole.layers} layers, and each stage needs one")
        if now.gpus % (now.tensor * now.pipeline * now.context) or now.data % now.replicate:
            raise PlanError(f"{now.gpus} GPUs do not divide by the ranks of {now.ranks}: no fsdp would make it so")
        at_once = now.data * now.batch
        if now.sequences % at_once:
            raise PlanError(
                f"the step's {now.sequences} sequences do not divide by {now.data} ranks of data parallelism and "
                f"{now.batch} a micro-batch: {at_once * math.ceil(now.sequences / at_once)} sequences would"
            )
        if now.sharded * now.tensor % now.expert:
            most = math.gcd(now.sharded * now.tensor, now.expert)
            raise PlanError(
                f"expert={now.expert}: experts divide among ranks of fsdp and tensor: expert={most} would do"
            )

    @functools.cached_property
    def shapes(self) -> Shapes:
        """The rank's shapes before FSDP2 shards them."""
        return self.whole.divided(self.layout.tensor, self.layout.pipeline, self.layout.expert)

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on a rank of context parallelism."""
        return self.layout.batch * self.layout.sequence / self.layout.context

    @functools.cached_property
    def shards(self) -> list[tuple[Shapes, int, int]]:
        """(shapes that the rank holds, number of ranks that they are sharded over, GPUs that these are apart).

        Experts are sharded over the ranks that hold the same ones, as far apart as a server has ranks of experts.
        """
        layout, held = self.layout, self.shapes
        if layout.expert == 1:
            return [(held, layout.sharded, layout.tensor)]
        dense, experts = (
            tuple(w for w in held.block if (w.split == "experts") == is_expert) for is_expert in (False, True)
        )
        experts_only = replace(held, block=experts, root=(Weight(0),))
        ranks = layout.sharded * layout.tensor // layout.expert
        return [
            (replace(held, block=dense), layout.sharded, layout.tensor),
            (experts_only, ranks, min(layout.expert, self.hardware.server)),
        ]

    def linear(self, weight: Weight) -> tuple[float, float]:
        """Return seconds of a converted weight's products and casts, forward and backward.

        Tensors that tensor parallelism gathers are cast before if pairs are sent, else after; elsewhere tokens are cast
        once for all their experts. A weight is cast where it is sharded if it is gathered in FP8, else as a whole.
        """
        rates, name = self.hardware.rates, self.precision.recipe
        recipe: Recipe = getattr(recipes, "high_precision" if name == HIGH_PRECISION else name)()
        splits = weight.split in ("in", "out")  # all tokens, else this rank's part of them
        rows = self.tokens * weight.used / (1 if splits else self.layout.tensor)
        work = LinearWork("", round(rows), weight.cols, weight.rows, True, True)
        products, casts = sum(rates.product_seconds(form, work.flop) for form in forms_of(recipe)), 0.0
        if recipe.is_high_precision:
            return weight.share * products, casts
        size = weight.elements / weight.share / (self.layout.sharded if self.precision.gathers else 1)
        size /= 1 if self.layout.resharded else self.layout.micro_batches
        counts = work.tokens * weight.cols, size, work.tokens * weight.rows
        # what is sent is the input of a first layer and the gradient of a second one's output. A rank casts its part of
        # it before, or each token once for all its experts
        is_first = weight.split == "out" or (weight.split == "experts" and weight.cols == self.whole.width)
        divisor: float = 1
        if self.precision.pairs and splits:
            divisor = self.layout.tensor
        elif self.precision.pairs and self.precision.elsewhere and weight.split == "experts":
            divisor = weight.used
        divisors = divisor if is_first else 1, 1, 1 if is_first else divisor
        for role, elements, divisor in zip(recipe.casts, counts, divisors, strict=True):
            if (cast := role.as_is or role.transposed) is not None:
                casts += rates.cast_seconds(cast, elements / divisor, True)
        return weight.share * products, weight.share * casts

    @functools.cached_property
    def kinds(self) -> dict[str, float]:
        """Seconds of forward and backward by kind; the head's products are in bf16."""
        layout, rates, head = self.layout, self.hardware.rates, self.whole.root[-1]
        linears = [self.linear(weight) for weight in self.shapes.block if weight.converted]
        other = 3 * BF16 * self.whole.elementwise * self.tokens / layout.tensor / rates.copy
        flop = 2.0 * self.tokens * layout.sequence * self.whole.attention / layout.tensor
        attention = flop / self.hardware.attention_forward + 2.5 * flop / self.hardware.attention_backward
        times = self.shapes.layers * (1 + layout.recomputed / 3)
        logits = self.tokens * head.rows / (layout.tensor * layout.pipeline)
        return {
            "products": times * sum(products for products, _ in linears)
            + 3 * rates.product_seconds(HIGH_PRECISION, 2 * logits * head.cols),
            "casts": times * sum(casts for _, casts in linears),
            "attention": times * attention,
            "other": times * (other + self.whole.launches * rates.launch) + self.whole.logits * logits / rates.copy,
        }

    @property
    def compute(self) -> float:
        """Seconds of forward and backward."""
        return sum(self.kinds.values())

    @property
    def tensor(self) -> float:
        """Seconds of tensor parallelism's collectives.

        A split of the features out gathers its input in forward, elsewhere also in backward for the weight's gradient
        (arXiv 2205.05198, section 4.2.2), and scatters the sum of its input's gradient; a split of the features in
        scatters the sum of its output and gathers that output's gradient.
        """
        layout, sent = self.layout, self.precision.sent
        if layout.tensor == 1:
            return 0.0
        seconds = 0.0
        for weight in self.whole.block:
            if weight.split in ("in", "out"):
                size = weight.cols if weight.split == "out" else weight.rows
                count = 2 if weight.split == "out" and self.precision.elsewhere else 1
                for each, times in ((sent, count), (BF16, 1)):
                    whole = self.tokens * size * each
                    seconds += weight.share * times * self.hardware.wire(whole, layout.tensor, 1)
                seconds += weight.share * self.hardware.latency * (sent == CODE)  # of the scale
        return self.shapes.layers * seconds

    @property
    def expert(self) -> float:
        """Seconds of expert parallelism's all-to-alls: tokens there and back, in forward and in backward.

        A token goes to each of its experts; elsewhere once to each server that has some and on to them over NVLink.
        Experts are as likely on any server, of which at most 4 are chosen (arXiv 2412.19437, section 3.2.2).
        """
        layout, hardware = self.layout, self.hardware
        experts = [weight for weight in self.whole.block if weight.split == "experts"]
        if layout.expert == 1 or not experts:
            return 0.0
        used, servers = experts[0].used, max(1.0, layout.expert / hardware.server)
        visited = min(4.0, servers * (1 - (1 - 1 / servers) ** used)) if self.precision.elsewhere else used
        here = min(layout.expert, hardware.server)
        layers = self.shapes.layers * experts[0].share
        numbers = self.tokens / layout.tensor * self.whole.width * layers
        slowest = max(visited * (1 - 1 / servers) / hardware.network, used * (1 - 1 / here) / hardware.nvlink)
        waits = (4 + 2 * self.precision.pairs) * layers * hardware.latency  # also of the scales
        return numbers * 2 * (self.precision.sent + BF16) * slowest + waits

    @functools.cached_property
    def data(self) -> Wait:
        """A round of the collectives of FSDP2 (and of HSDP's replicas), of which a micro-batch's compute hides some.

        One block is prefetched: gathers hide behind forward, gathers and scatters, on the same wires, behind backward,
        except for the first gathers (the root's and block 0's) and the root's scatter at the end. Replicas add their
        shards of gradients by an all-reduce, which hides behind backward too.
        """
        layout, hardware = self.layout, self.hardware
        recipe = self.precision.recipe if self.precision.gathers else HIGH_PRECISION
        exposed = gathered = scattered = 0.0
        groups, apart = [("NVLink", 0.0)], layout.tensor * layout.sharded
        for shapes, ranks, stride in self.shards:
            if ranks * layout.replicate == 1:
                continue
            gather = functools.partial(hardware.wire, ranks=ranks, stride=stride)
            exchange = functools.partial(hardware.exchange, ranks=ranks, stride=stride, levels=self.precision.reduction)
            root, _ = sent(shapes.root, HIGH_PRECISION, ranks)
            gradients, _ = sent(shapes.block, HIGH_PRECISION, ranks)
            block, amaxes = sent(shapes.block, recipe, ranks)
            sizes = root, shapes.layers * gradients + root
            last, scatter = (
                exchange(size * SENT_PAIR / BF16) if self.precision.reduction else gather(size) for size in sizes
            )
            first = gather(root + block)
            exposed += first + last + hardware.latency * (ranks > 1 and amaxes > 0)
            replicas = 2 * hardware.wire(BF16 * shapes.parameters / ranks, layout.replicate, apart)
            gathered += gather(shapes.layers * block + root) - first
            scatter += gather(shapes.layers * block) * layout.resharded
            scattered += scatter - last + replicas
            groups += [(hardware.link(ranks, stride), scatter), (hardware.link(layout.replicate, apart), replicas)]
        total = exposed + gathered + scattered
        exposed += max(0.0, gathered - self.compute / 3) + max(0.0, scattered - 2 * self.compute / 3)
        return Wait(total, exposed, max(groups, key=lambda group: group[1])[0])

    @functools.cached_property
    def memory(self) -> dict[str, float]:
        """Bytes of a GPU by kind.

        Gradients are in float32; FSDP2 has two blocks' weights and gradients gathered at a time. ``Shapes.saved`` is
        kept for as many micro-batches as interleaved 1F1B has on their way, and of layers that are recomputed their
        input, and one of them as a whole. The loss has three tensors of the logits' size in float32: its log-softmax
        and two gradients.
        """
        layout, shapes, precision = self.layout, self.shapes, self.precision
        master, _ = STATES[precision.state]
        weight, bytes_by_kind = BF16 if precision.state == "float32" else PAIR, Counter[Any]()
        for part, ranks, _ in self.shards:
            shard = part.parameters / ranks
            largest = max(sum(w.elements for w in weights) for weights in (part.block, part.root))
            held = shard if layout.resharded else part.parameters
            sizes = {"weights": weight * held, "masters": master * shard, "moments": self.averages(part) * shard}
            bytes_by_kind.update(sizes | {"gradients": FLOAT * held, "gathered": 4 * BF16 * largest * layout.resharded})
        operand = BF16 if precision.recipe == HIGH_PRECISION else CODE
        operands, extra = 0.0, 0.0  # extra: bytes of gathered inputs beside this rank's part
        for w in self.whole.block:
            gathered = w.split == "out" and not precision.elsewhere
            rows = BF16 * w.rows if w.split != "in" else 0
            operands += w.share * w.used * w.converted * (operand * w.cols + rows)
            extra += (
                min(operand, precision.sent) * w.share * w.used * w.converted * w.cols * (layout.tensor - 1) * gathered
            )
        saved = self.tokens / layout.tensor * ((operands if self.whole.saved is None else self.whole.saved) + extra)
        under_way = layout.pipeline * (1 + (layout.pipeline - 1) / (layout.pipeline * layout.chunks))
        recomputed, width = layout.recomputed, precision.regions * self.tokens * self.whole.width / layout.tensor
        layers = shapes.layers * min(under_way, layout.micro_batches)
        activations = layers * ((1 - recomputed) * saved + recomputed * width) + math.ceil(recomputed) * saved
        logits = 3 * FLOAT * self.tokens * self.whole.root[-1].rows / layout.tensor
        return {**bytes_by_kind, "activations": activations, "logits": logits}

    @property
    def size(self) -> float:
        """Bytes of a GPU, of all kinds."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether the GPU has this memory."""
        return self.size <= (self.hardware.memory or math.inf)

    def averages(self, part: Shapes) -> float:
        """Return bytes of moments a parameter of a part: AdamW keeps two, and Muon one of a block's matrices."""
        _, moments = STATES[self.precision.state]
        matrices = part.layers * sum(w.elements for w in part.block if w.cols > 1)
        return moments * (1 - matrices / part.parameters / 2 * (self.precision.algorithm == "muon"))

    @property
    def optimizer(self) -> float:
        """Seconds of the update of this rank's shards: it reads and writes state, reads gradients, writes bf16 weights.

        Muon's owners have equal shares of the products; matrices but those of experts travel to them and back in bf16.
        """
        master, seconds, hardware = STATES[self.precision.state][0], 0.0, self.hardware
        for part, ranks, stride in self.shards:
            moved = 2 * (master + self.averages(part)) + FLOAT + BF16
            seconds += moved * part.parameters / ranks / hardware.rates.copy
            for w in part.block if self.precision.algorithm == "muon" else ():
                if w.cols > 1:
                    products = orthogonalising((w.share * w.held, w.rows, w.cols), hardware.rates)
                    sent = BF16 * w.elements / ranks * (w.split != "experts")
                    seconds += part.layers * (products / ranks + 2 * hardware.wire(sent, ranks, stride, directly=True))
        return seconds

    @functools.cached_property
    def step(self) -> Step:
        """The Step of all micro-batches and of the optimizer."""
        layout, count = self.layout, self.layout.micro_batches
        rounds, waits = count if layout.resharded else 1, {"fsdp": self.data}
        waits["fsdp"] = Wait(rounds * self.data.seconds, rounds * self.data.exposed, self.data.link)
        for kind, directly in (("tensor", False), ("expert", True)):
            seconds = count * getattr(self, kind)
            waits[kind] = Wait(seconds, seconds, self.hardware.link(getattr(layout, kind), 1, directly))
        kinds = {kind: count * seconds for kind, seconds in self.kinds.items()}
        bubble = (layout.pipeline - 1) / layout.chunks * (self.compute + self.tensor + self.expert)
        total = sum(kinds.values()) + sum(wait.exposed for wait in waits.values()) + bubble + self.optimizer
        flop = layout.sequences * layout.sequence * self.whole.flop(layout.sequence) / layout.gpus
        return Step(kinds, waits, bubble, self.optimizer, total, flop / total / 1e12)
