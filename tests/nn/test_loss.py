"""octavo.nn.cross_entropy as a user calls it, beside torch's in float32 and transformers' own loss."""

import copy
import functools
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F

import octavo
from octavo import HigherOrderGradientError
from octavo.nn import CrossEntropyLoss, cross_entropy, linear_cross_entropy
from octavo.nn.loss import causal_lm_loss
from octavo.nn.saved import saved_by_kind
from tests.support.combinations import each_pair


@each_pair(
    dtype=[torch.bfloat16, torch.float16, torch.float32],
    reduction=["mean", "sum", "none"],
    smoothing=[0.0, 0.2],
    softcap=[None, 4.0],
    ignore_index=[-100, 3],
)
def test_it_is_torchs_of_logits_in_float32(case: dict[str, Any]) -> None:
    head = nn.Linear(16, 50, dtype=case["dtype"])
    x, target = torch.randn(2, 9, 16, dtype=case["dtype"]), torch.randint(0, 50, (18,))
    target[::4] = case["ignore_index"]
    options = {"ignore_index": case["ignore_index"], "reduction": case["reduction"]}
    results = []
    for ours in (True, False):
        logits = head(x).view(-1, 50)
        if ours:
            loss = cross_entropy(logits, target, label_smoothing=case["smoothing"], softcap=case["softcap"], **options)
        else:
            wide = logits.float()
            wide = wide if case["softcap"] is None else case["softcap"] * (wide / case["softcap"]).tanh()
            loss = F.cross_entropy(wide, target, label_smoothing=case["smoothing"], **options)
        results.append((loss.detach(), *torch.autograd.grad(loss.square().sum(), [*head.parameters()])))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=2 * torch.finfo(one.dtype).eps + 1e-6, atol=1e-5)


def test_backward_twice_and_logits_that_somebody_holds() -> None:
    x, target = torch.randn(6, 20, requires_grad=True), torch.randint(0, 20, (6,))
    logits = x * 2
    before, loss = logits.detach().clone(), cross_entropy(logits, target)
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second) and torch.equal(logits, before)
    with pytest.raises(HigherOrderGradientError):
        torch.autograd.grad(loss, x, create_graph=True)


def test_nothing_of_the_logits_size_is_saved_but_the_logits() -> None:
    class Head(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return cross_entropy(super().forward(x), torch.zeros(len(x)).long())

    saved = saved_by_kind(Head(8, 1000, dtype=torch.bfloat16), (torch.randn(32, 8, dtype=torch.bfloat16),))
    assert sum(saved.values()) < 32 * 1000 * 2 + 32 * 20


def test_a_trace_of_it_is_saved_and_loaded() -> None:
    """Gradients are on, as users leave them."""
    logits, target = torch.randn(4, 10, requires_grad=True), torch.tensor([1, 2, -100, 3])
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(cross_entropy, (logits, target)), file)
    file.seek(0)
    assert torch.equal(torch.jit.load(file)(2 * logits, target), cross_entropy(2 * logits, target))


def test_no_row_that_counts_is_nan_as_torchs() -> None:
    assert cross_entropy(torch.randn(2, 5), torch.tensor([-100, -100])).isnan()
    assert cross_entropy(torch.randn(0, 5), torch.zeros(0).long(), reduction="sum") == 0


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"reduction": "avg"}, ValueError, "reduction='avg': use one of mean, sum, none"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing=1.5: use 0 to 1"),
        ({"softcap": 0.0}, ValueError, "softcap=0.0: use a positive number"),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        cross_entropy(torch.ones(2, 5), torch.zeros(2).long(), **options)
    with pytest.raises(TypeError, match="float64"):
        cross_entropy(torch.ones(2, 5).double(), torch.zeros(2).long())
    with pytest.raises(ValueError, match=r"weight: .*use torch's"):
        CrossEntropyLoss(torch.ones(5))


def test_a_heads_weight_is_read_as_the_head() -> None:
    recipe = octavo.recipes.rowwise()
    head = octavo.nn.Linear(32, 50, recipe=recipe)
    x, target = torch.randn(2, 9, 32, requires_grad=True), torch.randint(0, 50, (2, 9))
    for chosen in (recipe, None):
        head.recipe = octavo.recipes.high_precision() if chosen is None else chosen
        by_module = linear_cross_entropy(x, head, target, ignore_index=3)
        weight, bias = head.weight, head.bias
        by_weight = linear_cross_entropy(x, weight, target, linear_bias=bias, ignore_index=3, recipe=chosen)
        leaves = [x, weight, bias]
        assert torch.equal(by_module, by_weight)
        assert all(map(torch.equal, *(torch.autograd.grad(loss, leaves) for loss in (by_module, by_weight))))
    exact = F.cross_entropy(F.linear(x, weight, bias).flatten(0, 1), target.flatten(), ignore_index=3)
    torch.testing.assert_close(by_module, exact)  # which is in high precision


def test_a_heads_hooks_run_and_a_tied_weight_gets_both_gradients() -> None:
    embedding, head = nn.Embedding(50, 32), octavo.nn.Linear(32, 50, bias=False, recipe=octavo.recipes.delayed())
    nn.init.normal_(embedding.weight, std=0.1)
    head.weight, called = embedding.weight, []
    head.register_forward_pre_hook(lambda *_: called.append("before"))
    head.register_forward_hook(lambda _, __, loss: called.append(loss.shape))
    tokens = torch.randint(0, 50, (20,))
    linear_cross_entropy(embedding(tokens), head, tokens.roll(1)).backward()
    assert called == ["before", torch.Size([])]
    assert embedding.weight.grad.any(1).all()  # of tokens that are no input too


@pytest.mark.parametrize(
    ("arguments", "options", "error", "said"),
    [
        ({}, {"reduction": "none"}, ValueError, r"reduction='none'.*octavo.nn.cross_entropy\(head\(input\)"),
        ({}, {"weight": torch.ones(5)}, ValueError, "weight: .*use torch's"),
        ({}, {"softcap": -1.0}, ValueError, "softcap=-1.0"),
        ({"target": torch.zeros(3).long()}, {}, ValueError, r"target \[3\] of torch.int64 .* of input \[2, 8\]"),
        ({"target": torch.zeros(2)}, {}, ValueError, r"target \[2\] of torch.float32"),
        ({"input": torch.ones(2, 7)}, {}, ValueError, "needs in_features=8"),
        ({"input": torch.ones(2, 8).double()}, {}, TypeError, "float64: use bfloat16"),
        ({"input": torch.ones(2, 8).bfloat16()}, {}, TypeError, "bfloat16 but the weight is torch.float32"),
        ({"linear_weight": nn.Linear(8, 5)}, {}, TypeError, "is a Linear: give an octavo.nn.Linear"),
        ({"linear_weight": torch.ones(5, 8)}, {"recipe": octavo.recipes.delayed()}, ValueError, "has no history"),
        ({}, {"recipe": octavo.recipes.dynamic()}, ValueError, "a head has its own"),
        ({"linear_weight": octavo.nn.Linear(8, {"a": 2, "b": 3})}, {}, ValueError, "head with splits"),
        ({"target": torch.tensor([0, 5])}, {}, IndexError, "target 5 is none of the 5 columns"),
    ],
)
def test_what_a_head_refuses(arguments: dict[str, Any], options: dict[str, Any], error: Any, said: str) -> None:
    usual = {"input": torch.ones(2, 8), "linear_weight": octavo.nn.Linear(8, 5), "target": torch.zeros(2).long()}
    with pytest.raises(error, match=said):
        linear_cross_entropy(**usual | arguments, **options)


def test_logits_that_ranks_have_in_parts_are_left_to_transformers(lone_mesh: Any) -> None:
    pytest.importorskip("transformers")
    logits, labels = torch.randn(2, 9, 50), torch.randint(0, 50, (2, 9))
    parts = distribute_tensor(logits, lone_mesh, [Shard(2)])
    for items in (None, 7):
        with loss_parallel():
            loss = causal_lm_loss(parts, labels, 50, items)
        assert type(loss) is DTensor
        torch.testing.assert_close(loss.full_tensor(), causal_lm_loss(logits, labels, 50, items))


def test_a_heads_weight_that_is_sharded_is_refused(lone_mesh: Any) -> None:
    weight = distribute_tensor(octavo.nn.Linear(8, 5).weight.detach(), lone_mesh, [Shard(0)])
    with pytest.raises(ValueError, match=r"the head's weight \(5, 8\) is a DTensor, .*give octavo.nn.linear_cross_ent"):
        linear_cross_entropy(torch.ones(2, 8), weight, torch.zeros(2).long())


def test_a_weights_recipe_may_be_a_name() -> None:
    x, weight, target = torch.randn(6, 32), torch.randn(48, 32), torch.arange(6)
    for name in ("dynamic", "high_precision"):
        expected = linear_cross_entropy(x, weight, target, recipe=getattr(octavo.recipes, name)())
        assert torch.equal(linear_cross_entropy(x, weight, target, recipe=name), expected)
    with pytest.raises(ValueError, match="'fast' is no recipe: choose "):
        linear_cross_entropy(x, weight, target, recipe="fast")


def test_it_says_its_options() -> None:
    loss = CrossEntropyLoss(ignore_index=3, label_smoothing=0.1)
    assert "ignore_index=3" in repr(loss) and "label_smoothing=0.1" in repr(loss)


def test_transformers_models_take_it_and_give_it_back() -> None:
    pytest.importorskip("transformers")
    from tests.support.tiny_models import MODELS, VOCABULARY, new

    plain = new(*MODELS["llama"]).train()
    net = octavo.convert(copy.deepcopy(plain), octavo.recipes.high_precision(), lambda *_: True, fuse=True)
    assert net.loss_function is causal_lm_loss and octavo.summary(net).fused["loss_function"] == "causal_lm_loss"
    tokens = torch.randint(1, VOCABULARY, (2, 12))
    labels = tokens.masked_fill(tokens % 5 == 0, -100)
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    for more in ({}, {"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(7)}, {"shift_labels": shifted}):
        ours, theirs = (one(input_ids=tokens, labels=labels, **more).loss for one in (net, plain))
        torch.testing.assert_close(ours, theirs)
        fused, other = (torch.autograd.grad(loss, [*one.parameters()]) for loss, one in ((ours, net), (theirs, plain)))
        torch.testing.assert_close(fused, other, rtol=1e-4, atol=1e-6)
    assert copy.deepcopy(net).loss_function is causal_lm_loss
    assert octavo.restore(net).loss_function is plain.loss_function
    net.loss_function = F.cross_entropy  # somebody's own stays
    assert octavo.convert(net, octavo.recipes.dynamic(), lambda *_: True, fuse=True).loss_function is F.cross_entropy


class OnAnotherGpu(Tensor):
    """A number that no operation takes before it is moved."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is Tensor.to, "expected all tensors to be on the same device"
        with torch._C.DisableTorchFunctionSubclass():
            return args[0].as_subclass(Tensor)


def test_the_number_of_items_is_moved_to_the_losss_device() -> None:
    logits, labels = torch.randn(2, 5, 50), torch.randint(0, 50, (2, 5))
    count = torch.tensor(7).as_subclass(OnAnotherGpu)
    assert torch.equal(causal_lm_loss(logits, labels, 50, count), causal_lm_loss(logits, labels, 50, 7))


@pytest.mark.parametrize("whose", ["class", "property", "table"])
def test_a_loss_of_the_class_or_of_the_librarys_table_stays(whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.loss.loss_utils import LOSS_MAPPING

    from tests.support.tiny_models import MODELS, VOCABULARY, new

    def z_loss(self: Any, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return logits.float().logsumexp(-1).square().mean()

    net = new(*MODELS["llama"])
    attributes = {"class": z_loss, "property": property(lambda self: functools.partial(z_loss, self))}
    if whose == "table":
        monkeypatch.setitem(LOSS_MAPPING, "ForCausalLM", functools.partial(z_loss, net))
    else:
        net.__class__ = type("OwnForCausalLM", (transformers.LlamaForCausalLM,), {"loss_function": attributes[whose]})
    octavo.convert(net, octavo.recipes.high_precision(), lambda *_: True, fuse=True)
    tokens = torch.randint(1, VOCABULARY, (2, 12))
    output = net(input_ids=tokens, labels=tokens)
    assert torch.equal(output.loss, z_loss(net, output.logits))
