import copy

import pytest
import torch
from torch import nn

import octavo
from octavo import recipes
from octavo.nn.splits import checked_splits, merge_keys, split_output
from tests.support.helpers import FP8_RECIPES, CountOps, assert_equal, gradients

SPLITS = {"query": 4, "key": 2, "value": 2}


def test_a_number_and_a_mapping():
    assert checked_splits(8) == (8, None)
    size, splits = checked_splits(SPLITS)
    assert (size, splits) == (8, SPLITS)
    assert splits is not SPLITS  # the caller's may change


@pytest.mark.parametrize("splits", [{}, {"weight": 2}, {"bias": 2}, {"a.b": 2}, {"": 2}, {"0": 2}, {"a": 2, "b c": 2}])
def test_names_must_fit_a_state_dict(splits):
    with pytest.raises(ValueError, match="splits need names like 'query', not"):
        checked_splits(splits)


def test_parts_are_views_in_order():
    output = torch.randn(2, 3, 8)
    assert split_output(output, None) is output
    parts = split_output(output, SPLITS)
    assert [p.shape for p in parts] == [(2, 3, 4), (2, 3, 2), (2, 3, 2)]
    assert all(p.untyped_storage()._cdata == output.untyped_storage()._cdata for p in parts)
    assert torch.equal(torch.cat(parts, dim=-1), output)


def separate(prefix="", sizes=SPLITS, parameters=("weight", "bias")):
    return {
        f"{prefix}{name}.{parameter}": torch.randn(size, 3) if parameter == "weight" else torch.randn(size)
        for name, size in sizes.items()
        for parameter in parameters
    }


@pytest.mark.parametrize("prefix", ["", "blocks.0.qkv."])
def test_separate_keys_are_joined(prefix):
    state = {"other": torch.ones(1), **separate(prefix)}
    expected = torch.cat([state[f"{prefix}{name}.weight"] for name in SPLITS])
    assert merge_keys(state, prefix, SPLITS) == []
    assert state.keys() == {"other", f"{prefix}weight", f"{prefix}bias"}
    assert torch.equal(state[f"{prefix}weight"], expected)
    assert state[f"{prefix}bias"].shape == (8,)


def test_what_is_not_all_there_or_joined_already_is_left_alone():
    for missing in ("key.weight", "value.bias"):
        state = separate()
        del state[missing]
        kept = missing.split(".")[1]
        assert merge_keys(state, "", SPLITS) == []
        assert kept not in state and f"query.{kept}" in state
        assert ({"weight", "bias"} - {kept}) <= state.keys()
    state = {**separate(parameters=("weight",)), "weight": torch.ones(8, 3)}
    before = dict(state)
    assert merge_keys(state, "", SPLITS) == []
    assert state.keys() == before.keys()


def test_sizes_that_only_add_up_are_refused():
    state = separate(sizes={"query": 2, "key": 2, "value": 4}, parameters=("weight",))
    wrong = merge_keys(state, "", SPLITS)
    assert wrong == [
        "query.weight is [2, 3], but its split has 4 rows",
        "value.weight is [4, 3], but its split has 2 rows",
    ]
    assert "weight" not in state


# Linear with named splits

WIDE = {"query": 32, "key": 16, "value": 8}


def layer(name: str, k: int, n) -> octavo.nn.Linear:
    return octavo.nn.Linear(k, n, recipe=FP8_RECIPES[name]())


@pytest.mark.parametrize("name", FP8_RECIPES)
def test_named_splits_are_one_layers_output_in_parts(name):
    whole, ours = layer(name, 64, 56), layer(name, 64, WIDE)
    ours.load_state_dict(whole.state_dict())
    assert (ours.out_features, ours.weight.shape) == (56, (56, 64))
    for shape in [(64,), (8, 64), (2, 4, 64), (0, 64)]:
        x = torch.randn(shape, requires_grad=True)
        grad = torch.randn(*shape[:-1], 56)
        for module in (whole, ours):
            module.zero_grad()
            module.reset_delayed_state()
        expected = whole(x)
        parts = ours(x)
        assert isinstance(parts, tuple)
        assert [part.shape for part in parts] == [(*shape[:-1], size) for size in WIDE.values()]
        assert torch.equal(torch.cat(parts, dim=-1), expected)
        expected.backward(grad)
        first, x.grad = x.grad, None
        with CountOps() as ops:
            torch.autograd.backward(parts, grad.split([*WIDE.values()], dim=-1))
        assert ops.calls["matmul"] == 2  # not once a split
        assert torch.equal(x.grad, first)
        assert_equal(gradients(ours), gradients(whole))


@pytest.mark.parametrize("name", ["dynamic", "rowwise"])
def test_a_split_that_nothing_is_computed_from(name):
    ours = layer(name, 64, WIDE)
    query, _, value = ours(torch.randn(8, 64))
    (query.sum() + value.sum()).backward()
    assert not ours.weight.grad[32:48].any() and ours.weight.grad[:32].any() and ours.weight.grad[48:].any()


def test_separate_layers_load_into_named_splits():
    net = nn.ModuleDict({"qkv": layer("delayed", 64, WIDE)})
    net["qkv"](torch.randn(8, 64))[0].sum().backward()
    parts = nn.ModuleDict({"qkv": nn.ModuleDict({name: nn.Linear(64, size) for name, size in WIDE.items()})})
    separate = parts.state_dict()
    for assign in (False, True):
        assert net.load_state_dict(separate, assign=assign) == ([], [])
        assert not net["qkv"].delayed_scale.any()  # of the weights that are gone
        x = torch.randn(8, 64)
        with octavo.using(net, recipes.high_precision()):
            results = net["qkv"](x)
        for found, (split, plain) in zip(results, parts["qkv"].items(), strict=True):
            torch.testing.assert_close(found, plain(x), msg=split)
    assert "qkv.query.weight" in separate  # the caller's own is left alone
    assert net.load_state_dict(net.state_dict()) == ([], [])


def test_separate_layers_of_other_sizes_do_not():
    ours = layer("dynamic", 64, WIDE)
    state = {f"{name}.weight": torch.ones(size, 64) for name, size in zip(WIDE, (16, 32, 8), strict=True)}
    state["bias"] = torch.zeros(56)
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"query\.weight is \[16, 64\], but its split has 32 rows"):
            ours.load_state_dict(state, strict=strict)
    del state["key.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"weight"(.|\n)*Unexpected key.*"query\.weight"'):
        ours.load_state_dict(state)


def test_splits_are_printed_copied_and_called_by_name():
    ours = layer("mx", 8, {"gate": 4, "up": 2})
    assert repr(ours) == "Linear(in_features=8, out_features=6, bias=True, splits={'gate': 4, 'up': 2}, recipe=mx)"
    assert copy.deepcopy(ours).splits == ours.splits == {"gate": 4, "up": 2}
    with pytest.raises(ValueError, match="splits need names like 'query'"):
        octavo.nn.Linear(8, {"weight": 4})
