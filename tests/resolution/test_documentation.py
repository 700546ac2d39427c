import re
from pathlib import Path

import pytest

from kvferry.config.problems import known_keys
from kvferry.resolution.selectors import SELECTORS

TEXT = (Path(__file__).parents[2] / "docs" / "resolution.md").read_text()


def test_the_selectors_are_documented_in_their_order():
    assert tuple(re.findall(r"^\| `(TRTLLM_\w+)` \| `(\w+)` \|$", TEXT, re.MULTILINE)) == SELECTORS


@pytest.mark.parametrize("setting", list(known_keys()))
def test_every_setting_is_documented(setting):
    assert f"\n| `{setting}` |" in TEXT
