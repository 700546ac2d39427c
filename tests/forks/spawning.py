"""A process that announces its plugins and spawns one that builds; prints what the child has to say as JSON.

Arguments: plugins of the child that the parent has not.
"""

import json
import multiprocessing
import os
import sys

from forking import GEOMETRY, IDENTITY, ScriptedBackend

from kvferry.dispatcher import build, resolve
from kvferry.registry.inheritance import announce_plugin_set
from kvferry.testing import isolated_registry
from kvferry_plugins.testing import FakeModelPlugin
from kvferry_plugins.types import Role

WRITTEN = {
    "cache_transceiver_config": {"backend": "SCRIPTED", "transceiver_runtime": "PYTHON"},
    "kv_cache_config": {"max_tokens": 256},
    "device": "cpu",
}


def work(names, answers):
    registry = isolated_registry(ScriptedBackend(), *[FakeModelPlugin(name, name=name) for name in names])
    plan = resolve(WRITTEN, model=None, registry=registry, environ={})
    parts = build(plan, registry=registry, role=Role.CONTEXT, geometry=GEOMETRY, model_identity=IDENTITY)
    parts.shutdown()
    answers.put(parts.parent.dump() if parts.parent is not None else None)


def main(names):
    announce_plugin_set(isolated_registry(ScriptedBackend()), os.environ)
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    process = context.Process(target=work, args=(names, answers))
    process.start()
    said = answers.get()
    process.join()
    print(json.dumps({"pid": os.getpid(), "said": said, "status": process.exitcode}))


if __name__ == "__main__":
    main(sys.argv[1:])
