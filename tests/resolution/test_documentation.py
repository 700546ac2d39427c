import re
from pathlib import Path

from kvferry.resolution.selectors import SELECTORS

DOCS = Path(__file__).parents[2] / "docs"


def test_the_selectors_are_documented_in_their_order():
    text = (DOCS / "resolution.md").read_text()
    named = dict.fromkeys(re.findall(r"`(TRTLLM_USE_[A-Z]+_KVCACHE)`", text))
    assert list(named) == [variable for variable, _ in SELECTORS]
