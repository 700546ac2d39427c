import pytest

from kvferry.config import parse_engine_args
from kvferry.doctor.deployment import Deployment
from kvferry.doctor.findings import Severity
from kvferry.doctor.planning import deployment_of, make_plan_aside, plan_findings
from kvferry.registry.inspection import inspect_plugins
from kvferry.registry.load import load_registry
from kvferry.registry.survey import survey
from kvferry.registry.toggles import Toggles, flag_layers

ERROR, WARNING, INFO, OK = Severity.ERROR, Severity.WARNING, Severity.INFO, Severity.OK
ON_NIXL = {"cache_transceiver_config": {"backend": "NIXL", "transceiver_runtime": "PYTHON"}}
PEER = {"endpoint": "tcp://10.0.0.7:9001", "public_key": "0" * 40}


@pytest.fixture
def plan():
    def plan(written, *, flags=(), inspected=(), model=None):
        args = parse_engine_args(written, origin="engine.yaml")
        return make_plan_aside(args, Toggles(flag_layers(flags)), inspected, model=model, timeout=30)

    return plan


def found(planned, *, known=(), broken=()):
    return [(each.severity, each.subject, each.what) for each in plan_findings(planned, known, broken)]


def test_a_plan_that_can_be_built_is_ok(plan):
    planned = plan(ON_NIXL)

    assert (planned.backend, planned.runtime) == ("NIXL", "PYTHON")
    assert found(planned) == [(OK, "the plan", "can be built here: PYTHON on NIXL, manager V1")]


def test_a_plan_whose_backend_does_not_work_is_not_called_buildable(plan):
    ((severity, _, what),) = found(plan(ON_NIXL), broken={"NIXL"})

    assert severity is INFO
    assert "NIXL does not work here" in what


def test_every_blocker_is_a_finding_about_its_setting(plan):
    written = {"cache_transceiver_config": {"backend": "NIXLL", "max_tokens_in_buffer": 33}}

    assert [(severity, subject) for severity, subject, _ in found(plan(written))] == [
        (ERROR, "cache_transceiver_config.backend"),
        (ERROR, "cache_transceiver_config.max_tokens_in_buffer"),
    ]


def test_a_library_that_is_absent_is_an_error_with_the_command(plan, install):
    install("absent_backend")

    planned = plan({"cache_transceiver_config": {"backend": "ABSENT", "transceiver_runtime": "PYTHON"}})

    (finding,) = plan_findings(planned, (), ())
    assert finding.severity is ERROR
    assert "backend ABSENT needs kvferry_no_such_module" in finding.what
    assert finding.fix == "pip install kvferry-no-such-module"


def test_the_environment_is_that_of_a_worker(plan, monkeypatch):
    monkeypatch.setenv("TRTLLM_USE_UCX_KVCACHE", "1")

    planned = plan({"cache_transceiver_config": {"backend": "DEFAULT"}})

    assert planned.backend == "UCX"
    assert any(
        severity is WARNING and "TRTLLM_USE_UCX_KVCACHE=1 decides" in what for severity, _, what in found(planned)
    )


def test_what_others_tell_is_not_told_again(plan, monkeypatch):
    monkeypatch.setenv("TRTLLM_USE_UCX_KVCACHES", "1")
    planned = plan(ON_NIXL)

    assert len(planned.warnings) == 1
    assert len(found(planned, known=planned.warnings)) == 1


def test_a_plugin_whose_import_crashes_is_left_out(plan, install):
    install("kills_python", "healthy")
    records = [each for each in survey_here() if each.name in ("kills_python", "healthy")]

    planned = plan(ON_NIXL, inspected=inspect_plugins(records, timeout=20))

    assert planned.failure is None
    assert planned.backend == "NIXL"


def test_a_process_that_ends_instead_is_an_error(plan, install):
    install("kills_python")

    ((severity, _, what),) = found(plan(ON_NIXL))

    assert severity is ERROR
    assert "the process was killed by signal 9" in what


def test_flags_count_and_a_plugin_that_has_to_be_active_is_told_elsewhere(plan):
    planned = plan({**ON_NIXL, "plugins": {"required": ["nixl"]}}, flags=["no:ucx"])
    assert found(planned)[-1][0] is OK

    planned = plan({"cache_transceiver_config": {"backend": "UCX"}}, flags=["no:ucx"])
    assert "is declared by no active plugin" in planned.errors[0]["message"]


def test_a_model_that_is_not_there_is_an_error(plan, tmp_path):
    ((severity, _, what),) = found(plan(ON_NIXL, model=tmp_path))

    assert severity is ERROR
    assert "config.json" in what


def test_a_deployment_is_what_the_plan_says(plan):
    args = parse_engine_args({**ON_NIXL, "peers": [PEER], "device": "cpu"})

    assert deployment_of(args, plan(ON_NIXL)) == Deployment("NIXL", "user", (PEER["endpoint"],), "cpu")
    assert deployment_of(args, None) == Deployment(None, None, (PEER["endpoint"],), "cpu")
    assert deployment_of(None, None) == Deployment()


def survey_here():
    from kvferry.registry.discovery import discover

    return survey(discover(), Toggles()).records


def test_the_same_plan_comes_out_as_in_this_process(plan):
    from kvferry.dispatcher import resolve

    here = resolve(ON_NIXL, model=None, registry=load_registry(toggles=Toggles()), environ={})

    assert plan(ON_NIXL).plan["kv_cache_manager"] == here.manager
