"""``kvferry bench startup``: what the light verbs cost, against importing what they cannot do without."""

import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

BASELINE = "import pydantic, pluggy"
HEAVY = ("torch", "nixl", "transformers", "mooncake", "mpi4py", "ucxx", "kvferry_native", "matplotlib")
"""Modules that no light verb may import."""

_VERB = "import sys; from kvferry.cli.main import main; main({arguments!r}, standalone_mode=False)"
_LOADED = f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"


@dataclass(frozen=True, slots=True)
class StartUp:
    """One verb's wall time, and what heavy modules it imported."""

    verb: str
    median_seconds: float
    ratio: float
    """÷ the median of ``python -c "import pydantic, pluggy"`` in the same run."""
    heavy: tuple[str, ...]


def measure(verbs: dict[str, list[str]], rounds: int) -> tuple[float, list[StartUp]]:
    """Run the baseline and each verb in turn, ``rounds`` times.

    Returns:
        The baseline's median seconds, and each verb's figures.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ("", *verbs)}
    for number in range(rounds + 1):
        for name, arguments in (("", None), *verbs.items()):
            took = _time([sys.executable, "-c", BASELINE if arguments is None else _VERB.format(arguments=arguments)])
            if number:
                seconds[name].append(took)
    baseline = statistics.median(seconds[""])
    found = [
        StartUp(name, median := statistics.median(seconds[name]), median / baseline, _heavy_modules(arguments))
        for name, arguments in verbs.items()
    ]
    return baseline, found


def _time(command: list[str]) -> float:
    begun = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    return time.monotonic() - begun


def _heavy_modules(arguments: list[str]) -> tuple[str, ...]:
    code = f"import atexit, sys\natexit.register(lambda: {_LOADED})\n{_VERB.format(arguments=arguments)}"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return tuple(name for name in HEAVY if f"'{name}'" in done.stderr.splitlines()[-1])
