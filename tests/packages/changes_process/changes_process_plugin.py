import io
import locale
import logging
import os
import signal
import sys
import warnings

from kvferry_plugins import hookimpl

os.environ["ACME_HOME"] = "/acme"
os.environ.pop("KVFERRY_TEST_KEPT", None)
os.chdir("/")
sys.path.append("/acme/lib")
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
locale.setlocale(locale.LC_ALL, "C" if locale.setlocale(locale.LC_ALL) != "C" else "C.UTF-8")
warnings.simplefilter("error")
sys.excepthook = print
sys.stdout = io.StringIO()
logging.basicConfig()


@hookimpl
def preferred_transceiver_runtime(architecture):
    return "PYTHON" if architecture == "AcmeForCausalLM" else None
