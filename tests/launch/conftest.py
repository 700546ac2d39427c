import json
import sys

import pytest

LAUNCHER = """
import json, signal, subprocess, sys
children = [subprocess.Popen(command) for command in json.loads(sys.argv[1])]
signal.signal(signal.SIGTERM, lambda *_: [child.kill() for child in children])
print("all started", flush=True)
sys.exit(max(abs(child.wait()) for child in children))
"""


@pytest.fixture
def launcher():
    """Starts processes side by side from one, and waits, as ``mpiexec`` does."""
    return lambda commands: [sys.executable, "-c", LAUNCHER, json.dumps([list(command) for command in commands])]
