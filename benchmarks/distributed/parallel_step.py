"""Formulas: how long a training step of a transformer takes on many GPUs. Nothing here is measured.

Bytes are those of ``fsdp_traffic.py``; products, casts and the memory's bandwidth those of ``octavo.cost``. All else is
assumed, and named with its source in ``Hardware`` or in the docstring of what assumes it. None of it was fitted to the
step times that ``communication_model.py`` holds the results against.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from benchmarks.distributed.fsdp_traffic import Shapes, Weight, divided, traffic
from octavo import recipes
from octavo.cost.estimate import LinearWork
from octavo.cost.rates import HIGH_PRECISION, Rates, forms_of, rates_of
from octavo.scaling.recipe import Recipe

BF16, CODE = 2, 1  # bytes
PAIR = 1 + 1 / 128  # bytes of a code and its share of the scale of 128
STATE = 12  # bytes an element of a master and Adam's two moments in float32, each on one rank
OPTIMIZER = 30  # bytes an element that AdamW reads and writes: those twice, a gradient in float32 and the bf16 weight


@dataclass(frozen=True)
class Hardware:
    """H100 SXM servers of 8 with a network card of 400 Gb/s a GPU. None of these is measured here.

    Args:
        rates: of products, casts and copies: octavo.cost's, which names their sources.
        attention_forward: FLOP/s of a causal attention's forward, 8,192 tokens, heads of 128 (pytorch/benchmark#2391).
        attention_backward: the same backward, which computes 2.5 times the FLOP. Assumed: 0.8 of forward's.
        nvlink: bytes/s each way of a GPU in NCCL's all-gathers and reduce-scatters inside a server (nccl-tests#212:
            370 of 450 GB/s).
        network: bytes/s each way of a GPU's card (nccl-tests#290: 46 to 48 of 50 GB/s).
        server: GPUs in one.
        latency: seconds that a collective takes before its first byte. Assumed.
        memory: bytes of a GPU, all of them: ``Stage.state`` counts what backward reads in bf16, more than FP8 takes.
    """

    rates: Rates = field(default_factory=lambda: rates_of("H100"))
    attention_forward: float = 614e12
    attention_backward: float = 490e12
    nvlink: float = 370e9
    network: float = 47e9
    server: int = 8
    latency: float = 20e-6
    memory: float = 80e9


@dataclass(frozen=True)
class Precision:
    """What is computed and what is sent in FP8; each is octavo's way unless said otherwise.

    Args:
        name: for tables.
        products: in FP8, a scale a tensor, each tensor's own (``recipes.dynamic()``).
        gathers: weights gathered in FP8 by FSDP2; else in bf16.
        reduction: at how many levels gradients are reduced as pairs in blocks of 128
            (``octavo.distributed.Fp8ReduceScatter``): by an all-to-all of all ranks, or by one of a server's ranks and
            one of servers. What casts and sums take is not counted. 0: a reduce-scatter of bf16.
        pairs: inputs and gradients that tensor and sequence parallelism gather, and tokens and gradients that expert
            parallelism dispatches, are codes, whose scale ranks agree on first. What was gathered is kept for backward.
            What is added up over ranks stays in bf16.
        elsewhere: Megatron's and DeepSeek's way: forward keeps this rank's part of an input, which is gathered again in
            backward; a token is cast and sent over the network once for all its experts of a server.
    """

    name: str
    products: bool = True
    gathers: bool = False
    reduction: int = 0
    pairs: bool = False
    elsewhere: bool = False

    @property
    def recipe(self) -> Recipe:
        """Of the products."""
        return recipes.dynamic() if self.products else recipes.high_precision()

    @property
    def sent(self) -> int:
        """Bytes of an element of an input or a gradient that TP gathers."""
        return CODE if self.pairs else BF16


@dataclass(frozen=True)
class Layout:
    """How a step is divided among GPUs.

    Args:
        gpus: all of them.
        sequences: of a step, one a micro-batch.
        sequence: tokens of one.
        tensor, pipeline, context, expert: ranks of each kind of parallelism. Tensor parallelism is with sequence
            parallelism; experts are divided among ranks of data parallelism.
        chunks: layers of a stage come in so many (interleaved 1F1B).
        resharded: FSDP2 frees weights after each use, gathers them twice a micro-batch and reduces gradients in each.
            Else once a step: a stage keeps its weights, and masters and moments are sharded (ZeRO-1, or FSDP2 with
            reshard_after_forward=False).
        recomputed: the share of layers whose forward runs again in backward.
    """

    gpus: int
    sequences: int
    sequence: int = 8192
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    chunks: int = 1
    resharded: bool = False
    recomputed: float = 0.0

    @property
    def data(self) -> int:
        """Ranks of data parallelism."""
        return self.gpus // (self.tensor * self.pipeline * self.context)

    @property
    def micro_batches(self) -> int:
        """Of a rank and step."""
        return self.sequences // self.data

    @property
    def sharded(self) -> int:
        """Ranks that the weights of a stage are sharded over."""
        return self.data * self.context


def wire_seconds(whole: float, ranks: int, stride: int, hardware: Hardware, directly: bool = False) -> float:
    """How long an all-gather or a reduce-scatter of so many bytes in all takes, each rank ``stride`` GPUs apart.

    Each GPU takes in (n - 1) / n of the bytes over NVLink. Over the network a ring takes each byte into a server once,
    over the cards of the group's ranks there; the slower of the two counts.

    Args:
        whole: bytes of the gathered tensor.
        ranks: of the group.
        stride: as many other groups share each server.
        hardware: constants.
        directly: an all-to-all: each rank's card takes in what all ranks elsewhere have for it.
    """
    if ranks == 1:
        return 0.0
    here = on_a_server(ranks, stride, hardware)
    inside = whole * (here - 1 if directly else ranks - 1) / ranks / hardware.nvlink * (here > 1)
    servers = ranks / here
    arriving = (ranks - here) / ranks if directly else (servers - 1) / servers / here
    return max(inside, whole * arriving / hardware.network) + hardware.latency


def on_a_server(ranks: int, stride: int, hardware: Hardware) -> int:
    """How many of a group's ranks, ``stride`` GPUs apart, are in one server."""
    return max(1, min(ranks, hardware.server // stride))


def exchange_seconds(whole: float, ranks: int, stride: int, hardware: Hardware, levels: int) -> float:
    """How long all-to-alls take that reduce so many bytes at one level or at two, one after the other."""
    if levels == 1:
        return wire_seconds(whole, ranks, stride, hardware, directly=True)
    here = on_a_server(ranks, stride, hardware)
    inside = wire_seconds(whole, here, stride, hardware, directly=True)
    return inside + wire_seconds(whole / here, ranks // here, hardware.server, hardware, directly=True)


@dataclass(frozen=True)
class Step:
    """Seconds of a step on each GPU: ``compute`` and, beside it, what nothing hides."""

    compute: float
    tensor: float
    expert: float
    bubble: float
    data: float
    optimizer: float
    flop: float  # of the model, a GPU

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.compute + self.tensor + self.expert + self.bubble + self.data + self.optimizer

    @property
    def tflops(self) -> float:
        """TFLOP/s of a GPU, of those that the model needs."""
        return self.flop / self.seconds / 1e12


def model_flop(shapes: Shapes, sequence: int) -> float:
    """Of a token: 6 a number that multiplies it, and causal attention; what is recomputed does not count."""
    return 6.0 * (sum(shapes.products) + sequence * shapes.attention * shapes.layers)


@dataclass(frozen=True)
class Stage:
    """What one rank computes and sends for a micro-batch.

    Backward takes twice what forward takes. Products have octavo.cost's rate whatever their size, those of experts
    together that of one of all their rows. Collectives take no SMs. Those of tensor and expert parallelism are waited
    for, as torch's functional collectives are. The exchange of keys and values of context parallelism and the
    activations between stages hide behind compute, and stages are equally long.
    """

    whole: Shapes
    layout: Layout
    precision: Precision
    hardware: Hardware

    @cached_property
    def shapes(self) -> Shapes:
        """What the rank holds before FSDP2 shards it."""
        return divided(self.whole, self.layout.tensor, self.layout.pipeline, self.layout.expert)

    @property
    def tokens(self) -> float:
        """Of a micro-batch on a rank of context parallelism."""
        return self.layout.sequence / self.layout.context

    @cached_property
    def shards(self) -> list[tuple[Shapes, int, int]]:
        """What the rank holds, by over how many ranks it is sharded, and how many GPUs these are apart.

        Experts are sharded over the ranks that hold the same ones, each in another server.
        """
        layout, held = self.layout, self.shapes
        if layout.expert == 1:
            return [(held, layout.sharded, layout.tensor)]
        dense, experts = (tuple(w for w in held.block if (w.split == "experts") == own) for own in (False, True))
        alone = replace(held, block=experts, root=(Weight(0),))
        ranks = layout.sharded * layout.tensor // layout.expert
        return [(replace(held, block=dense), layout.sharded, layout.tensor), (alone, ranks, self.hardware.server)]

    def rows(self, weight: Weight) -> float:
        """Of a weight's input: all tokens where tensor parallelism splits it, else this rank's part of them."""
        return self.tokens * weight.used / (1 if weight.split in ("in", "out") else self.layout.tensor)

    def linear(self, weight: Weight) -> float:
        """Seconds of a converted weight's products and casts, forward and backward.

        What tensor parallelism gathers is cast before that where pairs are sent, and else after; elsewhere tokens are
        cast once for all their experts. A weight is cast where it is sharded if it is gathered in FP8, else as a whole.
        """
        rates, recipe = self.hardware.rates, self.precision.recipe
        work = LinearWork("", round(self.rows(weight)), weight.cols, weight.rows, True, True)
        seconds = sum(rates.product_seconds(form, work.flop) for form in forms_of(recipe))
        if not self.precision.products:
            return seconds
        size = weight.elements / (self.layout.sharded if self.precision.gathers else 1)
        size /= 1 if self.layout.resharded else self.layout.micro_batches
        counts = work.tokens * weight.cols, size, work.tokens * weight.rows
        first = weight.split == "out" or (weight.split == "experts" and weight.cols == self.whole.width)
        spared = self.layout.tensor if weight.split in ("in", "out") else 1
        if weight.split == "experts" and self.precision.elsewhere:
            spared = weight.used
        spared = spared if self.precision.pairs else 1
        shares = spared if first else 1, 1, 1 if first else spared
        for role, elements, share in zip(recipe.casts, counts, shares, strict=True):
            cast = role.as_is or role.transposed
            assert cast is not None
            seconds += rates.cast_seconds(cast, elements / share, True)
        return seconds

    @cached_property
    def block_seconds(self) -> float:
        """Of a block's forward and backward on one micro-batch."""
        tensor, rates = self.layout.tensor, self.hardware.rates
        linears = sum(self.linear(weight) for weight in self.shapes.block if weight.converted)
        other = 3 * BF16 * self.whole.elementwise * self.tokens / tensor / rates.copy
        flop = 2.0 * self.tokens * self.layout.sequence * self.whole.attention / tensor
        attention = flop / self.hardware.attention_forward + 2.5 * flop / self.hardware.attention_backward
        return linears + other + attention

    @property
    def compute(self) -> float:
        """Seconds of forward and backward; the head's products are in bf16, its logits read or written four times."""
        rates, head = self.hardware.rates, self.whole.root[-1]
        share = 1 / (self.layout.tensor * self.layout.pipeline)
        logits = self.tokens * head.rows * share
        last = 3 * rates.product_seconds(HIGH_PRECISION, 2 * logits * head.cols) + 4 * BF16 * logits / rates.copy
        return self.shapes.layers * self.block_seconds * (1 + self.layout.recomputed / 3) + last

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
                    seconds += times * wire_seconds(self.tokens * size * each, layout.tensor, 1, self.hardware)
                seconds += self.hardware.latency * (sent == CODE)  # of the scale
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
        numbers = self.tokens / layout.tensor * self.whole.width * self.shapes.layers
        slowest = max(visited * (1 - 1 / servers) / hardware.network, used * (1 - 1 / here) / hardware.nvlink)
        waits = (4 + 2 * self.precision.pairs) * self.shapes.layers * hardware.latency  # also of the scales
        sent = CODE if self.precision.pairs else BF16
        return numbers * 2 * (sent + BF16) * slowest + waits

    @property
    def data(self) -> float:
        """Seconds of a round of FSDP2's collectives that a micro-batch's compute does not hide.

        One block is prefetched: gathers hide behind forward, gathers and scatters, on the same wires, behind backward,
        except for the first gathers (the root's and block 0's) and the root's scatter at the end.
        """
        exposed = gathered = scattered = 0.0
        for shapes, ranks, stride in self.shards:
            if ranks == 1:
                continue
            recipe = "dynamic" if self.precision.gathers else "bf16"
            moved = traffic(shapes, recipe, ranks)

            def seconds(whole: float, ranks: int = ranks, stride: int = stride) -> float:
                return wire_seconds(whole, ranks, stride, self.hardware)

            def reduced(whole: float, ranks: int = ranks, stride: int = stride) -> float:
                if not self.precision.reduction:
                    return wire_seconds(whole, ranks, stride, self.hardware)
                return exchange_seconds(whole * PAIR / BF16, ranks, stride, self.hardware, self.precision.reduction)

            first, last = seconds(moved.root_gather + moved.block_gather), reduced(moved.root_scatter)
            exposed += first + last + moved.reduces * self.hardware.latency
            gathered += seconds(moved.gathered_forward) - first
            scattered += reduced(moved.scattered) - last
            if self.layout.resharded:
                scattered += seconds(moved.gathered_backward)
        return exposed + max(0.0, gathered - self.compute / 3) + max(0.0, scattered - 2 * self.compute / 3)

    @property
    def state(self) -> float:
        """Bytes of a GPU that weights, gradients (float32), masters, moments and what backward reads (bf16) take.

        Saved are the products' and the attention's operands and the activation's input, of as many micro-batches as
        interleaved 1F1B has on their way, and of layers that are recomputed their input and one of them as a whole; the
        logits in bf16 and float32.
        """
        layout, shapes = self.layout, self.shapes
        kept = 0.0
        for part, ranks, _ in self.shards:
            most = max(sum(w.elements for w in weights) for weights in (part.block, part.root))
            whole = 2 * most * 2 * BF16 + (BF16 + 4) * part.parameters / ranks
            kept += STATE * part.parameters / ranks + (whole if layout.resharded else (BF16 + 4) * part.parameters)
        saved = 0.0
        for w in self.whole.block:
            gathered = w.split == "out" and not self.precision.elsewhere
            cols, rows = w.cols * (layout.tensor if gathered else 1), w.rows if w.split != "in" else 0
            saved += self.tokens * w.used * w.converted * (cols + rows) / layout.tensor
        under_way = layout.pipeline * (1 + (layout.pipeline - 1) / (layout.pipeline * layout.chunks))
        recomputed, width = layout.recomputed, self.tokens * self.whole.width / layout.tensor
        layers = shapes.layers * min(under_way, layout.micro_batches)
        held = BF16 * (layers * ((1 - recomputed) * saved + recomputed * width) + math.ceil(recomputed) * saved)
        logits = (BF16 + 4) * self.tokens * self.whole.root[-1].rows / layout.tensor
        return kept + held + logits

    @property
    def optimizer(self) -> float:
        """Seconds of AdamW's update of what this rank has of the masters."""
        return sum(OPTIMIZER * part.parameters / ranks for part, ranks, _ in self.shards) / self.hardware.rates.copy


def step(shapes: Shapes, layout: Layout, precision: Precision, hardware: Hardware) -> Step:
    """A step's time.

    Args:
        shapes: of the whole model.
        layout: how it is divided.
        precision: what is in FP8.
        hardware: constants.

    Raises:
        ValueError: where ranks, layers or sequences do not divide.
    """
    ranks = layout.tensor * layout.pipeline * layout.context
    if layout.gpus % ranks or layout.sequences % layout.data or layout.sharded * layout.tensor % layout.expert:
        raise ValueError(f"{layout} does not divide: {ranks} ranks hold a model, of which there are {layout.data}")
    stage, count = Stage(shapes, layout, precision, hardware), layout.micro_batches
    one = stage.compute + stage.tensor + stage.expert
    return Step(
        compute=count * stage.compute,
        tensor=count * stage.tensor,
        expert=count * stage.expert,
        bubble=(layout.pipeline - 1) / layout.chunks * one,
        data=stage.data * (count if layout.resharded else 1),
        optimizer=stage.optimizer,
        flop=layout.sequences * layout.sequence * model_flop(shapes, layout.sequence) / layout.gpus,
    )
