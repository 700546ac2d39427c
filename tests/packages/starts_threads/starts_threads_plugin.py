import subprocess
import threading
import time

from kvferry_plugins import hookimpl

threading.Thread(target=time.sleep, args=(600,), name="acme-poller").start()
process = subprocess.Popen(
    ["sleep", "60"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
)


@hookimpl
def preferred_transceiver_runtime(architecture):
    return "PYTHON" if architecture == "AcmeForCausalLM" else None
