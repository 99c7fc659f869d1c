"""nn.TransformerEncoderLayer's fast path: in evaluation torch computes the whole layer in one function of its own.

That function reads its linear layers' weights and calls none of them: no FP8, and nothing that it could read where
weights are stored in FP8. So layers that hold converted modules go without it.
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
_ANSWER = "_answer_before_octavo"


def choose_fast_path(model: nn.Module) -> None:
    """Keep torch's encoder layers that hold FP8 modules from computing without them; let the others again."""
    for module in model.modules():
        for kind, (question, answer) in _QUESTIONS.items():
            if not isinstance(module, kind) or question not in module.__dict__:
                continue
            holds_fp8 = any(isinstance(inner, RecipeModule) for inner in module.modules())
            if holds_fp8 and _ANSWER not in module.__dict__:
                module.__dict__[_ANSWER] = module.__dict__[question]
                module.__dict__[question] = answer
            elif not holds_fp8 and _ANSWER in module.__dict__:
                module.__dict__[question] = module.__dict__.pop(_ANSWER)
