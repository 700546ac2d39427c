from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from faults.harness import ROLES, Cast, Pairing, hand_over, kill, until

from kvferry.bench.processes import Child


@pytest.fixture
def cast(tmp_path: Path) -> Iterator[Cast]:
    company = Cast(dict.fromkeys(ROLES, Pairing("CPP", "UCX")), tmp_path)
    with company.act():
        yield company
    company.close()


def processes_watched(worker: Child) -> int:
    """Descriptors of other processes: an agent has some for each peer that it knows."""
    found = 0
    for descriptor in Path(f"/proc/{worker.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found += "[pidfd]" in str(descriptor.readlink())
    return found


def pools_mapped(worker: Child) -> int:
    maps = Path(f"/proc/{worker.process.pid}/maps").read_text().splitlines()
    return sum("/memfd:kvferry-pool" in line for line in maps)


@pytest.mark.parametrize("victim", ROLES)
def test_who_has_nothing_to_do_lets_go_of_a_dead_peer_and_of_its_memory(cast: Cast, victim: str) -> None:
    workers = {role: cast.start(role) for role in ROLES}
    generation = workers["generation"]
    generation.ask("free", request=hand_over(cast, workers["context"], generation))
    dead = workers.pop(victim)
    (survivor,) = workers.values()
    assert processes_watched(survivor) > 0
    kill(dead)
    until(lambda: processes_watched(survivor) == 0, seconds=5, what="a peer forgotten")
    until(lambda: pools_mapped(survivor) == 1, seconds=5, what="only its own pool mapped")
