"""The other side of ``isolation``: calls one function and writes its answer to the pipe that it is given."""

import json
import os
import pkgutil
import signal
import sys
from typing import Any


def _call(function: str, arguments: str) -> dict[str, Any]:
    try:
        value = pkgutil.resolve_name(function)(*json.loads(arguments))
    except SystemExit as error:
        return {"failure": f"called sys.exit({error.code!r})"}
    except BaseException as error:
        from kvferry.registry.loading import cause_chain

        return {"failure": f"raised {' ← '.join(cause_chain(error))}"}
    return {"value": value}


def _written(answer: dict[str, Any]) -> bytes:
    try:
        return json.dumps(answer).encode()
    except (TypeError, ValueError, RecursionError) as error:
        text = f"answered {answer['value']!r:.120}, which is no JSON ({error})"
        return json.dumps({"failure": text}).encode()


def _main(pipe: str, alarm: str, function: str, arguments: str) -> None:
    signal.alarm(int(alarm))
    os.set_inheritable(int(pipe), False)
    answer = _written(_call(function, arguments)) + b"\n"
    while answer:
        answer = answer[os.write(int(pipe), answer) :]
    # A library that dies while it is torn down has nothing to do with the answer.
    os._exit(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
