"""Tries UCX as its own wheel has it: a context and a worker, made through a foreign-function call."""

import ctypes
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kvferry_backends.probing import native_problems, not_installed, unusable
from kvferry_backends.ucx_log import listen_to_ucx
from kvferry_plugins.types import ProbeProblem, ProbeReport

INSTALL: Final = "pip install libucx-cu12"
DEVICES: Final = "UCX_NET_DEVICES"

_RMA, _AM = 1 << 1, 1 << 6
_FEATURES_FIELD: Final = 1
_MEMORY_FIELD: Final = 1 << 2
_WORDS: Final = 128
"""Of a parameter structure: more than any version has. UCX reads only the fields that the mask names."""
_RESOURCE: Final = re.compile(r"resource \d+ .*-- (?P<transport>\w+)/")
_MEMORY: Final = ("host", "cuda", "cuda-managed", "rocm", "rocm-managed")
"""By their bit in UCX's mask."""


def probe() -> ProbeReport:
    """Start UCX and report what it can use; called in a process of its own."""
    missing = not_installed(("libucx",), INSTALL)
    if missing is not None:
        return missing
    complaints = listen_to_ucx()
    try:
        library = ctypes.CDLL(str(_library_file()))
    except OSError as error:
        return unusable(f"libucp cannot be loaded: {error}", f"install it again: {INSTALL}")
    version = _version(library)
    context, problem = _make_context(library)
    if problem is not None:
        return ProbeReport(usable=False, library=version, transports=[], problems=[problem, *complaints()])
    transports = sorted(set(_transports(library, context)))
    worker = _make_worker(library)
    reasons = [*([worker] if worker else []), *_unreachable(transports), *native_problems("ucx")]
    return ProbeReport(
        usable=not reasons,
        library=version,
        transports=transports,
        memory=list(_memory(library, context)),
        problems=[*reasons, *complaints()],
    )


def _library_file() -> Path:
    spec = find_spec("libucx")
    folders = spec.submodule_search_locations if spec else None
    return Path(folders[0] if folders else "", "lib", "libucp.so.0")


def _version(library: ctypes.CDLL) -> str:
    library.ucp_get_version_string.restype = ctypes.c_char_p
    return f"ucx {library.ucp_get_version_string().decode()}"


def _make_context(library: ctypes.CDLL, *, loopback: bool = False) -> tuple[ctypes.c_void_p, ProbeProblem | None]:
    major, minor, release = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    library.ucp_get_version(*map(ctypes.byref, (major, minor, release)))
    parameters = (ctypes.c_uint64 * _WORDS)(_FEATURES_FIELD, _RMA | _AM)
    config, context = ctypes.c_void_p(), ctypes.c_void_p()
    status = library.ucp_config_read(None, None, ctypes.byref(config))
    if loopback and DEVICES not in os.environ:
        library.ucp_config_modify(config, b"NET_DEVICES", b"lo")
    if status == 0:
        status = library.ucp_init_version(major, minor, parameters, config, ctypes.byref(context))
    return context, _problem(library, status, "UCX does not start")


def _make_worker(library: ctypes.CDLL) -> ProbeProblem | None:
    """Make a worker, which listens: on loopback, unless the operator says where."""
    context, problem = _make_context(library, loopback=True)
    if problem is not None:
        return problem
    status = library.ucp_worker_create(context, (ctypes.c_uint64 * _WORDS)(), ctypes.byref(ctypes.c_void_p()))
    return _problem(library, status, "UCX makes no worker")


def _problem(library: ctypes.CDLL, status: int, what: str) -> ProbeProblem | None:
    if status == 0:
        return None
    library.ucs_status_string.restype = ctypes.c_char_p
    reason = library.ucs_status_string(ctypes.c_int8(status)).decode()
    return ProbeProblem(what=f"{what}: {reason}", fix="unset UCX_TLS and UCX_NET_DEVICES, or name what is here")


def _transports(library: ctypes.CDLL, context: ctypes.c_void_p) -> Iterator[str]:
    """Read the transports from the only place where UCX tells them: its description, in text."""
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype = ctypes.c_void_p
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    library.ucp_context_print_info(context, stream)
    libc.fclose(stream)
    for line in (text.value or b"").decode(errors="replace").splitlines():
        match = _RESOURCE.search(line)
        if match:
            yield match["transport"]


def _unreachable(transports: list[str]) -> list[ProbeProblem]:
    if set(transports) - {"self"}:
        return []
    return [ProbeProblem(what="UCX has no transport that reaches another process", fix="add tcp to UCX_TLS")]


def _memory(library: ctypes.CDLL, context: ctypes.c_void_p) -> Iterator[str]:
    attributes = (ctypes.c_uint64 * _WORDS)(_MEMORY_FIELD)
    if library.ucp_context_query(context, attributes) == 0:
        kinds = attributes[3]  # field_mask, request_size, thread_mode, memory_types
        yield from (kind for bit, kind in enumerate(_MEMORY) if kinds >> bit & 1)
