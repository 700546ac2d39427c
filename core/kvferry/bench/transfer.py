"""``kvferry bench transfer``: hand-offs between two workers, alternating with raw writes of the same bytes."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from kvferry.bench.baseline import Echo, RawBaseline
from kvferry.bench.measurement import Measurement, Plan, Series
from kvferry.bench.pair import Pair, workers
from kvferry.bench.pairings import Pairing, declared_backend
from kvferry_plugins.errors import ConfigError

Progress = Callable[[str], None]

_MEMCPY = "kvferry.bench.memcpy"
_ONE_BLOCK_ROUNDS = 50
_ONE_BLOCK_BYTES = 1 << 20
"""A block beyond this takes no more rounds than all blocks together do: its time is the wire's."""


@dataclass(slots=True)
class _Baselines:
    """Everything that takes turns with our hand-offs."""

    raw: RawBaseline | None
    against: Mapping[str, RawBaseline]
    memcpy: RawBaseline
    echo: Echo


def baselines_of(pairing: Pairing, against: Iterable[str] = ()) -> dict[str, str]:
    """Backend → the module that runs it raw: the pairing's own backend first, where it declares one.

    Raises:
        ConfigError: another backend that is asked for is unknown, or declares none.
    """
    own = declared_backend(pairing.backend).baseline
    modules = {pairing.backend: own} if own else {}
    for name in against:
        modules[name] = declared_backend(name).baseline
        if not modules[name]:
            raise ConfigError(f"backend {name} declares no raw baseline to be compared with", setting="--against")
    return modules


def measure(plan: Plan, modules: Mapping[str, str], progress: Progress) -> Measurement:
    """Run all ways, alternating, so that a noisy moment meets each of them.

    Args:
        plan: what to measure.
        modules: from ``baselines_of``.
        progress: told what is being done.

    Raises:
        ChildError: a process failed; a hand-off failed or arrived wrong.
    """
    blocks = "1 block" if plan.blocks == 1 else f"{plan.blocks} blocks"
    progress(f"{plan.pairing}, {blocks}: starting workers and the raw transport")
    pools = workers(plan.pairing, blocks=plan.blocks, block_bytes=plan.block_bytes)
    with pools as sides, _baselines(plan, modules) as baselines:
        pair, found = Pair(sides), _empty(plan, baselines)
        for number in range(plan.rounds + 1):
            progress(f"round {number} of {plan.rounds}" if number else "warming up")
            _round(pair, baselines, found, counts=number > 0)
        progress("one block")
        _one_block(pair, baselines, found)
    return found


@contextmanager
def _baselines(plan: Plan, modules: Mapping[str, str]) -> Iterator[_Baselines]:
    sizes = (plan.nbytes, plan.block_bytes)
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(RawBaseline(module, *sizes, name=f"raw {name}"))
            for name, module in modules.items()
        }
        memcpy = stack.enter_context(RawBaseline(_MEMCPY, *sizes, name="memcpy"))
        echo = stack.enter_context(Echo())
        for baseline in (memcpy, *running.values()):
            assert baseline.ways, "a raw transport without a way"
        own = running.pop(plan.pairing.backend, None)
        yield _Baselines(own, running, memcpy, echo)


def _empty(plan: Plan, baselines: _Baselines) -> Measurement:
    ways = baselines.raw.ways if baselines.raw else []
    against = {name: _series(other.ways) for name, other in baselines.against.items()}
    return Measurement(plan, _series(ways), _series(ways), against)


def _series(ways: Sequence[str]) -> dict[str, Series]:
    return {way: Series() for way in ways}


def _round(pair: Pair, baselines: _Baselines, found: Measurement, *, counts: bool) -> None:
    if baselines.raw:
        _write(baselines.raw, found.raw, counts=counts)
    for name, other in baselines.against.items():
        _write(other, found.against[name], counts=counts)
    memcpy, plan = baselines.memcpy, found.plan
    (way,) = memcpy.ways
    found.memcpy.take(lambda: memcpy.write(way), counts=counts)
    found.memcpy_of_pieces.take(lambda: memcpy.write_pieces(way, plan.blocks, plan.seed), counts=counts)
    for series, seed in ((found.in_order, None), (found.shuffled, plan.seed)):
        pair.permute(seed)
        _hand_off(pair, plan.blocks, series, counts=counts)
    pair.permute(None)


def _write(raw: RawBaseline, ways: Mapping[str, Series], *, counts: bool) -> None:
    for way, series in ways.items():
        seconds = raw.write(way)
        if counts:
            series.seconds.append(seconds)


def _hand_off(pair: Pair, blocks: int, series: Series, *, counts: bool = True) -> None:
    seconds, parts = pair.hand_off(blocks)
    if counts:
        series.seconds.append(seconds)
        series.parts.append(parts)


def _one_block(pair: Pair, baselines: _Baselines, found: Measurement) -> None:
    is_small = found.plan.block_bytes <= _ONE_BLOCK_BYTES
    pair.hand_off(1)
    for _ in range(max(_ONE_BLOCK_ROUNDS, found.plan.rounds) if is_small else found.plan.rounds):
        for way, series in found.raw_one_block.items():
            assert baselines.raw is not None
            series.seconds.append(baselines.raw.write_one_block(way))
        found.round_trip.seconds.append(baselines.echo.round_trip())
        _hand_off(pair, 1, found.one_block_ours)
