import pytest

from kvferry.registry.survey import is_importable


@pytest.fixture
def breaking_parents(tmp_path, monkeypatch):
    bodies = {"kvferry_raises": "1 / 0", "kvferry_exits": "raise SystemExit(1)", "kvferry_lacks": "import kvferry_gone"}
    for name, body in bodies.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("module", ["json", "json.decoder", "kvferry_plugins.spec"])
def test_a_module_that_exists_is_importable(module):
    assert is_importable(module)


@pytest.mark.parametrize("module", ["kvferry_gone", "kvferry_gone.part", "json.gone", "os.gone", "", "a:b", ".json"])
def test_a_module_that_does_not_exist_is_not(module):
    assert not is_importable(module)


@pytest.mark.parametrize("parent", ["kvferry_raises", "kvferry_exits", "kvferry_lacks"])
def test_a_parent_that_breaks_is_for_the_import_to_report(breaking_parents, parent):
    assert is_importable(f"{parent}.part")
