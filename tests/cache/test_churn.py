"""Thousands of requests against a model that knows what each token's KV must be and who has which block.

``KVFERRY_CHURN_REQUESTS`` sets how many (``make churn``), ``KVFERRY_CHURN_SEED`` repeats a failure.
"""

import errno
import hashlib
import os
import random
import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from kvferry.cache.disk_store import DiskStore
from kvferry_plugins.errors import CacheFullError, CorruptBlockError
from kvferry_plugins.types import LayerShape, ModelGeometry, RoleShape

REQUESTS = int(os.environ.get("KVFERRY_CHURN_REQUESTS", "10000"))
SEED = int(os.environ.get("KVFERRY_CHURN_SEED", "20261130"))

STEP = 4
"""Tokens per block of a full group."""
HEAVY = LayerShape((RoleShape("key", 2, 4), RoleShape("value", 2, 4)))
WINDOW = LayerShape(HEAVY.roles, window=16)
NARROW = LayerShape((RoleShape("key", 1, 4), RoleShape("value", 1, 4)), window=9)
LATENT = LayerShape((RoleShape("latent", 1, 4),), "latent")
STATE = LayerShape((RoleShape("conv", 3, 4), RoleShape("recurrent", 1, 8)), "state")

GEOMETRIES = {
    "uniform": (HEAVY, HEAVY),
    "windows": (HEAVY, WINDOW, NARROW, WINDOW),
    "latents": (LATENT, WINDOW),
    "states": (STATE, LATENT),
}


def geometry_of(name):
    layers = GEOMETRIES[name]
    windows = tuple(layer.window for layer in layers)
    if name == "uniform":
        return ModelGeometry(len(layers), 2, 4, "float32", windows)
    return ModelGeometry(len(layers), 2, 4, "float32", windows, layers)


def prefix_digests(tokens):
    """For each position, what no other prefix has: int32[n, 2]."""
    chain, digests = hashlib.blake2b(digest_size=8), []
    for token in tokens:
        chain.update(token.to_bytes(4, "little"))
        digests.append(chain.digest())
    return np.frombuffer(b"".join(digests), dtype=np.int32).reshape(-1, 2)


@dataclass
class Request:
    tokens: list[int]
    computed: int
    committed: int
    digests: np.ndarray = field(init=False)
    is_suspended: bool = False

    def __post_init__(self):
        self.digests = prefix_digests(self.tokens)


@dataclass
class Hold:
    tables: list[np.ndarray]
    request: Request
    """As it was then: what it wrote later is its own business."""


class Churn:
    """Drives a manager as engines and transceivers do, and knows what must be in its memory."""

    def __init__(self, manager, seed, *, folder=None, limits=(0, 0), first_id=0):
        self.manager = manager
        self.random = random.Random(seed)
        self.groups = manager.layout.groups
        self.folder, self.limits = folder, limits
        self.is_v1 = manager.kind == "V1"
        self.has_tiers = any(limits)
        self.views = [self._views(group) for group in self.groups]
        self.requests: dict[int, Request] = {}
        self.holds: list[Hold] = []
        self.counts: Counter[str] = Counter()
        self.may_damage = False
        self.is_alone = True
        self.next_id = self.first_id = first_id
        self.bases = self._bases()

    # --- memory --------------------------------------------------------------------------------------------------

    def _views(self, group):
        """(tag, int32[blocks, heads, rows, width]) of each layer and role."""
        roles = [(layer, role, view) for layer in group.layers for role, view in self._role_views(layer)]
        return [(index * 1000 + layer, view.numpy().view(np.int32)) for index, (layer, _, view) in enumerate(roles)]

    def _role_views(self, layer):
        return sorted(self.manager.role_views(layer).items())

    def _rows(self, view, tag, digests, positions):
        """What the rows of some positions must hold in one view: int32[n, heads, width]."""
        heads, width = view.shape[1], view.shape[3]
        rows = np.zeros((len(positions), heads, width), dtype=np.int32)
        rows[:, :, :2] = digests[positions][:, None, :]
        rows[:, :, 2] = positions[:, None]
        rows[:, :, 3] = tag * 16 + np.arange(heads)
        return rows

    def _here(self, request, table, group, start, stop):
        """Positions from start to stop whose block is here, with block and row."""
        if group.kind == "state":
            positions = np.array([request.computed - 1]) if request.computed else np.empty(0, dtype=np.int64)
            return positions, table[np.zeros_like(positions)], np.zeros_like(positions)
        positions = np.arange(start, stop)
        blocks = table[positions // group.tokens_per_block]
        present = blocks != -1
        return positions[present], blocks[present], positions[present] % group.tokens_per_block

    def write(self, number, start, stop):
        request = self.requests[number]
        request.computed = stop
        for group, table, views in zip(self.groups, self.manager.block_table(number), self.views, strict=True):
            positions, blocks, rows = self._here(request, table, group, start, stop)
            for tag, view in views:
                view[blocks, :, rows] = self._rows(view, tag, request.digests, positions)

    def verify(self, number):
        request, tables = self.requests[number], self.manager.block_table(number)
        for group, table in zip(self.groups, tables, strict=True):
            needed = table[group.first_block_needed(request.computed) : group.blocks_for(request.computed)]
            assert (needed != -1).all(), f"request {number} misses blocks that it still reads: {table}"
        self.compare(request, tables)
        self.counts["verified"] += 1

    def compare(self, request, tables):
        for group, table, views in zip(self.groups, tables, self.views, strict=True):
            positions, blocks, rows = self._here(request, table, group, 0, request.computed)
            for tag, view in views:
                found, wanted = view[blocks, :, rows], self._rows(view, tag, request.digests, positions)
                assert (found == wanted).all(), f"other contents than {request} wrote, in layer {tag} of {group}"

    # --- what happens --------------------------------------------------------------------------------------------

    def _bases(self):
        """What prompts begin with, the same for all."""
        bases = random.Random(SEED)
        return [[bases.randrange(3) for _ in range(bases.randint(4, 28))] for _ in range(10)]

    def _random_tokens(self, count):
        return [self.random.randrange(3) for _ in range(count)]

    def allocate(self):
        number, self.next_id = self.next_id, self.next_id + 1
        base = self.random.choice(self.bases)
        prompt = base[: self.random.randint(1, len(base))] if self.random.random() < 0.2 else list(base)
        prompt += self._random_tokens(self.random.choice((0, 0, 1, 2, 5, 9)))
        tail = self._random_tokens(self.random.choice((0, 1, 3, 8)))
        received = self.random.random() < 0.3
        limit = len(prompt) - 1 if not received and self.random.random() < 0.5 else None
        capacity = len(prompt) + self.random.choice((0, 0, 1, len(tail)))
        try:
            cached = self.manager.allocate(
                number,
                capacity,
                prompt,
                max_cached_tokens=limit,
                history_tokens=len(prompt) if received else 0,
            )
        except CacheFullError as full:
            self._refused(full)
            return
        assert cached % STEP == 0
        assert cached <= (len(prompt) if limit is None else limit)
        self.requests[number] = Request(prompt + tail, cached, cached)
        self.counts["reused"] += cached > 0
        if received:
            self.verify_received(number, cached, len(prompt))
        else:
            self.verify(number)

    def verify_received(self, number, cached, stop):
        """Check what is here already, then get the rest as a transfer writes it."""
        request = self.requests[number]
        for group, table in zip(self.groups, self.manager.block_table(number), strict=True):
            assert (table[group.first_block_needed(stop) : group.blocks_for(stop)] != -1).all()
        wanted, request.computed = request.computed, stop
        self.write(number, wanted, stop)
        self.verify(number)
        self.counts["received"] += 1
        self.maybe_commit(number)

    def compute(self, number):
        request = self.requests[number]
        start = request.computed
        stop = min(len(request.tokens), start + self.random.choice((1, 2, 3, 5, 11)))
        if stop == start:
            self.finish(number)
            return
        before = self.manager.block_table(number)
        try:
            self.manager.extend(number, stop)
        except CacheFullError as full:
            self._refused(full)
            assert all((a == b).all() for a, b in zip(before, self.manager.block_table(number), strict=True))
            return
        for group, table in zip(self.groups, self.manager.block_table(number), strict=True):
            first = 0 if group.kind == "state" else start // group.tokens_per_block
            assert (table[first : group.blocks_for(stop)] != -1).all(), "extend gave no room for what is computed next"
        self.write(number, start, stop)
        self.maybe_commit(number)
        self.manager.advance(number, stop)
        for group, table in zip(self.groups, self.manager.block_table(number), strict=True):
            assert self.is_v1 or (table[: group.first_block_needed(stop)] == -1).all()

    def maybe_commit(self, number):
        request = self.requests[number]
        if self.random.random() < 0.7:
            committed = self.manager.commit(number, request.tokens[: request.computed])
            assert committed % STEP == 0
            assert committed <= request.computed
            request.committed = max(request.committed, committed)

    def finish(self, number):
        self.verify(number)
        self.free(number)

    def free(self, number):
        self.manager.free(number)
        del self.requests[number]

    def hold(self, number):
        tables = self.manager.block_table(number)
        self.manager.hold(tables)
        self.holds.append(Hold(list(tables), replace(self.requests[number])))
        self.counts["held"] += 1

    def release(self):
        hold = self.holds.pop(self.random.randrange(len(self.holds)))
        if all(group.kind != "state" for group in self.groups):  # a state has one content, the latest
            self.compare(hold.request, hold.tables)
        self.manager.release(hold.tables)

    def suspend(self, number):
        tables = self.manager.block_table(number)
        held = [self._held_until(number, group, table) for group, table in enumerate(tables)]
        try:
            self.manager.suspend(number)
        except ValueError:
            assert max(held) > 0
            self.verify(number)
            return
        except CacheFullError:
            self.counts["suspend refused"] += 1
            assert all((a == b).all() for a, b in zip(tables, self.manager.block_table(number), strict=True))
            self.verify(number)
            return
        assert max(held) <= self.requests[number].committed, "a transfer may still write to what was suspended"
        self.requests[number].is_suspended = True
        self.counts["suspended"] += 1

    def _held_until(self, number, index, table):
        """Tokens up to the last held block of a request, 0 = none."""
        held = [ordinal for ordinal, block in enumerate(table.tolist()) if block in self.held(index)]
        if self.groups[index].kind == "state":
            return len(self.requests[number].tokens) * len(held)
        return (max(held) + 1) * self.groups[index].tokens_per_block if held else 0

    def resume(self, number):
        try:
            self.manager.resume(number)
        except CacheFullError as full:
            self._refused(full)
            return
        except CorruptBlockError:
            assert self.may_damage
            self.counts["lost"] += 1
            del self.requests[number]
            return
        self.requests[number].is_suspended = False
        self.verify(number)
        self.counts["resumed"] += 1

    def damage(self):
        """Flip a bit in a block file."""
        files = sorted(self.folder.glob("*/*.block"))
        if files:
            file = self.random.choice(files)
            try:
                with file.open("r+b") as opened:
                    opened.seek(self.random.randrange(file.stat().st_size))
                    byte = opened.read(1)
                    opened.seek(-1, os.SEEK_CUR)
                    opened.write(bytes([byte[0] ^ 4]))
                self.counts["damaged"] += 1
            except FileNotFoundError:
                pass

    def step(self):
        """One request does one thing."""
        if len(self.requests) < self.random.choice((2, 4, 7)):
            self.allocate()
        if self.holds and self.random.random() < 0.2:
            self.release()
        if self.may_damage and self.random.random() < 0.05:
            self.damage()
        if not self.requests:
            return
        number = self.random.choice(list(self.requests))
        chance = self.random.random()
        if self.requests[number].is_suspended:
            self.free(number) if chance < 0.1 else self.resume(number)
        elif chance < 0.08:
            self.free(number)  # cancelled, wherever it is
        elif chance < 0.14 and len(self.holds) < 3:
            self.hold(number)
        elif chance < 0.26 and self.has_tiers:
            self.suspend(number)
        else:
            self.compute(number)

    # --- what must always hold -----------------------------------------------------------------------------------

    def _refused(self, full):
        self.counts["refused"] += 1
        assert full.needed > full.free, full

    def held(self, group):
        return {block for hold in self.holds for block in hold.tables[group].tolist()} - {-1}

    def owned(self, group):
        return {
            block
            for number, request in self.requests.items()
            if not request.is_suspended
            for block in self.manager.block_table(number)[group].tolist()
        } - {-1}

    def check(self):
        owners: list[dict[int, tuple]] = [{} for _ in self.groups]
        for number, request in self.requests.items():
            if not request.is_suspended:
                for index, table in enumerate(self.manager.block_table(number)):
                    self._check_owners(owners[index], index, number, request, table)
        for index in range(len(self.groups)):
            figures = self.manager.statistics(index)
            assert figures.total == figures.free + figures.cached + figures.in_use
            assert figures.in_use == len(set(owners[index]) | self.held(index))
        self._check_tiers()

    def _check_owners(self, owners, index, number, request, table):
        """A block may have two owners only if it is full and both have the same tokens up to its end."""
        group = self.groups[index]
        size = group.tokens_per_block
        present = table[table != -1].tolist()
        assert len(present) == len(set(present))
        for ordinal in np.flatnonzero(table != -1).tolist():
            block, end = int(table[ordinal]), (ordinal + 1) * size
            is_full = group.kind != "state" and end <= request.computed
            owner = (ordinal, request.digests[end - 1].tobytes()) if is_full else (number,)
            assert owners.setdefault(block, owner) == owner, f"block {block} of group {index} has two owners"

    def _check_tiers(self):
        tiers = [tier for index in range(len(self.groups)) for tier in self.manager.statistics(index).tiers]
        for name, limit in zip(("host", "disk"), self.limits, strict=True):
            assert sum(tier.nbytes for tier in tiers if tier.tier == name) <= limit

    def check_files(self):
        sizes = []
        for file in self.folder.glob("*/*.block"):
            try:
                sizes.append(file.stat().st_size)
            except FileNotFoundError:
                continue
        assert sum(sizes) <= self.limits[1]

    def run(self, requests):
        steps = 0
        while self.next_id < self.first_id + requests:
            self.step()
            steps += 1
            if steps % 7 == 0 and self.is_alone:
                self.check()
            if self.folder is not None and steps % 1000 == 0:
                self.check_files()

    def finish_all(self):
        """End everything; then every block must be free or cached, and after clearing, free."""
        self.end_requests()
        self.check()
        if not self.is_v1:
            figures = [self.manager.statistics(index) for index in range(len(self.groups))]
            assert sum(each.total * each.block_bytes for each in figures) <= self.manager.shares.budget
        if self.has_tiers:
            tiers = self.manager._blocks.offload._tiers
            assert [tier.pinned_bytes for tier in (tiers._host, tiers._disk)] == [0, 0], (
                "a tier keeps what nobody wants"
            )
        self.clear()
        for index in range(len(self.groups)):
            figures = self.manager.statistics(index)
            assert (figures.free, figures.cached, figures.in_use) == (figures.total, 0, 0)

    def end_requests(self):
        for number in list(self.requests):
            if self.requests[number].is_suspended:
                self.resume(number)
            if number in self.requests and not self.requests[number].is_suspended:
                self.finish(number)
        for number in list(self.requests):
            self.free(number)
        while self.holds:
            self.release()

    def clear(self):
        """Have every block once, which evicts all that is cached."""
        if self.is_v1:
            self.manager.allocate(self.next_id, self.manager.statistics().total * STEP)
            self.manager.free(self.next_id)
            return
        for pool in self.manager._blocks.pools:  # no request has all blocks of two groups at a time
            blocks = pool.take(pool.num_blocks)
            assert sorted(blocks.tolist()) == list(range(pool.num_blocks))
            pool.give_back(blocks)


@pytest.fixture
def make_churn(make_manager, tmp_path):
    made = []

    def make(geometry, *, blocks=24, host=0, disk=0, folder=tmp_path, seed=SEED, **changes):
        options = {"host_cache_size": host, "disk_cache_size": disk, "disk_cache_path": str(folder) if disk else None}
        manager = make_manager(
            blocks, STEP, geometry=geometry_of(geometry), options=options, max_batch_size=6, **changes
        )
        made.append(manager)
        return Churn(manager, seed, folder=folder if disk else None, limits=(host, disk))

    yield make
    for manager in made:
        manager.shutdown()
    assert list(tmp_path.iterdir()) == []


def churned(churn, requests):
    churn.run(requests)
    churn.finish_all()
    return churn.counts


@pytest.mark.parametrize("kind", ["V1", "V2"])
def test_uniform_layers_on_the_device_alone(make_churn, kind):
    counts = churned(make_churn("uniform"), REQUESTS // 5)
    assert min(counts[what] for what in ("reused", "received", "held", "refused", "verified")) > REQUESTS // 500


def test_windows_with_host_memory_and_disk(make_churn):
    churn = make_churn("windows", host=6000, disk=20000)
    counts = churned(churn, REQUESTS)
    whats = ("reused", "received", "held", "refused", "verified", "suspended", "resumed")
    assert min(counts[what] for what in whats) > REQUESTS // 100
    tiers = [tier for index in range(len(churn.groups)) for tier in churn.manager.statistics(index).tiers]
    for name in ("host", "disk"):
        loaded = sum(tier.loaded for tier in tiers if tier.tier == name)
        assert loaded > REQUESTS // 100, f"nothing comes back from the {name} tier"


def test_latents_with_host_memory_alone(make_churn):
    counts = churned(make_churn("latents", host=4000), REQUESTS // 5)
    assert counts["reused"] > REQUESTS // 500
    assert counts["resumed"] > REQUESTS // 500


def test_states_with_a_disk_alone(make_churn):
    counts = churned(make_churn("states", disk=20000), REQUESTS // 10)
    assert counts["reused"] == 0
    assert counts["resumed"] > REQUESTS // 500


def test_without_reuse_nothing_is_shared(make_churn):
    assert churned(make_churn("windows", host=6000, reuse=False), REQUESTS // 10)["reused"] == 0


def test_many_threads_churn_one_manager(make_churn):
    first = make_churn("windows", blocks=48, host=6000, disk=20000)
    others = [Churn(first.manager, SEED + n, limits=first.limits, first_id=n * 10**6) for n in (1, 2, 3)]
    failures = []

    def work(churn):
        churn.is_alone = False
        try:
            churn.run(REQUESTS // 20)
            churn.end_requests()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(churn,)) for churn in (first, *others)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    first.finish_all()
    assert sum(churn.counts["resumed"] for churn in (first, *others)) > REQUESTS // 500


def test_damaged_block_files_are_computed_again_and_never_served(make_churn):
    churn = make_churn("windows", host=2000, disk=20000)
    churn.may_damage = True
    counts = churned(churn, REQUESTS // 10)
    assert counts["damaged"] > 0


@pytest.mark.parametrize("folder", ["/absent", "/sys", "/dev/null"], ids=["missing", "unwritable", "a file"])
def test_a_disk_that_cannot_be_used_is_said_once_and_host_memory_serves_alone(make_churn, caplog, folder):
    churn = make_churn("windows", host=6000, disk=20000, folder=Path(folder))
    assert churned(churn, REQUESTS // 40)["resumed"] > 0
    assert len([record for record in caplog.records if folder in record.getMessage()]) == 1
    tiers = [tier for index in range(len(churn.groups)) for tier in churn.manager.statistics(index).tiers]
    assert sum(tier.stored for tier in tiers if tier.tier == "disk") == 0


def test_a_disk_that_fails_half_way_loses_no_request(make_churn, monkeypatch):
    churn = make_churn("windows", host=4000, disk=20000)
    churn.run(REQUESTS // 20)

    def fail(store, serial, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(store.path))

    monkeypatch.setattr(DiskStore, "write", fail)
    churn.run(REQUESTS // 10)
    churn.finish_all()
    assert churn.counts["resumed"] > 0
