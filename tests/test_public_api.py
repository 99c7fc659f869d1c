"""The names of `import octavo`: each public one is documented, with an example that the tests run."""

import inspect
import re
import sys
from collections import Counter
from functools import cache

import griffe
import pytest

import octavo
from tests.support.processes import ROOT

# What users import names from; each says in __all__ which.
ROOMS = """octavo octavo.recipes octavo.nn octavo.optim octavo.distributed octavo.distributed.checkpoint octavo.schedule
octavo.inspect octavo.cost octavo.export octavo.integrations.accelerate octavo.integrations.transformers
octavo.integrations.lightning octavo.integrations.torchtitan octavo.compat.torchao
octavo.compat.transformer_engine""".split()


@cache
def public() -> dict[str, griffe.Object]:
    """Return each public name and its object, read without an import; not rooms, nor names of other libraries."""
    package = griffe.load("octavo", search_paths=[ROOT], allow_inspection=False)
    objects = {}
    for room in ROOMS:
        module = package[room.removeprefix("octavo").lstrip(".")] if room != "octavo" else package
        assert module.exports, f"{room} has no __all__"
        for name in module.exports:
            target = module[name]
            if target.is_alias:
                if not target.target_path.startswith("octavo."):
                    continue
                target = target.final_target
            if not target.is_module:
                objects[f"{room}.{name}"] = target
    return objects


def test_the_names_are_those_of_the_design():
    promised = "quantize ScaledTensor E4M3 E5M2 PerTensor PerRow PerBlock Cast Recipe recipes nn"
    promised += " convert set_recipe restore summary"
    assert set(promised.split()) <= set(octavo.__all__)
    named = {name for name, value in vars(octavo.recipes).items() if inspect.isfunction(value) and name[0] != "_"}
    assert {"dynamic", "delayed", "rowwise", "blockwise", "mx", "high_precision"} <= set(octavo.recipes.NAMED)
    assert named | {"AnyRecipe"} == set(octavo.recipes.__all__)


def test_each_name_is_in_the_reference_once():
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md")]
    listed = Counter(name for page in pages for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE))
    assert [name for name in public() if listed[name] != 1] == []


def test_each_name_is_documented_with_an_example_arguments_errors_and_shapes():
    """Examples are run as doctests; errors need none, and octavo.compat's names have another library's arguments."""
    lacking = []
    for name, target in public().items():
        text = getattr(target.docstring, "value", "")
        lacking += [] if text else [f"{name}: a docstring"]
        if name.endswith("Error") or not (target.is_function or target.is_class):
            continue
        lacking += [] if ">>> " in text else [f"{name}: an example"]
        if name.startswith("octavo.compat."):
            continue
        if [p for p in target.parameters if p.name != "self"] and not re.search("Args:|Attributes:", text):
            lacking.append(f"{name}: Args")
        if "raise " in (target.source or "") and "Raises:" not in text:
            lacking.append(f"{name}: Raises")
        if name.startswith("octavo.nn.") and "forward" in target.members and "Shape:" not in text:
            lacking.append(f"{name}: Shape")
    assert lacking == []


def test_rooms_are_attributes():
    assert octavo.distributed.checkpoint.save_checkpoint and octavo.optim.AdamW and octavo.schedule.Phase
    assert {"distributed", "export", "optim", "schedule"} <= set(dir(octavo))
    assert octavo.__getattr__("schedule") is sys.modules["octavo.schedule"]  # which Python asks for once


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'octavo' has no attribute 'exports'"):
        _ = octavo.exports
