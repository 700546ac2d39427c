"""Our managers, and the one that the kit gives to transceivers, run the suite that we hand to others."""

from typing import ClassVar

from kvferry.cache import plugin_v1, plugin_v2
from kvferry_plugins.testing.conformance import KVCacheManagerConformance
from kvferry_plugins.testing.managers import FakeManager
from kvferry_plugins.types import ManagerKind


class TestV1(KVCacheManagerConformance):
    declared = plugin_v1.kv_cache_managers()[0]

    def make_manager(self, spec):
        return plugin_v1.create_kv_cache_manager(spec)


class TestV2(KVCacheManagerConformance):
    declared = plugin_v2.kv_cache_managers()[0]

    def make_manager(self, spec):
        return plugin_v2.create_kv_cache_manager(spec)


class TestFake(KVCacheManagerConformance):
    declared: ClassVar = ManagerKind("FAKE", "FakeManager")

    def make_manager(self, spec):
        return FakeManager(spec)
