"""Loads one plugin in a process of its own, so that whatever it does harms nothing here."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvferry.registry.records import PluginRecord, State

TIMEOUT_SECONDS = 60.0


def inspect_plugin(record: PluginRecord, *, timeout: float = TIMEOUT_SECONDS) -> PluginRecord:
    """Import and register one plugin in a subprocess and return its record as it came out."""
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder:
        answer = Path(folder) / "record.json"
        command = [sys.executable, "-m", __name__, json.dumps(_plain(record)), str(answer)]
        try:
            done = subprocess.run(
                command, timeout=timeout, env=_environment(), stdin=subprocess.DEVNULL, capture_output=True, check=False
            )
        except subprocess.TimeoutExpired:
            return _failed(record, f"the import of {record.entry_point} did not end within {timeout:g} s")
        if not answer.exists():
            return _failed(record, f"the import of {record.entry_point} {_ending(done)}")
        return _from_plain(record, json.loads(answer.read_text(encoding="utf-8")))


def _environment() -> dict[str, str]:
    # Modules named by -p are found from the same places as here.
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def _ending(done: "subprocess.CompletedProcess[bytes]") -> str:
    how = f"was killed by signal {-done.returncode}" if done.returncode < 0 else f"ended Python with {done.returncode}"
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    return f"{how}: {last[0]}" if last else how


def _failed(record: PluginRecord, reason: str) -> PluginRecord:
    return replace(record, state=State.FAILED, stage="import", reason=reason)


_RESULT = ("state", "reason", "stage", "causes", "import_seconds", "hooks")


def _plain(record: PluginRecord) -> dict[str, Any]:
    return asdict(record)


def _from_plain(record: PluginRecord, plain: dict[str, Any]) -> PluginRecord:
    result = {key: plain[key] for key in _RESULT}
    result |= {"state": State(plain["state"]), "causes": tuple(plain["causes"]), "hooks": tuple(plain["hooks"])}
    return replace(record, **result)


def _main(record_json: str, answer: str) -> None:
    from kvferry.registry.answers import Rank
    from kvferry.registry.load import register_all
    from kvferry.registry.records import Origin
    from kvferry.registry.selection import Selection

    plain = json.loads(record_json)
    fixed = {"state": State.DISCOVERED, "origin": Origin(plain["origin"]), "rank": Rank(plain["rank"])}
    record = PluginRecord(**{**plain, **fixed, "causes": (), "hooks": ()})
    loaded = register_all(Selection((record,)), {}).records()[0]
    Path(answer).write_text(json.dumps(_plain(loaded)), encoding="utf-8")
    sys.stdout.flush()
    # A library that dies while it is torn down has nothing to do with the answer.
    os._exit(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
