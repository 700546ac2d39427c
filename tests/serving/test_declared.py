"""What the runtime of a deployment does not declare is refused by name."""

import json

import pytest
from click.testing import CliRunner

from kvferry.cli.main import main
from kvferry_plugins import hookimpl
from kvferry_plugins.errors import ConfigError
from kvferry_plugins.types import TransceiverRuntime

PARAMS = "disaggregated_params"


class PlainRuntime:
    """A runtime that hands over finished prefills, and no more; V1 alone, if it is told so."""

    name = "plain_runtime"

    def __init__(self, managers=None):
        self._managers = managers

    @hookimpl
    def transceiver_runtimes(self):
        return (TransceiverRuntime("PYTHON", "PlainTransceiver", managers=self._managers),)

    @hookimpl
    def create_transceiver(self, spec):
        from kvferry.transceiver.python_runtime import KvCacheTransceiverV2

        return KvCacheTransceiverV2(spec)


@pytest.mark.parametrize("side", ["context", "generation"])
def test_generation_first_is_refused_where_the_runtime_does_not_declare_it(local_pair, side):
    pair = local_pair(plugins=(PlainRuntime(),))
    if side == "context":
        asked = {"request_type": "context_only", "schedule_style": "generation_first"}
        answer = pair.context.complete(prompt="Hi", **{PARAMS: asked})
    else:
        body = pair.prefill(prompt="Hi", max_tokens=2)
        late = {**body[PARAMS], "schedule_style": "generation_first"}
        answer = pair.generation.complete(**{**body, PARAMS: late})
        assert pair.generation.complete(**body).status_code == 200
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == f"{PARAMS}.schedule_style"
    assert (
        "runtime PYTHON does not declare schedule style generation_first (it declares context_first)"
        in error["message"]
    )
    assert "CPP" in error["message"]


def test_pipelining_is_refused_where_the_runtime_does_not_declare_it(local_pair):
    with pytest.raises(ConfigError, match=r"PYTHON does not pipeline transfers, and enable_pipelined_transfer is true"):
        local_pair(plugins=(PlainRuntime(),), enable_pipelined_transfer=True)


def test_a_manager_that_the_runtime_cannot_drive_is_refused_by_name(local_pair):
    with pytest.raises(
        ConfigError, match=r"use_kv_cache_manager_v2 true cannot be had: .*PYTHON cannot drive manager V2"
    ):
        local_pair(plugins=(PlainRuntime(frozenset({"V1"})),), memory={"use_kv_cache_manager_v2": True})


RUNTIME_MODULE = """
from kvferry_plugins import hookimpl
from kvferry_plugins.types import TransceiverRuntime


@hookimpl
def transceiver_runtimes():
    return (TransceiverRuntime("PYTHON", "PlainTransceiver"),)
"""


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--schedule", "generation-first"], "--schedule generation-first: the runtime PYTHON does not declare"),
        (["--pipelined"], "PYTHON does not pipeline transfers"),
    ],
    ids=["schedule", "pipelining"],
)
def test_the_demo_says_it_before_anything_starts(tmp_path, monkeypatch, flags, words):
    (tmp_path / "plain_runtime.py").write_text(RUNTIME_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    result = CliRunner().invoke(main, ["demo", "-p", "plain_runtime", "--json", *flags])
    assert result.exit_code == 2, result.output
    (error,) = json.loads(result.stdout)["errors"]
    assert words in error["message"]
