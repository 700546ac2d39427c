"""Lint of the environment: a pure function of the variables, what is to run, and what is here."""

from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from pathlib import PurePath

from kvferry.doctor.deployment import Deployment, Machine
from kvferry.doctor.findings import Area, Finding, Severity
from kvferry.doctor.ucx_settings import ucx_findings
from kvferry.resolution.selectors import selections, selector_warnings

OURS = frozenset(
    {"KVFERRY_PLUGINS", "KVFERRY_DISABLE_PLUGINS", "KVFERRY_DISABLE_PLUGIN_AUTOLOAD", "KVFERRY_CURVE_KEY_FILE"}
    | {"KVFERRY_LOCKED", "KVFERRY_PLUGIN_IMPORT_SECONDS"}
)
"""What operators may set; a test holds it against the sources."""
INTERNAL = frozenset(
    {"KVFERRY_NIXL_VERSION", "KVFERRY_FAULT_ROUNDS", "KVFERRY_CHURN_REQUESTS", "KVFERRY_CHURN_SEED"}
) | {"KVFERRY_PARENT_PLUGINS"}

OTHERS: Mapping[str, frozenset[str]] = {
    "NIXL_": frozenset(
        {"NIXL_PLUGIN_DIR", "NIXL_CONFIG_FILE", "NIXL_LOG_LEVEL", "NIXL_ETCD_ENDPOINTS", "NIXL_UCX_DEEPBIND"}
        | {"NIXL_TELEMETRY_ENABLE", "NIXL_TELEMETRY_DIR", "NIXL_TELEMETRY_EXPORTER"}
    ),
    "MC_": frozenset(
        {"MC_FORCE_TCP", "MC_METADATA_SERVER", "MC_GID_INDEX", "MC_MTU", "MC_IB_PORT", "MC_TE_FILTERS", "MC_LOG_LEVEL"}
        | {"MC_USE_TENT", "MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT", "MC_MIN_PORT", "MC_MAX_PORT", "MC_TCP_BIND_ADDRESS"}
    ),
}
"""Prefix → names of other people's that matter here. There are more: only what is nearly one of these is reported."""
_NEARLY = 0.85

NOT_READ: Mapping[str, str] = {
    "TRTLLM_NIXL_KVCACHE_BACKEND": "kvferry's NIXL runs on its UCX plugin",
    "TRTLLM_USE_PY_NIXL_KVCACHE": "cache_transceiver_config.transceiver_runtime decides that",
    "TRTLLM_DISAGG_ENABLE_INFLIGHT_CANCEL": "kvferry always cancels in flight",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "a worker's --control-bind decides where it listens",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "a worker's --control-bind decides where it listens",
}
"""Variables of comparable systems that people try here → what to know instead."""

_XDG = ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")


def environment_findings(environ: Mapping[str, str], deployment: Deployment, machine: Machine) -> list[Finding]:
    """Look for variables that are misspelt, contradict each other, or keep a transport from working."""
    return [
        *_selectors(environ, deployment),
        *_names(environ),
        *_values(environ),
        *_nixl_folder(environ, deployment, machine),
        *_no_gpu(environ, deployment, machine),
        *ucx_findings(environ, deployment, machine),
    ]


def _selectors(environ: Mapping[str, str], deployment: Deployment) -> Iterator[Finding]:
    for warning in selector_warnings(environ):
        what, _, fix = warning.partition("; ")
        variable, rest = _split_variable(what, environ)
        yield _finding(Severity.WARNING, variable, rest, fix=fix or "set it to 1, or unset it")
    selected = selections(environ)
    if len(selected) > 1:
        first, *others = selected
        yield _finding(
            Severity.WARNING,
            first.variable,
            f"is 1, and so {'is' if len(others) == 1 else 'are'} {', '.join(other.variable for other in others)}",
            cause=f"the first in a fixed order decides: {first.backend}",
            fix="set one; better, name the backend in the configuration",
        )
    if selected and deployment.backend_source == "user" and selected[0].backend != deployment.backend:
        what = f"selects {selected[0].backend}, and is not read: the configuration names {deployment.backend}"
        yield _finding(Severity.WARNING, selected[0].variable, what, fix="unset it, or write backend: DEFAULT")


def _split_variable(warning: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """``NAME='x' selects …`` or ``NAME looks …`` → the name, and what is said of it."""
    name = next(name for name in environ if warning.startswith((f"{name}=", f"{name} ")))
    rest = warning.removeprefix(name)
    value = repr(environ[name])
    return name, f"is {value}, and{rest.removeprefix(f'={value}')}" if rest.startswith("=") else rest.strip()


def _names(environ: Mapping[str, str]) -> Iterator[Finding]:
    for name in sorted(environ):
        if name.startswith("KVFERRY_") and name not in OURS | INTERNAL:
            guess = _nearest(name, OURS)
            hint = f"did you mean {guess}?" if guess else f"there are {', '.join(sorted(OURS))}"
            yield _finding(Severity.WARNING, name, "is no variable of kvferry's, and is not read", fix=hint)
        if name in NOT_READ:
            yield _finding(Severity.INFO, name, "is not read by kvferry", cause=NOT_READ[name])
    for prefix, known in OTHERS.items():
        for name in sorted(environ):
            guess = _nearest(name, known) if name.startswith(prefix) and name not in known else None
            if guess:
                yield _finding(Severity.WARNING, name, "is probably misspelt", fix=f"did you mean {guess}?")


def _nearest(name: str, known: Iterable[str]) -> str | None:
    ratios = {candidate: SequenceMatcher(None, name, candidate).ratio() for candidate in sorted(known)}
    best = max(ratios, key=lambda candidate: ratios[candidate])
    return best if ratios[best] >= _NEARLY else None


def _values(environ: Mapping[str, str]) -> Iterator[Finding]:
    autoload = environ.get("KVFERRY_DISABLE_PLUGIN_AUTOLOAD", "").strip()
    if autoload not in ("", "0", "1"):
        what = f"is {autoload!r}, and does nothing: only the value 1 does"
        yield _finding(Severity.WARNING, "KVFERRY_DISABLE_PLUGIN_AUTOLOAD", what, fix="set it to 1, or unset it")
    if environ.get("KVFERRY_PLUGINS", "none").strip() == "":
        what = "is set and empty: no external plugin is in"
        yield _finding(Severity.INFO, "KVFERRY_PLUGINS", what, fix="unset it, if that is not meant")
    for name in _XDG:
        if environ.get(name) and not PurePath(environ[name]).is_absolute():
            what = f"is {environ[name]!r}, a relative path, which the XDG specification ignores"
            yield _finding(Severity.WARNING, name, what, fix="write an absolute path")


def _nixl_folder(environ: Mapping[str, str], deployment: Deployment, machine: Machine) -> Iterator[Finding]:
    folder = environ.get("NIXL_PLUGIN_DIR")
    if folder is None or not deployment.may_use("NIXL") or "UCX" in (machine.nixl_plugins or ()):
        return
    lacks = "is no folder" if machine.nixl_plugins is None else "holds no libplugin_UCX.so"
    severity = Severity.ERROR if deployment.backend == "NIXL" else Severity.WARNING
    what = f"is {folder!r}, which {lacks}: NIXL's agent does not start"
    yield _finding(severity, "NIXL_PLUGIN_DIR", what, fix="unset it: NIXL's wheel brings its plugins")


def _no_gpu(environ: Mapping[str, str], deployment: Deployment, machine: Machine) -> Iterator[Finding]:
    if deployment.device != "cuda":
        return
    if not machine.has_gpu:
        what = "is cuda, and no NVIDIA GPU is here"
        yield Finding(Area.CONFIGURATION, Severity.ERROR, "device", what, fix="set device to cpu or auto")
    elif environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        what = "hides every GPU, and the configuration says device: cuda"
        yield _finding(Severity.ERROR, "CUDA_VISIBLE_DEVICES", what, fix="unset it, or name a GPU")


def _finding(severity: Severity, variable: str, what: str, *, cause: str = "", fix: str = "") -> Finding:
    return Finding(Area.ENVIRONMENT, severity, variable, what, cause, fix)
