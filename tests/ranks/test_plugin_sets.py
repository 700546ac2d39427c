"""Workers, and ranks of one, whose plugins differ: processes over NIXL, with what pip installed for each."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from ranks.worlds import PAIRINGS, PROMPT, Pairing, Worker, World, orders
from registry.wheels import pip_install, plugin_source, write_project, write_wheel

from kvferry.testing.rank_process import RankError, RankOrder, RankProcess
from kvferry_plugins.types import ModelGeometry, Role, Topology

GEOMETRY = ModelGeometry(4, 4, 4, "float16", (None,) * 4)

Paths = tuple[str, ...]


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Paths]:
    """Name → what comes first on a worker's path."""
    folder = tmp_path_factory.mktemp("sites")

    def site(name: str, version: str, answer: str) -> Paths:
        files = {"acme_kvferry.py": plugin_source(answer)}
        wheel = write_wheel(folder / "wheels" / name, "acme-kvferry", version, {"acme": "acme_kvferry"}, files)
        return (str(pip_install(folder / name, wheel)),)

    project = write_project(folder / "project", "acme-kvferry", "1.0", "acme", plugin_source())
    return {
        "first": site("first", "1.0", "PYTHON"),
        "again": site("again", "1.0", "PYTHON"),
        "later": site("later", "1.1", "PYTHON"),
        "rebuilt": site("rebuilt", "1.0", "CPP"),
        "editable": (str(pip_install(folder / "editable", editable=project)), str(project)),
        "none": (),
    }


@pytest.fixture
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RankProcess]]:
    settings = str(tmp_path_factory.mktemp("settings"))
    processes = [RankProcess({"XDG_CONFIG_HOME": settings, "XDG_STATE_HOME": settings}) for _ in range(2)]
    yield processes
    for process in processes:
        process.close()


DIFFERENCES = pytest.mark.parametrize(
    ("other", "says"),
    [
        ("later", ["plugins: ", "{'acme': 'acme-kvferry 1.0'}", "{'acme': 'acme-kvferry 1.1'}"]),
        ("rebuilt", ["plugins.digest: {'acme': 'sha256:", "(the same versions, but other files)"]),
        ("editable", ["plugins.digest: {'acme': 'sha256:", "(the same versions, but other files)"]),
        ("none", ["plugins: ", "{'acme': 'acme-kvferry 1.0'}", "{}"]),
    ],
)


def order(role: Role, path: Paths, *, locked: bool, pairing: Pairing = PAIRINGS[0]) -> RankOrder:
    (single,) = orders(role, Worker(), GEOMETRY, pairing)
    return replace(single, path=path, locked=locked)


def opened(ranks: list[RankProcess], context: RankOrder, generation: RankOrder) -> World:
    for rank, each in zip(ranks, (context, generation), strict=True):
        rank.tell("open", order=each)
    for rank in ranks:
        rank.answer()
    return World(ranks[:1], ranks[1:])


@DIFFERENCES
@pytest.mark.parametrize("locked", [Role.CONTEXT, Role.GENERATION], ids=lambda role: role.value)
def test_a_locked_worker_refuses_a_peer_whose_plugins_differ_by_name(
    ranks: list[RankProcess], sites: dict[str, Paths], other: str, says: list[str], locked: Role
) -> None:
    world = opened(
        ranks,
        order(Role.CONTEXT, sites["first"], locked=locked is Role.CONTEXT),
        order(Role.GENERATION, sites[other], locked=locked is Role.GENERATION),
    )

    world.prefill(1, [len(PROMPT)])
    world.receive(1)

    (end,) = world.ends(world.generation)
    assert (end["outcome"], end["error"]) == ("failed", "HandshakeError")
    assert all(each in end["message"] for each in says)
    assert "--locked" in end["message"]


@pytest.mark.parametrize("pairing", PAIRINGS[1:], ids=str)
def test_the_native_runtime_is_locked_too(ranks: list[RankProcess], sites: dict[str, Paths], pairing: Pairing) -> None:
    world = opened(
        ranks,
        order(Role.CONTEXT, sites["first"], locked=True, pairing=pairing),
        order(Role.GENERATION, sites["rebuilt"], locked=True, pairing=pairing),
    )

    world.prefill(1, [len(PROMPT)])
    world.receive(1)

    (end,) = world.ends(world.generation)
    assert (end["outcome"], end["error"]) == ("failed", "HandshakeError")
    assert "plugins.digest: {'acme': 'sha256:" in end["message"]


def test_workers_that_are_not_locked_are_warned_by_name_and_hand_over(
    ranks: list[RankProcess], sites: dict[str, Paths]
) -> None:
    world = opened(
        ranks,
        order(Role.CONTEXT, sites["first"], locked=False),
        order(Role.GENERATION, sites["rebuilt"], locked=False),
    )

    world.prefill(1, [len(PROMPT)])
    world.receive(1)

    assert [end["outcome"] for end in world.ends()] == ["completed", "completed"]
    (warning,) = (each for link in ranks[0].ask("status")["peers"] for each in link["warnings"])
    assert warning.startswith("plugins.digest: {'acme': 'sha256:")
    assert "other files" in warning


def test_two_locked_workers_with_one_set_installed_apart_hand_over(
    ranks: list[RankProcess], sites: dict[str, Paths]
) -> None:
    world = opened(
        ranks, order(Role.CONTEXT, sites["first"], locked=True), order(Role.GENERATION, sites["again"], locked=True)
    )

    world.prefill(1, [len(PROMPT)])
    world.receive(1)

    assert [end["outcome"] for end in world.ends()] == ["completed", "completed"]


@DIFFERENCES
def test_a_rank_whose_plugins_differ_cannot_join(
    ranks: list[RankProcess], sites: dict[str, Paths], other: str, says: list[str]
) -> None:
    wanted = orders(Role.CONTEXT, Worker(Topology(tensor=2)), GEOMETRY, PAIRINGS[0])
    for rank, each, site in zip(ranks, wanted, ("first", other), strict=True):
        rank.tell("open", order=replace(each, path=sites[site]))

    for rank in ranks:
        with pytest.raises(RankError) as caught:
            rank.answer()
        assert "rank 1 at tcp://" in str(caught.value)
        assert "cannot join" in str(caught.value)
        assert all(each in str(caught.value) for each in says)
        assert "start all ranks with the same plugins" in str(caught.value)


def test_ranks_with_one_set_installed_apart_join(ranks: list[RankProcess], sites: dict[str, Paths]) -> None:
    wanted = orders(Role.CONTEXT, Worker(Topology(tensor=2)), GEOMETRY, PAIRINGS[0])
    for rank, each, site in zip(ranks, wanted, ("first", "again"), strict=True):
        rank.tell("open", order=replace(each, path=sites[site]))

    assert all(rank.answer().startswith("tcp://") for rank in ranks)
