"""The process of one worker: from the command's options to a service, until a signal has drained it."""

import contextlib
import faulthandler
import json
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from kvferry.checkpoint import load_model_spec, model_geometry
from kvferry.config import EngineArgs
from kvferry.dispatcher import WorkerParts, build, resolve
from kvferry.integrations.checkpoints import Progress, find_checkpoint
from kvferry.integrations.model_identity import model_identity
from kvferry.integrations.transformers.engine import DEFAULT_PREFILL_CHUNK, PagedEngine
from kvferry.integrations.transformers.loading import LoadedModel, load_model
from kvferry.metrics.figures import TransferFigures
from kvferry.metrics.port import metrics_port
from kvferry.registry.door import Registry
from kvferry.serving.app import make_app, plain
from kvferry.serving.engine_loop import EngineLoop
from kvferry.serving.http_server import HttpServer, bind_http
from kvferry.serving.jobs import Jobs
from kvferry.serving.service import STALL_SECONDS, Service
from kvferry.serving.trace_file import TraceFile
from kvferry.tracing.perfetto import require_trace
from kvferry.tracing.ring import TraceRing
from kvferry.transceiver.channel import host_of
from kvferry_plugins.errors import ConfigError
from kvferry_plugins.types import Plan, Role, TransferEvent

logger = logging.getLogger("kvferry.serving")

LOOK_SECONDS = 0.05
STOP_SECONDS = 5.0

PIPELINED_PREFILL_CHUNK = 256
"""What is exposed of a pipelined hand-off is its last chunk; smaller ones cost the prefill more than they hide."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What a worker is told besides its engine configuration."""

    role: Role
    model: str
    host: str = "127.0.0.1"
    port: int = 0
    control_bind: str = "tcp://127.0.0.1:0"
    prefill_chunk: int | None = None
    """Tokens of a prompt that one step takes; None = ``default_prefill_chunk``."""
    drain_seconds: float = 30.0
    threads: int | None = None
    """That torch computes with; None = half of the cores."""
    stall_seconds: float = STALL_SECONDS
    """A thread that is so long at one piece of work makes the worker not ready."""
    metrics_port: int | None = None
    """A port for metrics alone; None = they are at ``/metrics`` of HTTP only."""
    trace: Path | None = None
    """Where a trace is written, at the end and on SIGUSR2."""
    locked: bool = False
    """Whether a peer whose plugins differ is refused."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Where a worker can be reached."""

    http: str
    control: str
    pid: int
    metrics: str | None = None
    """The port of its own, if there is one."""


def run_worker(
    options: WorkerOptions,
    args: EngineArgs,
    registry: Registry,
    *,
    progress: Progress,
    on_ready: Callable[[Ready], None],
) -> int:
    """Serve until SIGTERM or SIGINT, then drain. The main thread's.

    Returns:
        0 if everything was drained, 1 if the deadline came first.

    Raises:
        KvferryError: it cannot be started; whatever was started is shut down.
    """
    stop = threading.Event()
    _require_endpoint(options.control_bind)
    if options.trace is not None:
        require_trace(options.trace)
    with contextlib.ExitStack() as stack:
        bound = stack.enter_context(bind_http(options.host, options.port))
        service = stack.enter_context(running_service(options, args, registry, progress=progress))
        server = HttpServer(make_app(service), bound)
        stack.callback(server.stop)
        trace = TraceFile(service, options.trace)
        stack.callback(trace.write_at_end)
        own_port = stack.enter_context(_metrics_port(options, service))
        _handle_signals(service, stop, trace)
        server.start()
        endpoint = str(service.transceiver.status_dump().get("endpoint") or options.control_bind)
        on_ready(Ready(server.url, endpoint, os.getpid(), own_port))
        _wait_for_signal(stop)
        stop.clear()
        return _drain(service, options.drain_seconds, stop)


@contextlib.contextmanager
def running_service(
    options: WorkerOptions,
    args: EngineArgs,
    registry: Registry,
    *,
    progress: Progress,
    load: Callable[..., LoadedModel] = load_model,
) -> Iterator[Service]:
    """Resolve, build, load, and run the engine's thread; what can fail fast comes before the weights are read.

    Args:
        options: what the worker is told.
        args: its engine configuration.
        registry: with the plugins.
        progress: told while the model loads.
        load: as ``load_model``; a process with several services may give each the same model.
    """
    folder = find_checkpoint(options.model, progress)
    spec = load_model_spec(folder)
    plan = resolve(args, model=spec, registry=registry, environ=os.environ)
    _require_transceiver(plan)
    cache_config = plan.effective["kv_cache_config"]
    dtype, windows = cache_config["dtype"], cache_config["max_attention_window"]
    bell, figures = threading.Event(), TransferFigures()
    ring = TraceRing() if options.trace is not None else None
    parts = build(
        plan,
        registry=registry,
        role=options.role,
        geometry=model_geometry(spec.pretrained_config or {}, dtype, max_attention_window=windows),
        model_identity=model_identity(folder),
        bind=options.control_bind,
        on_event=_event_listener(bell, figures, ring),
        locked=options.locked,
    )
    with contextlib.ExitStack() as stack:
        stack.callback(registry.drain_observers)  # after the last transfer's end was told
        stack.callback(parts.shutdown)
        limit_threads(options.threads)
        device = parts.manager.layout.pools[0].device
        loaded = load(folder, dtype, device=device, progress=progress)
        chunk = options.prefill_chunk or default_prefill_chunk(plan)
        engine = PagedEngine(loaded, parts.manager, prefill_chunk=chunk)
        service = _service(options, parts, registry, engine, bell)
        service.figures, service.ring = figures, ring
        service.loop.start()
        stack.callback(service.loop.stop, STOP_SECONDS)
        yield service


def default_prefill_chunk(plan: Plan) -> int:
    """Tokens of a prompt that one step takes: fewer where the last chunk is what a hand-off cannot hide."""
    transceiver = plan.effective["cache_transceiver_config"]
    pipelined = transceiver is not None and transceiver["enable_pipelined_transfer"]
    return PIPELINED_PREFILL_CHUNK if pipelined else DEFAULT_PREFILL_CHUNK


def limit_threads(threads: int | None = None) -> None:
    """Set torch's threads; None = half of the cores, at least one.

    A pair on one machine shares its cores, and the transfer loop wants one. Measured on two busy cores: a token took
    0.11 s with one thread and 0.37 s with two, which spent most of it spinning for each other.
    """
    import torch

    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // 2))


def _service(
    options: WorkerOptions, parts: WorkerParts, registry: Registry, engine: PagedEngine, bell: threading.Event
) -> Service:
    assert parts.transceiver is not None
    effective = parts.plan.effective
    pipelined = effective["cache_transceiver_config"]["enable_pipelined_transfer"]
    jobs = Jobs(engine, parts.transceiver, pipelined)
    return Service(
        role=options.role,
        model_name=options.model,
        parts=parts,
        transceiver=parts.transceiver,
        registry=registry,
        loaded=engine.loaded,
        engine=engine,
        loop=EngineLoop(jobs, parts.transceiver, bell, max_active=effective["max_batch_size"]),
        max_seq_len=effective["max_seq_len"],
        stall_seconds=options.stall_seconds,
    )


def _event_listener(
    bell: threading.Event, figures: TransferFigures, ring: TraceRing | None
) -> Callable[[TransferEvent], None]:
    """Count the end of a transfer, then wake the engine: whoever is answered finds it counted."""

    def listen(event: TransferEvent) -> None:
        try:
            figures.count(event)
            if ring is not None:
                ring.transfer(event)
        finally:
            bell.set()

    return listen


def _metrics_port(options: WorkerOptions, service: Service) -> contextlib.AbstractContextManager[str | None]:
    if options.metrics_port is None:
        return contextlib.nullcontext()
    return metrics_port(options.metrics_port, service.metrics)


def _require_endpoint(control_bind: str) -> None:
    if host_of(control_bind) is None:
        raise ConfigError(
            f"--control-bind {control_bind[:200]!r} is no endpoint: write tcp://HOST:PORT, "
            "with a port up to 65535, or 0 for any free one",
            setting="control_bind",
        )


def _require_transceiver(plan: Plan) -> None:
    if plan.runtime is None:
        raise ConfigError(
            "the transceiver is off, so this worker could neither send nor receive; "
            "set cache_transceiver_config: {backend: DEFAULT} in the file that --config names",
            setting="cache_transceiver_config.backend",
        )


# --- signals ---------------------------------------------------------------------------------------------------------


def _handle_signals(service: Service, stop: threading.Event, trace: TraceFile) -> None:
    """SIGTERM and SIGINT drain; a second one ends that; SIGUSR1 says how things are, SIGUSR2 writes the trace."""

    def end(number: int, frame: FrameType | None) -> None:
        stop.set()

    def tell(number: int, frame: FrameType | None) -> None:
        print(json.dumps(service.status(), default=plain, indent=1), file=sys.stderr, flush=True)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGUSR1, tell)
    signal.signal(signal.SIGUSR2, lambda number, frame: trace.write_now())
    # the stacks are written at once, even where no Python code can run any more; then the handler above is asked
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)


def _wait_for_signal(stop: threading.Event) -> None:
    """Sleep until a handler has set ``stop``. The main thread's.

    Of two signals in a row the kernel may hand one to another thread, which wakes nobody who waits for a lock; but
    whichever thread gets it writes to the wakeup descriptor.
    """
    readable, writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    try:
        while not stop.is_set():
            select.select([readable], [], [])
            os.read(readable, 4096)
    finally:
        signal.set_wakeup_fd(before)
        os.close(readable)
        os.close(writable)


def _drain(service: Service, seconds: float, stop: threading.Event) -> int:
    """Wait for the end of every job and transfer, until the deadline or another signal."""
    service.draining.set()
    logger.info("draining: no new requests, at most %g s for those under way", seconds)
    deadline = time.monotonic() + seconds
    while not service.drained:
        if time.monotonic() >= deadline or stop.is_set():
            logger.error(
                "stopped before everything was drained: jobs %s, blocks %s, ledger %s",
                service.loop.counts(),
                service.statistics(),
                service.transceiver.status_dump().get("ledger"),
            )
            service.loop.stop(STOP_SECONDS)  # clients hear of it while HTTP is still there
            return 1
        time.sleep(LOOK_SECONDS)
    return 0
