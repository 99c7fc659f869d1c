"""What `import octavo` gives: each public name is documented, with an example that the tests run."""

import inspect
import sys

import pytest

import octavo

FUNCTIONS = [
    *(getattr(octavo.export, name) for name in octavo.export.__all__),
    *(value for name in octavo.__all__ if inspect.isfunction(value := getattr(octavo, name))),
    *(value for name in octavo.nn.__all__ if inspect.isfunction(value := getattr(octavo.nn, name))),
    *(value for value in vars(octavo.recipes).values() if inspect.isfunction(value) and value.__name__[0] != "_"),
]
CLASSES = [
    *(value for name in octavo.__all__ if inspect.isclass(value := getattr(octavo, name))),
    *(value for name in octavo.nn.__all__ if inspect.isclass(value := getattr(octavo.nn, name))),
]


def test_the_names_are_those_of_the_design():
    promised = "quantize ScaledTensor E4M3 E5M2 PerTensor PerRow PerBlock Cast Recipe recipes nn"
    promised += " convert set_recipe restore summary"
    assert set(promised.split()) <= set(octavo.__all__)
    assert {"dynamic", "delayed", "rowwise", "blockwise", "mx", "high_precision"} <= vars(octavo.recipes).keys()


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__qualname__)
def test_function_has_an_example(function):
    assert ">>> " in (function.__doc__ or "")


@pytest.mark.parametrize(
    "kind", [k for k in CLASSES if not issubclass(k, Exception)], ids=lambda kind: kind.__qualname__
)
def test_class_has_an_example(kind):
    assert kind is octavo.granularity.Granularity or ">>> " in (kind.__doc__ or "")


@pytest.mark.parametrize("kind", [*CLASSES, *FUNCTIONS], ids=lambda kind: kind.__qualname__)
def test_documented(kind):
    assert kind.__doc__ and kind.__module__.startswith("octavo")


def test_moved_names_work_and_name_the_new_ones():
    for name, room in octavo._MOVED.items():
        assert name not in octavo.__all__
        with pytest.warns(DeprecationWarning, match=f"octavo.{name} is now {room}.{name}$"):
            found = getattr(octavo, name)
        assert found is getattr(sys.modules[room], name)


def test_rooms_are_attributes():
    assert octavo.distributed.checkpoint.save_checkpoint and octavo.optim.AdamW and octavo.schedule.Phase
    assert {"distributed", "export", "optim", "schedule"} <= set(dir(octavo))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'octavo' has no attribute 'exports'"):
        _ = octavo.exports
