import os
import time

from kvferry_plugins import hookimpl

ODD = os.environ.get("ODD_HOOK", "")
MEGABYTES = "x" * 5_000_000


@hookimpl
def preferred_transceiver_runtime(architecture):
    if ODD == "prints":
        print("thinking about it " * 100_000)
        os.write(1, b"and from below " * 10_000)
        return "PYTHON"
    if ODD == "blocks":
        time.sleep(600)
    return MEGABYTES if ODD == "runtime" else None


@hookimpl
def model_defaults(architecture):
    answers = {
        "defaults": MEGABYTES,
        "keys": {f"key {number} {MEGABYTES[:5000]}": number for number in range(300)},
        "value": {"kv_cache_config": {"dtype": MEGABYTES}},
    }
    return answers.get(ODD)


@hookimpl
def transfer_backends():
    while ODD == "endless":
        yield MEGABYTES
    if ODD == "raises":
        raise RuntimeError(MEGABYTES)
