"""What each part of a worker tells: its plan, plugins, cache, transceiver and ended transfers."""

import hashlib
import importlib.metadata
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from prometheus_client.metrics_core import Metric

from kvferry.metrics.families import counter, gauge, histogram, info
from kvferry.metrics.figures import TransferFigures
from kvferry.registry.door import Registry
from kvferry_plugins.kv_cache import CacheStatistics, KVCacheManager
from kvferry_plugins.types import Plan

Dump = Mapping[str, Any]
"""What ``status_dump`` says; a plugin's transceiver may leave parts of it out."""


def of_plan(plan: Plan) -> Iterator[Metric]:
    """The decisions, as ``explain`` tells them."""
    yield info(
        "resolution",
        "Each decision: the value that a setting got, who decided it, and by what",
        (
            {"setting": each.setting, "value": _plain(each.value), "source": each.source, "by": each.by or ""}
            for each in plan.decisions
        ),
    )
    yield gauge(
        "resolutions",
        "Decisions of this worker's plan, by setting and by where the value came from",
        ("setting", "source"),
        Counter((each.setting, str(each.source)) for each in plan.decisions),
    )


def of_plugins(registry: Registry) -> Iterator[Metric]:
    """Every plugin's state, and what became of the news for observers."""
    records = registry.records()
    yield info(
        "plugin",
        "Each plugin that was found, with its state",
        (
            {
                "plugin": each.name,
                "distribution": each.distribution,
                "version": each.version,
                "origin": each.origin.value,
                "state": each.state.value,
            }
            for each in records
        ),
    )
    yield gauge("plugins", "Plugins by state", ("state",), Counter(each.state.value for each in records))
    yield gauge(
        "plugin_load_seconds",
        "Seconds that importing a plugin took",
        ("plugin",),
        {each.name: each.import_seconds for each in records if each.import_seconds is not None},
    )
    yield counter(
        "observer_news",
        "News for a plugin's observers: told, raised by them, or dropped because they are slow",
        ("plugin", "result"),
        {
            (name, result): getattr(counts, result)
            for name, counts in registry.observer_counts().items()
            for result in ("told", "raised", "dropped")
        },
    )


def of_cache(manager: KVCacheManager) -> Iterator[Metric]:
    """Blocks by group, tier and state."""
    groups = {str(group): manager.statistics(group) for group in range(len(manager.layout.groups))}
    yield gauge(
        "cache_blocks",
        "Blocks of a layer group: on the device free, cached or in use, on a lower tier kept",
        ("group", "tier", "state"),
        {key: count for group, found in groups.items() for key, count in _blocks(group, found)},
    )
    yield gauge(
        "cache_block_bytes", "KV bytes of one block", ("group",), {g: found.block_bytes for g, found in groups.items()}
    )
    yield counter(
        "cache_reused_tokens",
        "Prompt tokens that prefix reuse has saved",
        ("group",),
        {group: found.reused_tokens for group, found in groups.items()},
    )
    yield counter(
        "cache_evicted_blocks",
        "Blocks that the device forgot, or gave to a lower tier",
        ("group",),
        {group: found.evicted for group, found in groups.items()},
    )
    tiers = {(group, tier.tier): tier for group, found in groups.items() for tier in found.tiers}
    yield gauge(
        "cache_tier_bytes",
        "Bytes that a lower tier holds",
        ("group", "tier"),
        {key: tier.nbytes for key, tier in tiers.items()},
    )
    yield counter(
        "cache_tier_moved_blocks",
        "Blocks that came to a lower tier (stored), went back (loaded), or were forgotten there (dropped)",
        ("group", "tier", "move"),
        {(*key, move): getattr(tier, move) for key, tier in tiers.items() for move in ("stored", "loaded", "dropped")},
    )


def _blocks(group: str, found: CacheStatistics) -> Iterator[tuple[tuple[str, str, str], int]]:
    for state in ("free", "cached", "in_use"):
        yield (group, "device", state), getattr(found, state)
    for tier in found.tiers:
        yield (group, tier.tier, "kept"), tier.blocks


def of_transfers(figures: TransferFigures) -> Iterator[Metric]:
    """Ended transfers."""
    ends, labels = figures.ends(), ("role", "outcome")
    yield counter("transfers", "Hand-offs that ended", labels, {key: each.count for key, each in ends.items()})
    yield counter(
        "transfer_bytes", "Bytes that hand-offs moved", labels, {key: each.nbytes for key, each in ends.items()}
    )
    yield counter(
        "transfer_blocks", "Blocks that they filled", labels, {key: each.blocks for key, each in ends.items()}
    )
    yield counter(
        "zero_byte_transfers",
        "Hand-offs that moved no byte: completed, the whole prefix was there",
        labels,
        {key: each.empty for key, each in ends.items() if each.empty},
    )
    yield histogram(
        "transfer_admission_seconds",
        "From the begin of a hand-off to POSTING",
        labels,
        {key: each.admission for key, each in ends.items()},
    )
    yield histogram(
        "transfer_seconds", "From POSTING to the end", labels, {key: each.transfer for key, each in ends.items()}
    )
    yield counter(
        "transfer_failures",
        "Failed hand-offs by class of the error, and the state in which a clock ran out",
        ("role", "cause", "state"),
        figures.failures(),
    )


def of_transceiver(dump: Dump) -> Iterator[Metric]:
    """Handshakes, peers, and what is under way."""
    handshakes = dump.get("handshakes", {})
    yield counter("handshakes", "Handshakes by how they ended", ("result",), handshakes.get("results", {}))
    yield counter(
        "handshake_differences",
        "Fields in which a peer's fingerprint differed",
        ("severity", "field"),
        {(how, name): n for how, fields in handshakes.get("differences", {}).items() for name, n in fields.items()},
    )
    if fingerprint := dump.get("fingerprint"):
        facts = {"sha256": _digest(fingerprint.get("fields")), "protocol": fingerprint.get("protocol")}
        yield info("fingerprint", "What the handshake compares; equal digests are equal fingerprints", [facts])
    yield gauge("peers", "Peers by state", ("state",), Counter(each["state"] for each in dump.get("peers", ())))
    under_way = [(role, each["state"]) for role, each in _under_way(dump)]
    yield gauge("transfers_in_flight", "Hand-offs that are not over, by state", ("role", "state"), Counter(under_way))
    yield gauge("held_tables", "TABLEs that wait for their requests", (), {(): dump.get("held_tables", 0)})
    yield counter(
        "protocol_events",
        "What the transfer loop counted besides: messages late, malformed or not sent, errors of the agent",
        ("event",),
        {name: n for name, n in dump.get("counters", {}).items() if name not in COUNTED_ELSEWHERE},
    )
    verdicts = dump.get("verdicts", {})
    yield counter("verdicts", "What the ranks agreed on", ("outcome",), verdicts.get("verdicts", {}))
    yield gauge(
        "verdicts_awaited", "Requests that ended here, but not on all ranks", (), {(): len(verdicts.get("waiting", ()))}
    )


COUNTED_ELSEWHERE = frozenset(("bytes_sent", "handshakes", "handshakes_refused", "quarantined_receives"))


def _under_way(dump: Dump) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for role, name in (("context", "sends"), ("generation", "receives")):
        for each in dump.get(name, ()):
            yield role, each


def of_ledger(dump: Dump) -> Iterator[Metric]:
    """Blocks that a transfer has, by what they wait for."""
    ledger = dump.get("ledger", {})
    blocks = ledger.get("blocks", {})
    yield gauge("blocks_in_flight", "Blocks that a hand-off holds, by what they wait for", ("owner",), blocks)
    oldest = dict.fromkeys(blocks, 0.0)
    for entry in ledger.get("entries", ()):
        oldest[entry["owner"]] = max(oldest.get(entry["owner"], 0.0), entry["seconds"])
    yield gauge("blocks_in_flight_oldest_seconds", "Since when the oldest of them is held", ("owner",), oldest)
    yield counter(
        "blocks_reclaimed", "Blocks that hand-offs gave back, by reason", ("reason",), ledger.get("reclaimed", {})
    )
    yield counter(
        "quarantined_receives",
        "Receives whose blocks went into quarantine: their writer might still write",
        (),
        {(): dump.get("counters", {}).get("quarantined_receives", 0)},
    )


def of_worker(plan: Plan, dump: Dump) -> Iterator[Metric]:
    """Who this is."""
    ranks = dump.get("ranks") or {}
    facts = {
        "role": dump.get("role"),
        "backend": plan.backend,
        "runtime": plan.runtime,
        "manager": plan.manager,
        "architecture": plan.architecture,
        "instance": dump.get("instance"),
        "rank": ranks.get("rank", 0),
        "ranks": ranks.get("size", 1),
        "version": _version(),
    }
    yield info("worker", "What this worker is", [facts])


@cache
def _version() -> str:
    """Read from disk once, not at each scrape."""
    return importlib.metadata.version("kvferry")


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _digest(fields: object) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:16]
