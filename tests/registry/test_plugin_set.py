import random

import pytest
from importlib_metadata import PathDistribution
from registry.wheels import plugin_source, write_wheel

from kvferry.registry.discovery import from_distributions
from kvferry.registry.lock_file import make_lock, render_lock
from kvferry.registry.plugin_set import FilesReader, known_plugins, plugin_digests, plugin_set_digest
from kvferry.registry.survey import survey
from kvferry.registry.toggles import Toggles, flag_layers
from kvferry.testing import isolated_registry
from kvferry_plugins import hookimpl
from kvferry_plugins.testing import FakeModelPlugin


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """Of wheels that are laid out by hand, two of which claim one name."""
    import zipfile

    folder = tmp_path_factory.mktemp("distributions")
    for number in range(6):
        files = {f"module_{number}.py": plugin_source()}
        points = {
            f"plugin_{number}": f"module_{number}",
            "contested" if number < 2 else f"own_{number}": f"module_{number}",
        }
        with zipfile.ZipFile(write_wheel(folder / "wheels", f"d{number}", "1.0", points, files)) as wheel:
            wheel.extractall(folder / f"site{number}")
    return [PathDistribution(folder / f"site{number}" / f"d{number}-1.0.dist-info") for number in range(6)]


def lock_of(distributions, *flags):
    discovery = from_distributions(distributions)
    records = survey(discovery, Toggles(flag_layers(flags))).records
    return render_lock(make_lock(known_plugins(records, FilesReader(discovery))))


def test_fifty_orders_of_installation_are_one_lock(distributions):
    expected = lock_of(distributions)
    assert expected.count("[[plugin]]") == 10
    for seed in range(50):
        random.Random(seed).shuffle(shuffled := list(distributions))
        assert lock_of(shuffled) == expected


def test_a_contested_name_is_locked_where_a_toggle_settles_it(distributions):
    assert 'name = "d0:contested"' in lock_of(distributions, "d0:contested")


def test_the_digest_is_of_what_two_workers_compare():
    class Observer:
        name = "observer"

        @hookimpl
        def plan_resolved(self, plan):
            pass

    alone = isolated_registry(builtin_models=True)
    observed = isolated_registry(Observer(), builtin_models=True)
    joined = isolated_registry(FakeModelPlugin("A", name="a"), builtin_models=True)

    assert plugin_set_digest(alone) == plugin_set_digest(observed) != plugin_set_digest(joined)
    assert plugin_digests(alone).keys() == alone.plugin_set().keys()
    assert "a" not in plugin_digests(joined)
    assert plugin_set_digest(alone, {}) != plugin_set_digest(alone)
