import os

from kvferry_plugins import hookimpl

for _ in range(50_000):
    print("a line to standard output " * 2)
for _ in range(50):
    os.write(1, b"not by way of Python " * 5_000)


@hookimpl
def preferred_transceiver_runtime(architecture):
    return "PYTHON" if architecture == "AcmeForCausalLM" else None
