import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvferry.cli.main import VERBS, main
from kvferry.config.settings import settings
from kvferry.doctor.environment import OURS
from kvferry.reference.configuration import DECIDED_BY
from kvferry.reference.documents import DOCUMENTS
from kvferry.reference.errors import contract_errors
from kvferry.reference.hooks import hooks
from kvferry.resolution.selectors import SELECTORS

ROOT = Path(__file__).parents[2]
ADVICE = "it is generated, and the code has changed: run `make generated` (or `.venv/bin/python -m kvferry.reference`)"
HEAVY = {"torch", "nixl", "transformers", "mooncake", "mpi4py", "ucxx"}


def committed(path):
    return (ROOT / path).read_text()


def first_difference(old, new):
    pairs = zip(old.splitlines(), new.splitlines(), strict=False)
    return next((f"- {a}\n+ {b}" for a, b in pairs if a != b), "one is longer than the other")


@pytest.mark.parametrize("path", DOCUMENTS)
def test_what_is_committed_is_what_the_code_says(path):
    old, new = committed(path), DOCUMENTS[path]()
    if old != new:
        pytest.fail(f"{path}: {ADVICE}\n{first_difference(old, new)}", pytrace=False)


def run(*arguments, cwd=ROOT):
    command = [sys.executable, "-X", "importtime", "-m", "kvferry.reference", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_the_generator_writes_what_differs_needs_nothing_heavy_and_is_idempotent(tmp_path):
    (tmp_path / "core/kvferry/reference").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/telemetry.md").write_text("outdated\n")
    looked = run("--check", "--root", str(tmp_path))
    wrote = run(cwd=tmp_path)
    again = run("--check", "--root", str(tmp_path))

    assert looked.returncode == 1
    assert "docs/telemetry.md: differs; run `make generated`" in looked.stdout
    assert wrote.returncode == again.returncode == 0
    assert wrote.stdout.splitlines() == [f"{path}: written" for path in DOCUMENTS]
    assert {path: (tmp_path / path).read_text() for path in DOCUMENTS} == {
        path: make() for path, make in DOCUMENTS.items()
    }
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in wrote.stderr.splitlines()}
    assert not HEAVY.intersection(imported)


def test_outside_of_a_checkout_nothing_is_written(tmp_path):
    done = run(cwd=tmp_path)

    assert done.returncode == 2
    assert "no checkout of kvferry" in done.stderr
    assert not list(tmp_path.iterdir())


def test_every_setting_has_a_meaning():
    assert [setting.key for setting in settings() if not setting.meaning] == []


def test_every_setting_is_in_the_configurations_page():
    page = DOCUMENTS["docs/reference/configuration.md"]()
    assert [setting.key for setting in settings() if f"\n| `{setting.key}` |" not in page] == []
    assert DECIDED_BY.keys() <= {setting.key for setting in settings()}


def test_every_variable_that_operators_may_set_is_there():
    page = DOCUMENTS["docs/reference/configuration.md"]()
    selectors = [variable for variable, _ in SELECTORS]
    assert [name for name in [*OURS, *selectors] if f"\n| `{name}` |" not in page] == []


def test_every_error_says_what_to_do():
    page = DOCUMENTS["docs/reference/errors.md"]()
    lacking = [
        error.__name__
        for error in contract_errors()
        if error.__name__ != "KvferryError"
        and "**What to do:**" not in page.partition(f"\n## {error.__name__}\n")[2].partition("\n## ")[0]
    ]
    if lacking:
        advice = "begin a paragraph of its docstring in kvferry_plugins/errors.py with `What to do: `"
        pytest.fail(f"{', '.join(lacking)}: {advice}", pytrace=False)


def test_every_verb_and_hook_is_there():
    command_line, listed = (DOCUMENTS[f"docs/reference/{page}.md"]() for page in ("command-line", "hooks"))
    assert all(f"\n## kvferry {verb}\n" in command_line for verb in VERBS)
    assert all(f"\n### {hook.__name__}\n" in listed for hook in hooks())
    assert len(list(hooks())) >= 10


def test_every_selector_is_asked_for_the_table_of_decisions():
    page = DOCUMENTS["docs/reference/decisions.md"]()
    assert all(f"| `DEFAULT` | `{variable}=1` | `{backend}` | environment" in page for variable, backend in SELECTORS)


@pytest.mark.parametrize(
    ("arguments", "path"),
    [((), "docs/reference/engine.schema.json"), (("--telemetry",), "core/kvferry/telemetry/manifest.json")],
    ids=["schema", "telemetry"],
)
def test_the_verb_prints_what_is_committed(arguments, path):
    printed = CliRunner().invoke(main, ["schema", *arguments])
    under_json = CliRunner().invoke(main, ["schema", "--json", *arguments])

    assert printed.exit_code == under_json.exit_code == 0
    assert printed.stdout == committed(path)
    answer = json.loads(under_json.stdout)
    assert answer == {"schema": 1, "ok": True, "document": json.loads(committed(path)), "warnings": [], "errors": []}


def test_the_verb_imports_neither_torch_nor_a_transport_nor_a_plugin():
    code = "import sys; from kvferry.cli.main import main; main(['schema'], standalone_mode=False); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert not modules & {*HEAVY, "zmq", "numpy", "kvferry_backends", "kvferry_models_plugins"}
