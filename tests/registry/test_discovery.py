from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from importlib_metadata import Distribution

from kvferry.registry.discovery import discover, from_distributions
from kvferry.registry.load import register_all
from kvferry.registry.records import Origin
from kvferry.registry.survey import survey
from kvferry.registry.toggles import Toggles
from kvferry_plugins.testing import FakeModelPlugin


class InstalledDistribution(Distribution):
    def __init__(self, name, points, *, version="1.0", folder=None):
        self._files = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "entry_points.txt": "[kvferry]\n" + "".join(f"{key} = {value}\n" for key, value in points.items()),
        }
        self._folder = Path(folder or f"/site/{name}")

    def read_text(self, filename):
        return self._files.get(filename)

    def locate_file(self, path):
        return self._folder / path


names = st.sampled_from(["acme", "zenith", "llama", "apex"])
installations = st.lists(
    st.tuples(st.sampled_from([f"d{number}" for number in range(6)] + ["kvferry"]), st.lists(names, max_size=3)),
    max_size=6,
    unique_by=lambda each: each[0],
)


def ask_all(distributions):
    discovery = from_distributions(distributions)
    selection = survey(discovery, Toggles())
    objects = {
        entry.name: FakeModelPlugin("AcmeForCausalLM", runtime=entry.qualified_name) for entry in discovery.entries
    }
    registry = register_all(selection, objects, discovery.warnings)
    answers = registry.preferred_transceiver_runtime("AcmeForCausalLM", None)
    records = [(record.name, record.distribution, record.state, record.reason) for record in registry.records()]
    return records, answers, registry.warnings


@given(installations, st.randoms(use_true_random=False))
def test_the_order_of_installation_changes_neither_records_nor_answers(installed, random):
    distributions = [
        InstalledDistribution(name, {point: f"{name}_{point}" for point in points}) for name, points in installed
    ]
    expected = ask_all(distributions)

    random.shuffle(distributions)

    assert ask_all(distributions) == expected


def test_our_own_distribution_is_built_in_and_every_other_is_external():
    entries = from_distributions(
        [InstalledDistribution("kvferry", {"llama": "a"}), InstalledDistribution("kvferry-acme", {"acme": "b"})]
    ).entries

    assert {entry.name: entry.origin for entry in entries} == {"llama": Origin.BUILTIN, "acme": Origin.EXTERNAL}


def test_one_folder_listed_twice_on_the_path_is_one_copy(install):
    install("healthy", "healthy")

    assert not any("more than once" in warning for warning in discover().warnings)


def test_two_versions_left_in_one_folder_are_told_and_the_later_counts():
    copies = [
        InstalledDistribution("acme", {"acme": "a"}, version=version, folder="/site") for version in ("1.0", "1.1")
    ]

    for order in (copies, copies[::-1]):
        discovery = from_distributions(order)
        assert [entry.version for entry in discovery.entries] == ["1.1"]
        assert "more than once" in discovery.warnings[0]


def test_a_name_twice_in_one_distribution_counts_once():
    distribution = InstalledDistribution("acme", {"acme": "a"})
    distribution._files["entry_points.txt"] += "acme = b\n"

    discovery = from_distributions([distribution])

    assert [(entry.name, entry.value) for entry in discovery.entries] == [("acme", "a")]
    assert "twice" in discovery.warnings[0]


@pytest.mark.parametrize("text", ["[kvferry]\nno equals sign\n", "[kvferry]\n= nothing\n"])
def test_unreadable_metadata_is_a_warning_and_stops_nothing(text):
    broken = InstalledDistribution("broken", {})
    broken._files["entry_points.txt"] = text

    discovery = from_distributions([broken, InstalledDistribution("acme", {"acme": "a"})])

    assert "acme" in [entry.name for entry in discovery.entries]


def test_metadata_without_a_name_is_a_warning():
    broken = InstalledDistribution("broken", {"broken": "b"})
    broken._files["METADATA"] = "Metadata-Version: 2.1\n"

    discovery = from_distributions([broken])

    assert discovery.entries == ()
    assert "cannot be read" in discovery.warnings[0]


def test_every_in_tree_plugin_is_found_like_a_strangers():
    builtin = [entry.name for entry in discover().entries if entry.origin is Origin.BUILTIN]

    assert {"llama", "nixl", "runtime_python", "cache_manager_v1"} <= set(builtin)
