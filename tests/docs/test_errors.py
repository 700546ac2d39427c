import re

import pytest
from docs.environment import ROOT

from kvferry.transceiver.receives import ReceiveState
from kvferry.transceiver.sends import SendState
from kvferry_plugins import errors

PAGE = (ROOT / "docs" / "operate.md").read_text()
QUOTED = [quote for row in re.findall(r"^\| … (.+?) \|", PAGE, re.MULTILINE) for quote in re.findall(r"`([^`]+)`", row)]


def sources():
    """All of our source text, with strings that go on in the next line put together, and no f-string's values."""
    text = "\n".join(
        path.read_text() for folder in ("core/kvferry", "backends") for path in ROOT.glob(f"{folder}/**/*.py")
    )
    return re.sub(r"\{[^{}]*\}", "N", re.sub(r"\"\s*\n\s*f?\"", "", text))


def test_every_error_has_a_row_that_says_what_to_do():
    raised = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)]
    bases = ("KvferryError", "PluginError")
    assert [name for name in raised if name not in bases and f"| `{name}`" not in PAGE] == []


@pytest.mark.parametrize("quote", QUOTED)
def test_a_message_that_is_quoted_is_one_that_is_said(quote):
    assert quote in sources()


def test_every_state_of_a_time_out_is_one_that_a_request_can_be_in():
    table = PAGE.partition("| state of the time-out |")[2]
    states = {
        state for row in re.findall(r"^\| (`.+?`) \|", table, re.MULTILINE) for state in re.findall(r"`(\w+)`", row)
    }
    known = {state.value for kind in (SendState, ReceiveState) for state in kind}
    assert states <= known
    assert len(states) >= 6
