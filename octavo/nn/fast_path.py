"""nn.TransformerEncoderLayer's fast path: in evaluation torch computes the whole layer in one function of its own.

That function reads its linear layers' weights and calls none of them: no FP8, and nothing that it could read where
weights are stored in FP8. So layers with converted parts go without it.
"""

from __future__ import annotations

from torch import nn

from octavo.nn.recipe_module import RecipeModule

# What torch asks before it takes that path, and the answer that keeps it from doing so: which activation it is (0: one
# that the function can't compute; nothing else reads it), and whether to make padded sequences nested tensors.
_QUESTIONS: dict[type[nn.Module], tuple[str, int | bool]] = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}
_KEPT = "_answer_before_octavo"


def leave_fast_path(model: nn.Module) -> None:
    """Keep torch's encoder layers that hold FP8 modules from computing without them."""
    for module, (question, answer) in _asked(model):
        if _KEPT not in module.__dict__ and any(isinstance(part, RecipeModule) for part in module.modules()):
            module.__dict__[_KEPT] = module.__dict__[question]
            module.__dict__[question] = answer


def take_fast_path(model: nn.Module) -> None:
    """Undo that where no FP8 module is left."""
    for module, (question, _) in _asked(model):
        if _KEPT in module.__dict__ and not any(isinstance(part, RecipeModule) for part in module.modules()):
            module.__dict__[question] = module.__dict__.pop(_KEPT)


def _asked(model: nn.Module) -> list[tuple[nn.Module, tuple[str, int | bool]]]:
    return [
        (module, asked)
        for module in model.modules()
        for kind, asked in _QUESTIONS.items()
        if isinstance(module, kind) and asked[0] in module.__dict__
    ]
