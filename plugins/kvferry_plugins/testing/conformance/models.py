"""The suite for a plugin that knows facts about models."""

import inspect
import json
import sys
import tempfile
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvferry_plugins.testing.conformance.answers import called, leaves, neighbours, not_a_section, outside, shown
from kvferry_plugins.testing.conformance.import_probe import ASPECTS, STAGES
from kvferry_plugins.testing.conformance.installed import core_module, entry_points_at, entry_points_named
from kvferry_plugins.testing.conformance.processes import CONFIG, Report, explained, module_of, probe
from kvferry_plugins.testing.conformance.questions import (
    MODEL_HOOKS,
    frozen,
    hooks_of,
    questions,
    specified,
    thawed,
)

RUNTIME = "cache_transceiver_config.transceiver_runtime"


class ModelPluginConformance:
    """Subclass it as ``Test…``, and name your plugin and what it knows.

    ::

        class TestAcme(ModelPluginConformance):
            plugin = acme_kvferry
            architectures = ("AcmeForCausalLM",)

    Attributes:
        plugin: the module or the instance that the entry point names.
        architectures: those that it has an opinion on, spelt as ``config.json`` has them.
        silent: those that it deliberately has none on.
        configs: architecture → its ``config.json``, where an opinion depends on it.
        entry_point: its name under the entry-point group ``kvferry``; "" = whatever name leads to its module; None = it
            is not installed by an entry point, and is loaded with ``-p``.
        reference: ``module`` or ``module:attribute`` where it is found; "" = by itself.
        patience: seconds after which a process that imports and asks it hangs.
    """

    plugin: ClassVar[object]
    architectures: ClassVar[Sequence[str]] = ()
    silent: ClassVar[Sequence[str]] = ()
    configs: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    entry_point: ClassVar[str | None] = ""
    reference: ClassVar[str] = ""
    patience: ClassVar[float] = 120.0

    _report: ClassVar[Report | str]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "architecture" in metafunc.fixturenames:
            metafunc.parametrize("architecture", [*self.architectures, *self.silent])
        if "stage" in metafunc.fixturenames:
            metafunc.parametrize("stage", STAGES)
            metafunc.parametrize("aspect", ASPECTS)

    # --- what it is ---------------------------------------------------------------------------------------------

    def test_it_is_a_module_or_an_instance_with_hooks_about_models(self) -> None:
        plugin = self._plugin()
        assert not inspect.isclass(plugin), (
            f"{plugin!r} is a class: name an instance of it, `plugin = {_name(plugin)}()`"
        )
        assert set(hooks_of(plugin)) & set(MODEL_HOOKS), (
            f"{plugin!r} implements neither {' nor '.join(MODEL_HOOKS)}: mark functions of that name with @hookimpl"
        )
        assert self.architectures or self.silent, (
            "name what it has an opinion on (`architectures`), or deliberately none on (`silent`)"
        )

    def test_every_hook_exists_and_takes_arguments_that_it_has(self) -> None:
        plugin, known = self._plugin(), specified()
        unknown = sorted(set(hooks_of(plugin)) - set(known))
        assert not unknown, f"kvferry has no hook {', '.join(unknown)}; there are {', '.join(sorted(known))}"
        core = core_module("kvferry.registry.registration")
        if core is not None:
            core.check_plugin(core.new_manager(), plugin)

    def test_the_entry_point_leads_to_it(self) -> None:
        if self.entry_point is None:
            return
        module = self._reference().partition(":")[0]
        points = entry_points_named(self.entry_point) if self.entry_point else entry_points_at(module)
        wanted = f"named {self.entry_point!r}" if self.entry_point else f"that names {module!r}"
        assert points, (
            f"no installed distribution has an entry point {wanted} in the group kvferry: install yours, or set "
            "entry_point = None for a plugin that is not packaged"
        )
        loaded = [point.load() for point in points]
        assert any(each is self._plugin() for each in loaded), (
            f"entry point {points[0].name!r} = {points[0].value!r} leads to {loaded[0]!r}, not to {self._plugin()!r}"
        )

    # --- what it answers ----------------------------------------------------------------------------------------

    def test_it_has_the_opinions_that_it_is_said_to_have(self, architecture: str) -> None:
        answers = [answer for _, _, answer in self._answers(architecture)]
        opinions = [answer for answer in answers if answer is not None]
        if architecture in self.silent:
            assert not opinions, f"it is said to have no opinion on {architecture!r}, and answers {shown(opinions[0])}"
        else:
            assert opinions, (
                f"no hook has an opinion on {architecture!r}: is it spelt as the checkpoint's config.json has it, and "
                "does an opinion need a config.json (`configs`)?"
            )

    def test_its_answers_are_in_the_vocabulary(self, architecture: str) -> None:
        for hook, arguments, answer in self._answers(architecture):
            fault = outside(hook, answer)
            assert fault is None, f"{called(hook, arguments)} {fault}"

    def test_the_same_question_gets_the_same_answer(self, architecture: str) -> None:
        first = [(hook, arguments, thawed(answer)) for hook, arguments, answer in self._answers(architecture)]
        others: list[Any] = []
        thread = threading.Thread(target=lambda: others.extend(self._answers(architecture)))
        thread.start()
        for each in (*self.architectures, *self.silent, "SomeOtherForCausalLM"):
            list(self._answers(each))
        thread.join()
        for again in (list(self._answers(architecture)), others):
            for (hook, arguments, answer), (_, _, second) in zip(first, again, strict=True):
                assert thawed(second) == answer, (
                    f"{called(hook, arguments)} answered {shown(answer)}, and asked again {shown(thawed(second))}"
                )

    def test_it_leaves_its_arguments_as_they_are(self, architecture: str) -> None:
        for hook, ask in self._hooks().items():
            for arguments in questions(architecture, self.configs.get(architecture)):
                mine = thawed(arguments)
                ask(mine)
                changed = [name for name, value in thawed(arguments).items() if mine[name] != value]
                assert not changed, f"{called(hook, arguments)} changed its argument {', '.join(changed)}"

    def test_it_answers_for_no_other_architecture(self) -> None:
        known = {*self.architectures, *self.silent}
        for other in sorted({each for name in known for each in neighbours(name)} - known):
            for hook, arguments, answer in self._answers(other):
                assert answer is None, (
                    f"{called(hook, arguments)} answered {shown(answer)}, though it is none of its architectures: "
                    "compare whole names; a subclass opts in by saying so"
                )

    # --- what it does beside answering --------------------------------------------------------------------------

    def test_importing_and_asking_it_ends_well(self) -> None:
        report = self._probed()
        assert not isinstance(report, str), report

    def test_it_does_nothing_beside(self, stage: str, aspect: str) -> None:
        report = self._probed()
        assert not isinstance(report, str), "not known: the process that was to tell did not end well"
        found = report[stage].get(aspect, [])
        assert not found, f"{stage} {self._reference()} {'; '.join(found)}: a plugin only answers"

    @classmethod
    def _probed(cls) -> Report | str:
        """What importing and asking did, in a process of its own, or how that ended; found out once a class."""
        if "_report" not in vars(cls):
            known = (*cls.architectures, *cls.silent)
            asked = [
                (hook, each)
                for name in known
                for each in questions(name, cls.configs.get(name))
                for hook in MODEL_HOOKS
            ]
            with tempfile.TemporaryDirectory() as folder:
                cls._report = probe(cls._reference(), json.dumps(asked), Path(folder), cls.patience)
        return cls._report

    # --- what comes of it ---------------------------------------------------------------------------------------

    def test_its_defaults_are_a_configuration(self, architecture: str) -> None:
        for hook, arguments, answer in self._answers(architecture):
            if hook == "model_defaults" and answer is not None:
                fault = not_a_section(answer, "")
                assert fault is None, f"{called(hook, arguments)} answered {shown(answer)}: {fault}"
        plan = self._plan(architecture)
        if plan is not None:
            decisions = {each.setting: each for each in plan.decisions}
            for leaf, value in self._wished_defaults(architecture).items():
                decision = decisions.get(leaf)
                assert decision is not None, f"its default {leaf} = {shown(value)} is of no setting: nothing decides it"
                assert decision.source == "model", (
                    f"its default {leaf} = {shown(value)} decided nothing: {decision.reason}"
                )

    def test_its_preference_is_taken(self, architecture: str) -> None:
        plan, wish = self._plan(architecture), self._wished_runtime(architecture)
        if plan is not None and wish is not None:
            decision = plan.decision(RUNTIME)
            assert (decision.value, decision.source) == (wish, "model"), (
                f"it prefers {wish} for {architecture}, and kvferry resolves to {plan.runtime}: {decision.reason}"
            )

    def test_explain_says_the_same(self, architecture: str, tmp_path: Path) -> None:
        plan = self._plan(architecture)
        if plan is None:
            return
        flag = self._installed_name() or f"module:{module_of(self._reference(), tmp_path)}"
        said = explained(flag, self._config(architecture), tmp_path, self.patience)
        ours = {each.setting: (each.value, each.source) for each in plan.decisions}
        theirs = {each["setting"]: (each["value"], each["source"]) for each in said["decisions"]}
        differing = [
            f"{name}: {theirs.get(name)} instead of {ours[name]}" for name in ours if theirs.get(name) != ours[name]
        ]
        assert not differing, f"kvferry explain -p {flag} decides otherwise: {'; '.join(differing)}"

    # --- how it is asked ----------------------------------------------------------------------------------------

    @classmethod
    def _plugin(cls) -> object:
        plugin = getattr(cls, "plugin", None)
        assert plugin is not None, f"{cls.__name__} needs an attribute `plugin`: your module or instance"
        return plugin

    @classmethod
    def _hooks(cls) -> dict[str, Any]:
        report = cls._probed()
        assert not isinstance(report, str), f"it is not asked here, since {report}"
        found = hooks_of(cls._plugin())
        return {name: found[name] for name in MODEL_HOOKS if name in found}

    @classmethod
    def _answers(cls, architecture: str) -> Iterator[tuple[str, Mapping[str, Any], Any]]:
        for hook, ask in cls._hooks().items():
            for arguments in questions(architecture, cls.configs.get(architecture)):
                try:
                    answer = ask(frozen(arguments))
                except (Exception, SystemExit) as error:
                    hint = " (arguments are immutable)" if "mappingproxy" in str(error) else ""
                    raise AssertionError(
                        f"{called(hook, arguments)} raised {type(error).__name__}: {error}{hint}"
                    ) from error
                yield hook, arguments, answer

    @classmethod
    def _config(cls, architecture: str) -> dict[str, Any]:
        return {"architectures": [architecture], **thawed(cls.configs.get(architecture, {}))}

    @classmethod
    def _wished_defaults(cls, architecture: str) -> dict[str, Any]:
        ask = cls._hooks().get("model_defaults")
        return dict(leaves(ask(frozen(cls._question(architecture))) or {})) if ask else {}

    @classmethod
    def _wished_runtime(cls, architecture: str) -> object:
        ask = cls._hooks().get("preferred_transceiver_runtime")
        return ask(frozen(cls._question(architecture))) if ask else None

    @classmethod
    def _question(cls, architecture: str) -> dict[str, Any]:
        config = cls._config(architecture)
        return {"architecture": architecture, "pretrained_config": config, "engine_args": CONFIG}

    @classmethod
    def _plan(cls, architecture: str) -> Any:
        """What kvferry resolves with this plugin and none about other models; None where kvferry is not installed."""
        dispatcher, checkpoint = core_module("kvferry.dispatcher"), core_module("kvferry.checkpoint")
        testing = core_module("kvferry.testing")
        cls._hooks()  # refused if asking it ends its process
        if dispatcher is None or checkpoint is None or testing is None:
            return None
        registry = testing.isolated_registry(cls._plugin())
        model = checkpoint.ModelSpec(architecture, cls._config(architecture))
        return dispatcher.resolve(CONFIG, model=model, registry=registry, environ={})

    @classmethod
    def _reference(cls) -> str:
        return cls.reference or _find(cls._plugin())

    @classmethod
    def _installed_name(cls) -> str | None:
        """The name under which an installed distribution brings it."""
        points = entry_points_at(cls._reference().partition(":")[0]) if cls.entry_point == "" else []
        return cls.entry_point or (points[0].name if points else None)


def _find(plugin: object) -> str:
    """Where a plugin is: its module, or the attribute of its class's module that is it."""
    if isinstance(plugin, types.ModuleType):
        return plugin.__name__
    module = sys.modules.get(type(plugin).__module__)
    names = [name for name, value in vars(module).items() if value is plugin] if module else []
    assert names, f"{plugin!r} is no attribute of {type(plugin).__module__}: set reference = 'module:attribute'"
    return f"{type(plugin).__module__}:{names[0]}"


def _name(plugin: object) -> str:
    return getattr(plugin, "__name__", type(plugin).__name__)
