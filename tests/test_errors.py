import pytest

import octavo
from octavo import errors


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (octavo.UnsupportedOpError, NotImplementedError),
        (octavo.UnsupportedOptionError, ValueError),
        (octavo.HigherOrderGradientError, RuntimeError),
        (octavo.MissingExtraError, ImportError),
    ],
)
def test_each_error_is_caught_as_octavos_and_as_pythons(error: type[Exception], builtin: type[Exception]) -> None:
    for base in (error, octavo.OctavoError, builtin):
        with pytest.raises(base, match="the remedy"):
            raise error("the remedy")


def test_all_are_public() -> None:
    names_of_errors = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert names_of_errors <= {*octavo.__all__}
    assert all(getattr(octavo, name) is getattr(errors, name) for name in names_of_errors)


def test_the_first_line_of_an_error():
    assert errors.first_line(ValueError("\n one\ntwo")) == "one"
    assert errors.first_line(KeyError()) == "KeyError"
