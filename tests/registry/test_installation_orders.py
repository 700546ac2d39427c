"""The order in which distributions were installed, and the folders they lie in, decide nothing."""

import dataclasses
import random
import sys

import pytest

from kvferry.dispatcher import resolve
from kvferry.registry.load import load_registry
from kvferry.registry.toggles import Layer, Toggles
from kvferry_plugins.errors import KvferryError

ORDERS = 50

OPINION = """
from kvferry_plugins import hookimpl


@hookimpl
def preferred_transceiver_runtime(architecture):
    return {preferences!r}.get(architecture)


@hookimpl
def model_defaults(architecture):
    return {defaults!r}.get(architecture)
"""

BACKEND = """
from kvferry_plugins import hookimpl
from kvferry_plugins.types import RuntimeSupport, TransferBackend


@hookimpl
def transfer_backends():
    return [TransferBackend({name!r}, {{"CPP": RuntimeSupport()}}, "orders:probe", install="pip install " + {name!r})]
"""


def opinion(preferences=(), defaults=()):
    return OPINION.format(preferences=dict(preferences), defaults=dict(defaults))


PLUGINS = {
    "agrees-one": {
        "agrees_one": opinion({"AgreedForCausalLM": "PYTHON"}, {"AgreedForCausalLM": {"max_batch_size": 4}})
    },
    "agrees-two": {
        "agrees_two": opinion({"AgreedForCausalLM": "PYTHON"}, {"AgreedForCausalLM": {"max_batch_size": 4}})
    },
    "leaves-one": {"leaves_one": opinion((), {"LeavesForCausalLM": {"kv_cache_config": {"tokens_per_block": 64}}})},
    "leaves-two": {
        "leaves_two": opinion((), {"LeavesForCausalLM": {"kv_cache_config": {"enable_block_reuse": False}}})
    },
    "quarrels-one": {"quarrels_one": opinion({"QuarrelForCausalLM": "PYTHON"})},
    "quarrels-two": {"quarrels_two": opinion({"QuarrelForCausalLM": "CPP"})},
    "overrules": {"overrules": opinion({"LlamaForCausalLM": "CPP"}, {"LlamaForCausalLM": {"max_batch_size": 16}})},
    "preferred": {"preferred": opinion({"SettledForCausalLM": "PYTHON"})},
    "not-preferred": {"not_preferred": opinion({"SettledForCausalLM": "CPP"})},
    "backend-one": {"backend_one": BACKEND.format(name="TWICE")},
    "backend-two": {"backend_two": BACKEND.format(name="TWICE")},
    "backend-alone": {"backend_alone": BACKEND.format(name="ALONE")},
    "twin-a": {"twin": opinion()},
    "twin-b": {"twin": opinion()},
    "names-nixl": {"nixl": opinion()},
    "breaks": {"breaks": "raise OSError('no such device')"},
    "several": {
        "several_z": opinion({"SeveralForCausalLM": "PYTHON"}),
        "several_a": opinion({"SeveralForCausalLM": "PYTHON"}),
    },
}
"""Distribution → entry point → its module: agreement, quarrels, ranks, twins, a built-in's name, a broken one."""

QUESTIONS = [
    ("AgreedForCausalLM", "NIXL"),
    ("LeavesForCausalLM", "NIXL"),
    ("QuarrelForCausalLM", "NIXL"),
    ("SettledForCausalLM", "NIXL"),
    ("SeveralForCausalLM", "DEFAULT"),
    ("LlamaForCausalLM", "NIXL"),
    ("LlamaForCausalLM", "TWICE"),
    ("LlamaForCausalLM", "ALONE"),
    ("LlamaForCausalLM", "NOBODYS"),
]

TOGGLES = Toggles((Layer("kvferry.toml", prefer={"SettledForCausalLM": "preferred"}),))


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """All modules, in one folder on the path: they are the same wherever a distribution lies."""
    folder = tmp_path_factory.mktemp("modules")
    for distribution, plugins in PLUGINS.items():
        for name, source in plugins.items():
            (folder / f"{module_of(distribution, name)}.py").write_text(source)
    sys.path.append(str(folder))
    yield
    sys.path.remove(str(folder))


def module_of(distribution, name):
    return f"orders_{distribution.replace('-', '_')}_{name}"


def install_in_any_order(base, seed):
    """Install every distribution, in an order and to one of three folders that are drawn."""
    draw = random.Random(seed)
    folders = [base / str(number) for number in range(draw.choice((1, 3)))]
    order = sorted(PLUGINS)
    draw.shuffle(order)
    for distribution in order:
        info = draw.choice(folders) / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        names = list(PLUGINS[distribution])
        draw.shuffle(names)
        lines = [f"{name} = {module_of(distribution, name)}" for name in names]
        (info / "entry_points.txt").write_text("\n".join(["[kvferry]", *lines, ""]))
    paths = [str(folder) for folder in folders]
    ours = [path for path in sys.path if path]
    return [*paths, *ours] if draw.random() < 0.5 else [*ours, *paths]


def answers(paths):
    """All that an operator could see: the records, the warnings, and every plan or what stands in its way."""
    registry = load_registry(toggles=TOGGLES, paths=paths)
    records = [dataclasses.replace(each, import_seconds=None) for each in registry.records()]
    plans = [answer(registry, *question) for question in QUESTIONS]
    return {"records": records, "warnings": registry.warnings, "plans": plans, "set": registry.plugin_set()}


def answer(registry, architecture, backend):
    args = {"cache_transceiver_config": {"backend": backend}}
    try:
        return resolve(args, model=architecture, registry=registry, environ={})
    except KvferryError as error:
        return type(error), str(error)


def test_fifty_orders_of_installation_give_the_same_answers(modules, tmp_path):
    first, *others = [answers(install_in_any_order(tmp_path / str(seed), seed)) for seed in range(ORDERS)]

    assert len(others) == ORDERS - 1
    states = {record.name: str(record.state) for record in first["records"]}
    assert states["breaks"] == states["twin-a:twin"] == states["names-nixl:nixl"] == "failed"
    assert [type(plan) for plan in first["plans"]].count(tuple) == 3  # a quarrel, a backend twice, an unknown one
    for seed, other in enumerate(others, 1):
        assert other == first, f"seed {seed}"
