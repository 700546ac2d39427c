import ctypes
import mmap
import os
import subprocess
import sys
import time

from kvferry_plugins import hookimpl
from kvferry_plugins.types import RuntimeSupport, TransferBackend

FINE = {"usable": True, "library": "libfine 1.2", "transports": ["wire"], "memory": ["host"], "problems": []}
MAPPED = []


def fine():
    return FINE


def half():
    return {**FINE, "problems": [{"what": "the second wire is loose", "fix": "plug it in"}]}


def unusable():
    problems = [{"what": "no wire", "fix": "buy"}, {"what": "the shop is closed", "fix": "wait"}]
    return {"usable": False, "library": "libfine 1.2", "transports": [], "problems": problems}


def two_copies():
    for folder in os.environ["ODD_PROBES_UCX_FOLDERS"].split(":"):
        with open(f"{folder}/libucp.so.0", "rb") as file:
            MAPPED.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    return FINE


def crash():
    ctypes.string_at(0)


def hang():
    child = subprocess.Popen(["sleep", "600"])
    with open(os.environ["ODD_PROBES_PID_FILE"], "w") as file:
        file.write(str(child.pid))
    time.sleep(600)


def chatter():
    os.write(1, b"\x1b[31mnoise " * 500_000)
    os.write(2, b"noise " * 500_000)
    print("{}")
    return FINE


def leave():
    os.write(2, b"\x1b[2Jgoodbye\n")
    os._exit(5)


def sysexit():
    sys.exit("enough")


def throw():
    raise RuntimeError("no such device") from OSError("ENODEV")


def misshapen():
    return ["usable"]


def no_list():
    return {**FINE, "transports": {object()}}


def no_json():
    return {**FINE, "transports": [object()]}


PROBES = (fine, half, unusable, two_copies, crash, hang, chatter, leave, sysexit, throw, misshapen, no_list, no_json)


@hookimpl
def transfer_backends():
    return [
        TransferBackend(each.__name__.upper(), {"PYTHON": RuntimeSupport()}, probe=f"odd_probes_plugin:{each.__name__}")
        for each in PROBES
    ]
