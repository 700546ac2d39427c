"""What deciding costs: ``plugins list``, ``explain`` and one resolution, by distributions and by active plugins."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

MODEL_HOOKS = 2
"""What one resolution asks every model plugin: its defaults and its preference."""

_METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"

_MODULE = """
from kvferry_plugins import hookimpl


@hookimpl
def preferred_transceiver_runtime(architecture):
    return "PYTHON" if architecture == "Scale{number}ForCausalLM" else None


@hookimpl
def model_defaults(architecture, pretrained_config):
    return {{"max_batch_size": 4}} if architecture == "Scale{number}ForCausalLM" else None
"""

_VERB = """
import sys
from kvferry.cli.main import main
main({arguments!r}, standalone_mode=False)
print([name for name in sys.modules if name.startswith("kvferry_scale_")][:3], file=sys.stderr)
"""

_IN_PROCESS = """
import json
from kvferry.bench.resolving import time_here
print(json.dumps(time_here({rounds})))
"""


@dataclass(frozen=True, slots=True)
class Decided:
    """What one installation costs."""

    distributions: int
    """That have entry points of others, and none of ours."""
    plugins: int
    """Active model plugins, each of a distribution of its own, besides the built-in ones."""
    list_seconds: float
    """Wall time of ``plugins list``, median."""
    explain_seconds: float
    list_imports: tuple[str, ...]
    """Plugin modules that ``plugins list`` imported: none."""
    load_seconds: float
    """Discovery, import and registration, in one process."""
    resolve_seconds: float
    """One resolution with all of them active, median."""
    answered: str
    """The runtime that the last plugin's opinion led to."""

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Growth:
    """What one more costs, between the smallest and the largest installation."""

    list_microseconds_a_distribution: float
    explain_microseconds_a_distribution: float
    list_microseconds_a_plugin: float
    explain_microseconds_a_plugin: float
    resolve_microseconds_a_plugin_and_hook: float


def measure(
    distributions: tuple[int, ...], plugins: tuple[int, ...], rounds: int, say: Callable[[str], None]
) -> tuple[list[Decided], Growth]:
    """Measure every installation, in turn in each round, so that a busy moment falls on all."""
    cases = [(count, 0) for count in distributions] + [(0, count) for count in plugins]
    with TemporaryDirectory(prefix="kvferry-resolve-") as folder:
        sites = [_site(Path(folder) / f"{each[0]}-{each[1]}", *each) for each in cases]
        walls: list[dict[str, list[float]]] = [{"list": [], "explain": []} for _ in cases]
        for number in range(rounds + 1):
            say(f"round {number} of {rounds}" if number else "warming up")
            for site, seconds in zip(sites, walls, strict=True):
                for verb, arguments in (("list", ["plugins", "list"]), ("explain", ["explain"])):
                    took, _ = _timed(site, _VERB.format(arguments=arguments))
                    if number:
                        seconds[verb].append(took)
        say("one resolution")
        found = [_decided(*each, site, seconds) for each, site, seconds in zip(cases, sites, walls, strict=True)]
    return found, _growth(found)


def time_here(rounds: int) -> dict[str, object]:
    """Load what is installed, resolve for the last plugin's architecture, and time both."""
    from kvferry.config import parse_engine_args
    from kvferry.dispatcher import resolve
    from kvferry.registry.guard import Guard
    from kvferry.registry.load import load_registry
    from kvferry.registry.toggles import Toggles

    begun = time.perf_counter()
    registry = load_registry(toggles=Toggles(), guard=Guard())  # as a command does
    load_seconds = time.perf_counter() - begun
    scale = [name for name in registry.plugin_set() if name.startswith("kvferry_scale_")]
    architecture = f"Scale{max(scale)[-6:]}ForCausalLM" if scale else "UnknownForCausalLM"
    args = parse_engine_args({"cache_transceiver_config": {"backend": "NIXL"}})
    seconds = []
    for _ in range(rounds * 10 + 3):
        begun = time.perf_counter()
        plan = resolve(args, model=architecture, registry=registry, environ={})
        seconds.append(time.perf_counter() - begun)
    return {"load": load_seconds, "resolve": statistics.median(seconds[3:]), "answered": str(plan.runtime)}


def _decided(distributions: int, plugins: int, site: Path, seconds: dict[str, list[float]]) -> Decided:
    _, done = _timed(site, _VERB.format(arguments=["plugins", "list", "--json"]))
    imported = done.stderr.strip().splitlines()[-1]
    _, done = _timed(site, _IN_PROCESS.format(rounds=5))
    inside = json.loads(done.stdout)
    return Decided(
        distributions,
        plugins,
        statistics.median(seconds["list"]),
        statistics.median(seconds["explain"]),
        tuple(json.loads(imported.replace("'", '"'))),
        inside["load"],
        inside["resolve"],
        inside["answered"],
    )


def _growth(found: list[Decided]) -> Growth:
    by_distributions = sorted((each for each in found if not each.plugins), key=lambda each: each.distributions)
    by_plugins = sorted((each for each in found if not each.distributions), key=lambda each: each.plugins)

    def slope(cases: list[Decided], count: str, seconds: str) -> float:
        steps = getattr(cases[-1], count) - getattr(cases[0], count) if cases else 0
        return (getattr(cases[-1], seconds) - getattr(cases[0], seconds)) / steps * 1e6 if steps else 0.0

    return Growth(
        slope(by_distributions, "distributions", "list_seconds"),
        slope(by_distributions, "distributions", "explain_seconds"),
        slope(by_plugins, "plugins", "list_seconds"),
        slope(by_plugins, "plugins", "explain_seconds"),
        slope(by_plugins, "plugins", "resolve_seconds") / MODEL_HOOKS,
    )


# --- what is installed ---------------------------------------------------------------------------------------------


def _site(folder: Path, distributions: int, plugins: int) -> Path:
    """Make a folder of installed distributions, as pip would have."""
    for number in range(distributions):
        name = f"scale_other_{number:06d}"
        _install(folder, name, f"[console_scripts]\n{name} = {name}:main\n")
    for number in range(plugins):
        name = f"kvferry_scale_{number:06d}"
        _install(folder, name, f"[kvferry]\n{name} = {name}\n")
        (folder / f"{name}.py").write_text(_MODULE.format(number=f"{number:06d}"))
    folder.mkdir(exist_ok=True)
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(folder)], check=True)
    return folder


def _install(folder: Path, name: str, entry_points: str) -> None:
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(_METADATA.format(name=name.replace("_", "-")))
    (info / "entry_points.txt").write_text(entry_points)


def _timed(site: Path, code: str) -> "tuple[float, subprocess.CompletedProcess[str]]":
    home = {name: str(site.parent / "home") for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")}
    environ = {**os.environ, **home, "PYTHONPATH": str(site)}
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environ, cwd=site
    )
    return time.monotonic() - begun, done
