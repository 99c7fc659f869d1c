"""From which size on a layer is faster in FP8, by a device's rates."""

from __future__ import annotations

from octavo import recipes
from octavo.cost.pays import TOKENS, describe_rates, pays
from octavo.cost.rates import PUBLISHED

H200 = PUBLISHED["H200"]


def test_where_fp8_pays_grows_with_the_tokens() -> None:
    sizes_of_tokens = pays(recipes.delayed(), H200)
    sizes = [sizes_of_tokens[tokens] for tokens in TOKENS]
    assert sizes == sorted(sizes, reverse=True)  # type: ignore[type-var]
    assert set(pays(recipes.mx(), H200).values()) == {None}
    text = describe_rates(H200)
    assert "at 16384 tokens from 1024 features on" in text and "copy 4.3 TB/s" in text
