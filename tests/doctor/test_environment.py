import re
from pathlib import Path

import pytest

import kvferry
import kvferry_plugins
from kvferry.doctor.deployment import Deployment, Machine, look_at_machine
from kvferry.doctor.environment import INTERNAL, OURS, environment_findings
from kvferry.doctor.findings import Severity

ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO
NIXL = Deployment("NIXL", "default")
NIXL_BY_USER = Deployment("NIXL", "user")
UCX = Deployment("UCX", "user")
MPI = Deployment("MPI", "user")
ON_GPU = Deployment("UCX", "user", device="cuda")
FAR = ("tcp://10.0.0.7:9001",)

TABLE = [
    # environment, deployment, (severity, variable, words) … in this order
    ({}, Deployment(), []),
    ({"PATH": "/bin", "UCX_TLS": "all", "TRTLLM_USE_UCX_KVCACHE": "0"}, NIXL, []),
    # selectors
    (
        {"TRTLLM_USE_UCX_KV_CACHE": "1"},
        NIXL,
        [(WARNING, "TRTLLM_USE_UCX_KV_CACHE", "did you mean TRTLLM_USE_UCX_KVCACHE?")],
    ),
    (
        {"TRTLLM_USE_UCX_KVCACHE": "yes please"},
        NIXL,
        [(WARNING, "TRTLLM_USE_UCX_KVCACHE", "is 'yes please', and selects nothing: only the value 1 does")],
    ),
    (
        {"TRTLLM_USE_MPI_KVCACHE": "1", "TRTLLM_USE_UCX_KVCACHE": "1"},
        Deployment("UCX", "environment"),
        [(WARNING, "TRTLLM_USE_UCX_KVCACHE", "and so is TRTLLM_USE_MPI_KVCACHE; the first in a fixed order")],
    ),
    (
        {"TRTLLM_USE_UCX_KVCACHE": "1"},
        NIXL_BY_USER,
        [(WARNING, "TRTLLM_USE_UCX_KVCACHE", "the configuration names NIXL")],
    ),
    ({"TRTLLM_USE_NIXL_KVCACHE": "1"}, NIXL_BY_USER, []),
    # names
    (
        {"KVFERRY_DISABLE_PLUGIN": "a"},
        NIXL,
        [(WARNING, "KVFERRY_DISABLE_PLUGIN", "did you mean KVFERRY_DISABLE_PLUGINS?")],
    ),
    ({"KVFERRY_FOO": "a"}, NIXL, [(WARNING, "KVFERRY_FOO", "there are KVFERRY_CURVE_KEY_FILE")]),
    ({"KVFERRY_PLUGINS": "a", "KVFERRY_CURVE_KEY_FILE": "/k"}, NIXL, []),
    ({"MC_MIN_PRC_PORT": "1"}, NIXL, [(WARNING, "MC_MIN_PRC_PORT", "did you mean MC_MIN_RPC_PORT?")]),
    ({"NIXL_PLUGINS_DIR": "/x"}, NIXL, [(WARNING, "NIXL_PLUGINS_DIR", "did you mean NIXL_PLUGIN_DIR?")]),
    ({"MC_SOMETHING_ELSE": "1", "NIXL_NUM_THREADS": "2"}, NIXL, []),
    ({"TRTLLM_NIXL_KVCACHE_BACKEND": "LIBFABRIC"}, NIXL, [(INFO, "TRTLLM_NIXL_KVCACHE_BACKEND", "is not read")]),
    # values
    (
        {"KVFERRY_DISABLE_PLUGIN_AUTOLOAD": "true"},
        NIXL,
        [(WARNING, "KVFERRY_DISABLE_PLUGIN_AUTOLOAD", "is 'true', and does nothing")],
    ),
    ({"KVFERRY_DISABLE_PLUGIN_AUTOLOAD": "1"}, NIXL, []),
    ({"KVFERRY_PLUGINS": " "}, NIXL, [(INFO, "KVFERRY_PLUGINS", "no external plugin is in")]),
    ({"XDG_STATE_HOME": "state"}, NIXL, [(WARNING, "XDG_STATE_HOME", "write an absolute path")]),
    # devices
    ({}, ON_GPU, [(ERROR, "device", "no NVIDIA GPU is here")]),
    ({"CUDA_VISIBLE_DEVICES": ""}, NIXL, []),
    # UCX_TLS
    ({"UCX_TLS": ""}, UCX, [(ERROR, "UCX_TLS", "empty: UCX does not start")]),
    ({"UCX_TLS": "posix,self"}, NIXL, [(ERROR, "UCX_TLS", "without tcp: NIXL's agent does not start")]),
    ({"UCX_TLS": "posix,self"}, Deployment(), [(WARNING, "UCX_TLS", "NIXL's agent does not start")]),
    ({"UCX_TLS": "posix,self"}, UCX, []),
    ({"UCX_TLS": "posix,self"}, MPI, []),
    ({"UCX_TLS": "^tcp"}, NIXL, [(ERROR, "UCX_TLS", "take tcp out of the exclusion")]),
    ({"UCX_TLS": "^sm"}, NIXL, []),
    ({"UCX_TLS": "self"}, UCX, [(ERROR, "UCX_TLS", "UCX reaches no other process")]),
    ({"UCX_TLS": "rc,sm,self"}, NIXL, [(ERROR, "UCX_TLS", "(and no InfiniBand is here)")]),
    (
        {"UCX_TLS": "tcp,slef"},
        NIXL,
        [(WARNING, "UCX_TLS", "names 'slef', which is no transport of UCX; did you mean 'self'")],
    ),
    ({"UCX_TLS": r"\tcp:aux,self"}, NIXL, []),
    (
        {"UCX_TLS": "sm,self"},
        Deployment("UCX", "user", FAR),
        [(ERROR, "UCX_TLS", "UCX does not reach tcp://10.0.0.7:9001")],
    ),
    # UCX_NET_DEVICES
    ({"UCX_NET_DEVICES": "eth0"}, NIXL, []),
    ({"UCX_NET_DEVICES": "all"}, NIXL, []),
    ({"UCX_NET_DEVICES": "eth9"}, NIXL, [(ERROR, "UCX_NET_DEVICES", "names eth9, which is not here: NIXL's agent")]),
    ({"UCX_NET_DEVICES": "eth0,mlx5_0:1"}, NIXL, [(WARNING, "UCX_NET_DEVICES", "the devices here: eth0, lo")]),
    ({"UCX_NET_DEVICES": ""}, NIXL, [(ERROR, "UCX_NET_DEVICES", "empty: UCX has no network")]),
    ({"UCX_NET_DEVICES": "lo"}, NIXL, []),
    (
        {"UCX_NET_DEVICES": "lo"},
        Deployment("NIXL", "user", FAR),
        [(ERROR, "UCX_NET_DEVICES", "is lo, and peers are beyond it: tcp://10.0.0.7:9001")],
    ),
    ({"UCX_LOG_LEVEL": "DEBUG"}, NIXL, [(INFO, "UCX_LOG_LEVEL", "transfers are slow")]),
    # NIXL_PLUGIN_DIR
    ({"NIXL_PLUGIN_DIR": "/nowhere"}, NIXL, [(ERROR, "NIXL_PLUGIN_DIR", "which is no folder")]),
    ({"NIXL_PLUGIN_DIR": "/nowhere"}, UCX, []),
]


@pytest.mark.parametrize(("environ", "deployment", "expected"), TABLE, ids=[str(row[0]) for row in TABLE])
def test_lint(environ, deployment, expected, machine):
    findings = environment_findings(environ, deployment, machine)

    assert [(each.severity, each.subject) for each in findings] == [row[:2] for row in expected]
    assert all(words in str(each) for each, (_, _, words) in zip(findings, expected, strict=True))


def test_infiniband_is_network_enough(machine):
    machine = Machine(frozenset({"ib0"}), frozenset({"mlx5_0"}))

    assert environment_findings({"UCX_TLS": "rc,sm,self", "UCX_NET_DEVICES": "mlx5_0:1"}, NIXL, machine) == []


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, None),
        ({"UCX_TLS": "tcp,sm,cuda", "CUDA_VISIBLE_DEVICES": "0"}, None),
        ({"UCX_TLS": "tcp,sm"}, "without CUDA, and the KV cache is in device memory"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "hides every GPU"),
    ],
)
def test_on_a_gpu(environ, words):
    findings = environment_findings(environ, ON_GPU, Machine(has_gpu=True))

    assert [words in finding.what for finding in findings] == ([True] if words else [])


def test_auto_means_the_gpu_where_there_is_one(machine):
    machine = Machine(machine.network_devices, has_gpu=True)

    (finding,) = environment_findings({"UCX_TLS": "tcp,sm"}, UCX, machine)

    assert "device memory" in finding.what


def test_a_plugin_folder_of_nixls_needs_its_ucx_plugin(tmp_path):
    environ = {"NIXL_PLUGIN_DIR": str(tmp_path)}
    (tmp_path / "libplugin_POSIX.so").touch()
    (finding,) = environment_findings(environ, NIXL, look_at_machine(environ))
    assert "holds no libplugin_UCX.so" in finding.what

    (tmp_path / "libplugin_UCX.so").touch()
    assert environment_findings(environ, NIXL, look_at_machine(environ)) == []


def test_what_operators_may_set_is_what_the_sources_read():
    folders = [Path(package.__path__[0]) for package in (kvferry, kvferry_plugins)]
    sources = (file for folder in folders for file in folder.rglob("*.py") if file.parent.name != "doctor")
    read = {name for file in sources for name in re.findall(r"\bKVFERRY_[A-Z_]+\b", file.read_text())}

    assert read - INTERNAL == OURS
