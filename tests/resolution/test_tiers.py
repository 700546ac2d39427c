import pytest

from kvferry.testing import isolated_registry
from kvferry_plugins.errors import ConfigError
from kvferry_plugins.testing import FakeModelPlugin

HOST = {"host_cache_size": 1 << 20}
BOTH = {**HOST, "disk_cache_size": 1 << 20, "disk_cache_path": "/fast"}


def cache(**settings):
    return {"kv_cache_config": settings}


def wish(**settings):
    return FakeModelPlugin("AcmeForCausalLM", defaults={"kv_cache_config": settings})


def test_tiers_under_v2_are_nothing_to_speak_of(planned):
    assert planned(cache(use_kv_cache_manager_v2=True, **BOTH)).warnings == ()
    assert planned(cache(**BOTH), wish(use_kv_cache_manager_v2=True)).warnings == ()


@pytest.mark.parametrize("plugins", [(), (wish(use_kv_cache_manager_v2=False),)], ids=["nobody", "model"])
def test_tiers_under_a_v1_that_nobody_wrote_are_a_warning_that_says_what_to_set(planned, plugins):
    (warning,) = planned(cache(**BOTH), *plugins).warnings
    assert "host_cache_size and kv_cache_config.disk_cache_size are of no use: manager V1" in warning
    assert "use_kv_cache_manager_v2 to true" in warning


def test_tiers_and_v1_that_the_user_wrote_are_an_error(planned):
    with pytest.raises(ConfigError, match="V1 has none") as raised:
        planned(cache(use_kv_cache_manager_v2=False, **HOST))
    assert raised.value.setting == "kv_cache_config.host_cache_size"


def test_tiers_that_a_model_wished_do_not_forbid_the_user_v1(planned):
    (warning,) = planned(cache(use_kv_cache_manager_v2=False), wish(**HOST)).warnings
    assert "host_cache_size is of no use" in warning


def test_sizes_of_nothing_need_no_tiers(planned):
    assert planned(cache(use_kv_cache_manager_v2=False, host_cache_size=0, disk_cache_size=0)).warnings == ()


def test_another_manager_says_itself_whether_it_has_tiers(planned, declare, manager):
    config = cache(use_kv_cache_manager_v2=False, **HOST) | {"plugins": {"prefer": {"V1": "acme"}}}
    tiered, plain = (declare("acme", managers=[manager("V1", tiers=tiers)]) for tiers in (True, False))
    assert planned(config, registry=isolated_registry(tiered)).warnings == ()
    with pytest.raises(ConfigError, match="host_cache_size"):
        planned(config, registry=isolated_registry(plain))
