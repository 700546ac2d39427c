import sys
from collections.abc import Mapping

import pytest

from kvferry.testing import isolated_registry
from kvferry_plugins import hookimpl
from kvferry_plugins.errors import BackendUnavailableError, HookError, PluginLoadError
from kvferry_plugins.testing import FakeModelPlugin
from kvferry_plugins.types import ManagerKind, RuntimeSupport, TransferBackend


class Named:
    def __init__(self, name="acme"):
        self.name = name


def alone(*plugins):
    return isolated_registry(*plugins, builtin=False)


def test_answers_come_sorted_by_plugin_and_none_is_left_out():
    registry = alone(
        FakeModelPlugin("A", runtime="PYTHON", name="zenith"),
        FakeModelPlugin("A", runtime="CPP", name="acme"),
        FakeModelPlugin("B", runtime="CPP", name="other"),
    )

    answers = registry.preferred_transceiver_runtime("A", None)

    assert [(answer.plugin, answer.value) for answer in answers] == [("acme", "CPP"), ("zenith", "PYTHON")]


def test_any_subset_of_the_arguments_may_be_taken_by_name():
    class Plugin(Named):
        @hookimpl
        def model_defaults(self, engine_args, *, architecture, pretrained_config=None, _layers=1):
            return engine_args, architecture, pretrained_config, _layers

    (answer,) = alone(Plugin()).model_defaults("A", {"layers": 3}, {"device": "cpu"})

    assert answer.value == ({"device": "cpu"}, "A", {"layers": 3}, 1)


def test_arguments_are_immutable_to_the_bottom():
    seen = []

    class Plugin(Named):
        @hookimpl
        def model_defaults(self, pretrained_config):
            seen.append(pretrained_config)

    config = {"rope": {"scaling": [1, {"factor": 2}]}}
    alone(Plugin()).model_defaults("A", config, {})

    (handed,) = seen
    assert isinstance(handed["rope"], Mapping)
    with pytest.raises(TypeError):
        handed["rope"]["scaling"] = 1
    with pytest.raises(TypeError):
        handed["rope"]["scaling"][1]["factor"] = 3
    assert config == {"rope": {"scaling": [1, {"factor": 2}]}}


@pytest.mark.parametrize("error", [ValueError("bad config"), SystemExit(3)])
def test_a_hook_that_raises_is_an_error_naming_plugin_and_distribution(error):
    class Plugin(Named):
        @hookimpl
        def preferred_transceiver_runtime(self):
            raise error

    with pytest.raises(HookError, match=r"'acme' \(\(injected\)\).*preferred_transceiver_runtime raised") as caught:
        alone(Plugin()).preferred_transceiver_runtime("A", None)

    assert caught.value.__cause__ is error
    assert (caught.value.hook, caught.value.plugin) == ("preferred_transceiver_runtime", "acme")


@pytest.mark.parametrize("answer", [["UCX"], 5, "UCX"])
def test_a_declaration_of_something_else_is_an_error(answer):
    class Plugin(Named):
        @hookimpl
        def transfer_backends(self):
            return answer

    with pytest.raises(HookError, match="acme"):
        alone(Plugin()).transfer_backends()


def test_a_declaration_that_stops_half_way_is_an_error():
    class Plugin(Named):
        @hookimpl
        def kv_cache_managers(self):
            yield ManagerKind("V9", "KVCacheManagerV9")
            raise RuntimeError("half way")

    with pytest.raises(HookError, match="half way"):
        alone(Plugin()).kv_cache_managers()


def test_declarations_are_flattened():
    class Plugin(Named):
        @hookimpl
        def transfer_backends(self):
            return (TransferBackend(name, {"PYTHON": RuntimeSupport()}, probe="x:y") for name in ("ONE", "TWO"))

    assert [answer.value.name for answer in alone(Plugin()).transfer_backends()] == ["ONE", "TWO"]


def maker(result):
    class Plugin(Named):
        @hookimpl
        def create_transfer_agent(self, spec):
            if isinstance(result, BaseException):
                raise result
            return result

    return alone(Plugin())


@pytest.mark.parametrize(
    ("result", "word"),
    [(None, "returned None"), (RuntimeError("boom"), "raised RuntimeError: boom"), (object(), "no TransferAgent")],
    ids=["none", "raises", "another type"],
)
def test_a_maker_that_makes_nothing_is_an_error(result, word):
    with pytest.raises(HookError, match=word) as caught:
        maker(result).create_transfer_agent("acme", None)

    assert "acme" in str(caught.value)
    assert caught.value.distribution == "(injected)"


def test_what_a_maker_raises_of_ours_passes_unchanged():
    error = BackendUnavailableError("nixl is not installed; pip install kvferry[nixl]")

    with pytest.raises(BackendUnavailableError) as caught:
        maker(error).create_transfer_agent("acme", None)

    assert caught.value is error


def test_only_the_named_plugin_is_asked_to_make():
    class Other(Named):
        @hookimpl
        def create_transfer_agent(self, spec):
            raise AssertionError("the plan did not name this plugin")

    class Plugin(Named):
        @hookimpl
        def model_defaults(self):
            return None

    with pytest.raises(HookError, match="create_transfer_agent is not implemented"):
        alone(Other("other"), Plugin()).create_transfer_agent("acme", None)


def test_a_maker_that_is_not_there_is_an_error_that_says_so():
    with pytest.raises(PluginLoadError, match=r"'acme'.*not in this registry"):
        alone().create_transfer_agent("acme", None)


def test_the_plugin_set_holds_models_and_backends_but_no_observers():
    class Observer(Named):
        @hookimpl
        def plan_resolved(self, plan):
            pass

    registry = isolated_registry(FakeModelPlugin("A", name="acme"), Observer("watcher"), builtin_models=True)

    assert {"acme", "llama", "nixl"} <= set(registry.plugin_set())
    assert registry.plugin_set()["acme"] == "(injected)"
    assert not {"watcher", "runtime_python", "cache_manager_v1"} & set(registry.plugin_set())


def test_an_isolated_registry_discovers_no_stranger(install):
    install("healthy")

    assert "healthy" not in [record.name for record in isolated_registry().records()]


def test_builtin_models_are_there_only_on_request():
    assert isolated_registry().record("llama") is None
    assert isolated_registry(builtin_models=True).record("llama").is_active
    assert isolated_registry(builtin=False, builtin_models=True).record("nixl") is None
    assert isolated_registry(builtin=False).records() == ()


def test_unnamed_plugins_are_numbered():
    registry = alone(FakeModelPlugin("A"), FakeModelPlugin("A", name="acme"), FakeModelPlugin("A"))

    assert [record.name for record in registry.records()] == ["acme", "fake-1", "fake-2"]


def test_a_module_is_injected_under_its_own_name(tmp_path, monkeypatch):
    FakeModelPlugin("A", runtime="CPP", name="acme_fake").write_module(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import acme_fake

    (answer,) = alone(acme_fake).preferred_transceiver_runtime("A", None)

    assert (answer.plugin, answer.value) == ("acme_fake", "CPP")
    del sys.modules["acme_fake"]


@pytest.mark.parametrize("plugin", [FakeModelPlugin, object(), 42])
def test_injecting_what_is_no_plugin_is_an_error(plugin):
    with pytest.raises(PluginLoadError, match=r"without a hook|is the class"):
        alone(plugin)


def test_injecting_two_plugins_of_one_name_is_an_error():
    with pytest.raises(PluginLoadError, match="two injected plugins are named 'acme'"):
        alone(FakeModelPlugin("A", name="acme"), FakeModelPlugin("B", name="acme"))


@pytest.mark.parametrize("decoration", [{"wrapper": True}, {"hookwrapper": True}], ids=str)
def test_a_wrapper_is_refused_since_it_could_change_another_plugins_answer(decoration):
    class Plugin(Named):
        @hookimpl(**decoration)
        def model_defaults(self, architecture):
            return (yield)

    with pytest.raises(PluginLoadError, match="wrapper"):
        alone(Plugin())


def test_an_async_hook_is_refused():
    class Plugin(Named):
        @hookimpl
        async def model_defaults(self, architecture):
            return None

    with pytest.raises(PluginLoadError, match="async"):
        alone(Plugin())


def test_an_optional_hook_that_does_not_exist_is_no_failure():
    class Plugin(Named):
        @hookimpl(optionalhook=True)
        def hook_of_the_future(self, anything):
            return None

        @hookimpl
        def model_defaults(self, architecture):
            return {"device": "cpu"}

    registry = alone(Plugin())

    assert registry.record("acme").hooks == ("model_defaults",)
    assert len(registry.model_defaults("A", None, None)) == 1
