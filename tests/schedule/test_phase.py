import math

import pytest

from octavo import RecipeMap, recipes
from octavo.optim import Moment
from octavo.schedule import Phase

HIGH = recipes.high_precision()


def test_it_says_what_it_was_told():
    phase = Phase(HIGH, master=None, weight_storage=None, from_tokens=5)
    assert repr(phase) == "Phase(high_precision, master=None, weight_storage=None, from_tokens=5)"
    assert phase.trigger == "from_tokens" and Phase(HIGH).trigger is None
    assert repr(Phase(RecipeMap(HIGH))) == "Phase(map of high_precision)"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("dynamic",), TypeError, "no octavo.Recipe"),
        ((HIGH, "same", "same", "fp4"), ValueError, "weight_storage='fp4'"),
        ((HIGH, "same", "same", "same", 0), ValueError, "from_step=0 must be a whole number above 0"),
        ((HIGH, "same", "same", "same", 1.5), ValueError, "from_step=1.5"),
        ((HIGH, "same", "same", "same", True), ValueError, "from_step=True"),
        ((HIGH, "same", "same", "same", None, -3), ValueError, "from_tokens=-3"),
        ((HIGH, "same", "same", "same", None, None, 0.0), ValueError, "when_lr_below=0.0 must be a number above 0"),
        ((HIGH, "same", "same", "same", None, None, math.nan), ValueError, "when_lr_below=nan"),
        ((HIGH, "same", "same", "same", None, None, None, math.inf), ValueError, "when_update_below_resolution=inf"),
        ((HIGH, "same", "same", "same", 5, 6), ValueError, "from_step and from_tokens: a phase begins by one"),
    ],
)
def test_what_it_can_not_be(arguments, error, message):
    with pytest.raises(error, match=message):
        Phase(*arguments)


def test_it_is_a_value():
    a, b = (Phase(recipes.dynamic(), moments=(Moment("fp32"), Moment("bf16")), from_step=3) for _ in range(2))
    assert a == b and hash(a) == hash(b)
