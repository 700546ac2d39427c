import os
import sys

from kvferry_plugins import hookimpl

child = os.fork()
if child:
    os.waitpid(child, 0)
else:
    print("a second command goes on", file=sys.stderr)


@hookimpl
def preferred_transceiver_runtime(architecture):
    return "PYTHON" if architecture == "AcmeForCausalLM" else None
