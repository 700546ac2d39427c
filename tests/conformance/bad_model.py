"""A model plugin that is right, unless it is told to have one fault: ``source(fault)`` is its module's text."""

HEALTHY = """
import os, random, sys, threading
from kvferry_plugins import hookimpl
DEFAULTS = {"kv_cache_config": {"tokens_per_block": 64}}
{at_import}
@hookimpl
def preferred_transceiver_runtime(architecture, pretrained_config):
    {runtime}
    return "PYTHON" if architecture == "BadForCausalLM" else None
@hookimpl
def model_defaults({arguments}):
    {defaults}
    return DEFAULTS if architecture == "BadForCausalLM" else None
{more}
"""

FAULTS = {
    "misspelt hook": {"more": "@hookimpl\ndef prefered_transceiver_runtime(architecture): return 'PYTHON'"},
    "unknown argument": {"arguments": "architecture, checkpoint"},
    "unknown runtime": {"runtime": "if architecture == 'BadForCausalLM': return 'RUST'"},
    "turns disaggregation on": {"at_import": "DEFAULTS = {'cache_transceiver_config': {'backend': 'UCX'}}"},
    "unknown setting": {"at_import": "DEFAULTS = {'kv_cache_config': {'block_tokens': 64}}"},
    "wrong type": {"at_import": "DEFAULTS = {'kv_cache_config': {'tokens_per_block': 'many'}}"},
    "no section": {"at_import": "DEFAULTS = {'kv_cache_config': None}"},
    "asks the environment": {"runtime": "if architecture == 'BadForCausalLM': return os.getenv('BAD', 'CPP')"},
    "not plain": {"at_import": "DEFAULTS = {'kv_cache_config': {'tokens_per_block': object}}"},
    "dice": {"runtime": "if architecture == 'BadForCausalLM': return random.choice(['PYTHON', 'CPP'])"},
    "needs a config": {"runtime": "layers = pretrained_config['architectures']"},
    "changes its arguments": {
        "runtime": "if isinstance(pretrained_config, dict): pretrained_config['dtype'] = 'bfloat16'",
    },
    "subclasses too": {
        "runtime": "architecture = 'BadForCausalLM' if architecture.startswith('Bad') else architecture"
    },
    "no opinion": {"runtime": "return None", "defaults": "return None"},
    "imports torch": {"at_import": "sys.modules['torch'] = sys"},
    "prints": {"at_import": "print('Bad models, version 1')"},
    "prints when asked": {"runtime": "print('asked about', architecture)"},
    "changes the environment": {"at_import": "os.environ['UCX_TLS'] = 'tcp'"},
    "starts a thread": {
        "at_import": "threading.Thread(target=threading.Event().wait, name='bad-watcher', daemon=True).start()"
    },
    "forks": {"at_import": "if os.fork() == 0:\n    os._exit(0)"},
    "changes the folder": {"at_import": "os.chdir('/')"},
    "writes a file": {"at_import": "open(os.path.join(os.path.dirname(__file__), 'bad.log'), 'w').close()"},
    "resolves a name": {"at_import": "import socket\nsocket.getaddrinfo('127.0.0.1', 80)"},
    "raises where others are": {
        "at_import": "if 'explain' in sys.argv: DEFAULTS = {'kv_cache_config': {'dtype': 'float16'}}"
    },
    "dies at import": {"at_import": "if 'import_probe' in sys.orig_argv[2]: os._exit(3)"},
    "dies when asked": {"runtime": "os._exit(4)"},
    "hangs when asked": {"runtime": "threading.Event().wait()"},
    "exits when asked": {"runtime": "sys.exit('no config')"},
    "answers megabytes": {"runtime": "if architecture == 'BadForCausalLM': return 'PYTHON' * 1_000_000"},
    "no such entry point": {},
}
"""Fault → what differs from the healthy one."""


def source(fault: str | None) -> str:
    """Write the plugin's module."""
    parts = {"at_import": "", "runtime": "pass", "arguments": "architecture", "defaults": "pass", "more": ""}
    text = HEALTHY
    for name, part in (parts | FAULTS.get(fault or "", {})).items():
        text = text.replace(f"{{{name}}}", part)
    return text
