import errno
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvferry.cache.disk_store import FOLDER_PREFIX, HEADER_BYTES, DiskStore
from kvferry.cache.tier_blocks import Place
from kvferry.cache.tiers import Tiers, make_tiers
from kvferry_plugins.errors import ConfigError, CorruptBlockError

BLOCK = 1000
FILE = BLOCK + HEADER_BYTES
DEADLINE = 60.0


def data(number, nbytes=BLOCK):
    return np.random.default_rng(number).integers(0, 256, nbytes, dtype=np.uint8)


def wait_until(condition):
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


def loaded(tiers, block):
    out = np.zeros(block.nbytes, dtype=np.uint8)
    tiers.load(block, out)
    return out


def figures(tiers, group=0):
    return {each.tier: each for each in tiers.statistics(group)}


class GatedDisk(DiskStore):
    """A disk that writes when it may, and fails as it is told."""

    def __init__(self, path):
        super().__init__(path)
        self.may_write = threading.Event()
        self.may_write.set()
        self.error = None
        self.attempts = 0

    def write(self, serial, data):
        self.attempts += 1
        assert self.may_write.wait(DEADLINE)
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error), str(self.path))
        return super().write(serial, data)


@pytest.fixture
def make(tmp_path):
    made = []

    def make_tiers_of(host_blocks, disk_blocks=0, **options):
        path = options.pop("path", tmp_path)
        made.append(Tiers(host_blocks * BLOCK, disk_blocks * FILE, path, **options))
        return made[-1]

    yield make_tiers_of
    for tiers in made:
        tiers.close()


def test_a_block_comes_back_as_it_was(make):
    tiers = make(4)
    block = tiers.store(data(1))
    assert (loaded(tiers, block) == data(1)).all()
    assert figures(tiers)["host"].blocks == 1
    assert figures(tiers)["host"].nbytes == BLOCK


def test_a_copy_is_kept_so_that_the_source_may_change(make):
    tiers = make(4)
    source = data(1)
    block = tiers.store(source)
    source[:] = 0
    assert (loaded(tiers, block) == data(1)).all()


def test_without_a_disk_the_least_recently_used_block_is_dropped(make):
    tiers = make(3)
    blocks = [tiers.store(data(number)) for number in range(3)]
    loaded(tiers, blocks[0])
    tiers.store(data(3))
    assert [block.dropped for block in blocks] == [False, True, False]
    assert figures(tiers)["host"].dropped == 1
    with pytest.raises(CorruptBlockError, match="dropped"):
        loaded(tiers, blocks[1])


def test_what_host_memory_has_no_room_for_goes_to_the_disk_and_its_handle_stays_valid(make):
    tiers = make(2, 8)
    blocks = [tiers.store(data(number)) for number in range(6)]
    wait_until(lambda: sum(block.place is Place.DISK for block in blocks) == 4)
    for number, block in enumerate(blocks):
        assert (loaded(tiers, block) == data(number)).all()
    assert (figures(tiers)["host"].blocks, figures(tiers)["disk"].blocks) == (2, 4)
    assert figures(tiers)["disk"].loaded == 4
    assert tiers.memory_bytes == 2 * BLOCK


def test_a_full_disk_tier_drops_its_least_recently_used_block_and_its_file(make, tmp_path):
    tiers = make(1, 2)
    blocks = [tiers.store(data(number)) for number in range(5)]
    assert [block.dropped for block in blocks] == [True, True, False, False, False]
    wait_until(lambda: len(list(tmp_path.glob("*/*.block"))) == 2)


def test_a_disk_alone_is_enough(make):
    tiers = make(0, 4)
    block = tiers.store(data(1))
    assert (loaded(tiers, block) == data(1)).all()
    wait_until(lambda: block.place is Place.DISK)
    assert (loaded(tiers, block) == data(1)).all()
    assert tiers.memory_bytes == 0


def test_blocks_of_differing_sizes_share_the_limit_and_are_counted_a_group(make):
    tiers = make(2)
    small = [tiers.store(data(number, 500), group=1) for number in range(4)]
    large = tiers.store(data(9, 1500), group=0)
    assert [block.dropped for block in small] == [True, True, True, False]
    assert figures(tiers, 0)["host"].nbytes == 1500
    assert figures(tiers, 1)["host"].nbytes == 500
    assert (loaded(tiers, large) == data(9, 1500)).all()
    assert tiers.store(data(1, 2001)) is None
    assert not large.dropped


def test_memory_of_one_size_is_let_go_when_another_size_needs_it(make):
    tiers = make(8)
    for number in range(100):
        block = tiers.store(data(number, 100 + number))
        assert (loaded(tiers, block) == data(number, 100 + number)).all()
        assert tiers._memory.allocated <= 8 * BLOCK


def test_a_pinned_block_is_never_dropped_for_another(make):
    tiers = make(2)
    pinned = [tiers.store(data(number), pinned=True) for number in range(2)]
    assert tiers.store(data(2)) is None
    assert tiers.store(data(3), pinned=True) is None
    assert not any(block.dropped for block in pinned)
    tiers.drop(pinned[0])
    assert tiers.store(data(4)) is not None
    assert (loaded(tiers, pinned[1]) == data(1)).all()


def test_a_block_can_be_pinned_for_a_while(make):
    tiers = make(2)
    first, second = (tiers.store(data(number)) for number in range(2))
    tiers.set_pinned(first, True)
    third = tiers.store(data(2))
    assert (first.dropped, second.dropped) == (False, True)
    tiers.set_pinned(first, False)
    tiers.set_pinned(second, True)
    assert all(tiers.store(data(number), pinned=True) is not None for number in (3, 4))
    assert (first.dropped, third.dropped) == (True, True)


def test_a_block_that_cannot_be_kept_costs_no_other_block(make):
    tiers = make(3)
    pinned = [tiers.store(data(number), pinned=True) for number in range(2)]
    cached = tiers.store(data(2))
    assert tiers.store(data(3, 2 * BLOCK), pinned=True) is None
    assert not cached.dropped
    assert not any(block.dropped for block in pinned)


def test_pinned_blocks_wait_for_the_disk_rather_than_be_refused(make):
    tiers = make(1, 20, write_behind_bytes=BLOCK)
    blocks = [tiers.store(data(number), pinned=True) for number in range(20)]
    assert None not in blocks
    for number, block in enumerate(blocks):
        assert (loaded(tiers, block) == data(number)).all()
    assert tiers.store(data(20), pinned=True) is not None
    assert tiers.store(data(21), pinned=True) is None  # 1 in memory, 20 on disk


def test_a_slow_disk_holds_up_nobody_and_its_blocks_are_read_from_the_queue(make, tmp_path):
    disk = GatedDisk(tmp_path)
    disk.may_write.clear()
    tiers = make(1, 20, write_behind_bytes=3 * BLOCK, disk=disk)
    blocks = [tiers.store(data(number)) for number in range(10)]
    kept = [(number, block) for number, block in enumerate(blocks) if not block.dropped]
    assert [number for number, _ in kept] == [0, 1, 2, 9]
    assert tiers.memory_bytes == 4 * BLOCK
    for number, block in kept:
        assert (loaded(tiers, block) == data(number)).all()
    disk.may_write.set()
    wait_until(lambda: tiers.memory_bytes == BLOCK)
    for number, block in kept:
        assert (loaded(tiers, block) == data(number)).all()


def test_a_block_dropped_while_it_is_written_leaves_neither_memory_nor_a_file(make, tmp_path):
    disk = GatedDisk(tmp_path)
    disk.may_write.clear()
    tiers = make(0, 4, disk=disk)
    block = tiers.store(data(1))
    wait_until(lambda: disk.attempts == 1)
    tiers.drop(block)
    tiers.drop(block)
    assert block.dropped
    assert figures(tiers)["disk"].blocks == 0
    disk.may_write.set()
    wait_until(lambda: tiers.memory_bytes == 0 and not list(tmp_path.glob("*/*.block")))


def test_a_pinned_block_gives_up_on_a_disk_that_gets_nothing_done(make, tmp_path):
    disk = GatedDisk(tmp_path)
    disk.may_write.clear()
    tiers = make(0, 4, write_behind_bytes=BLOCK, disk=disk, patience_seconds=0.05)
    assert tiers.store(data(1), pinned=True) is not None
    assert tiers.store(data(2), pinned=True) is None
    disk.may_write.set()


@pytest.mark.parametrize(
    ("error", "remedy"),
    [(errno.ENOSPC, "lower kv_cache_config.disk_cache_size"), (errno.EIO, "look at"), (errno.EROFS, "write there")],
    ids=["full", "broken", "read-only"],
)
def test_a_failing_disk_gets_nothing_more_is_reported_once_and_costs_no_pinned_block(
    make, tmp_path, caplog, error, remedy
):
    caplog.set_level(logging.INFO)
    disk = GatedDisk(tmp_path)
    disk.may_write.clear()
    disk.error = error
    tiers = make(1, 20, disk=disk)
    pinned = [tiers.store(data(number), pinned=True) for number in range(3)]
    cached = tiers.store(data(3))
    disk.may_write.set()
    wait_until(lambda: cached.dropped)
    assert tiers.disk_failures == 1
    for number in range(10, 14):
        assert tiers.store(data(number)) is None  # all of host memory is pinned
    for number, block in enumerate(pinned):
        assert (loaded(tiers, block) == data(number)).all()
    (message,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert str(tmp_path) in message
    assert os.strerror(error) in message
    assert remedy in message
    assert disk.attempts == 1
    tiers.drop(pinned[2])
    assert tiers.store(data(20)) is not None
    assert tiers.store(data(21)) is not None  # by dropping it: the disk is left alone
    assert figures(tiers)["host"].dropped == 1


def test_a_disk_that_failed_is_tried_again_and_gets_the_pinned_blocks_that_waited(make, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    disk = GatedDisk(tmp_path)
    disk.error = errno.ENOSPC
    tiers = make(0, 20, disk=disk, retry_seconds=0.05)
    block = tiers.store(data(1), pinned=True)
    wait_until(lambda: tiers.disk_failures >= 3)
    assert not block.dropped
    disk.error = None
    wait_until(lambda: block.place is Place.DISK)
    assert (loaded(tiers, block) == data(1)).all()
    levels = [record.levelname for record in caplog.records if "disk tier" in record.getMessage()]
    assert levels == ["WARNING", "INFO"]


def test_a_missing_folder_is_reported_at_the_start_and_used_once_it_is_there(make, tmp_path, caplog):
    tiers = make(1, 20, path=tmp_path / "absent", retry_seconds=0.05)
    assert "absent" in caplog.text
    assert "make that folder" in caplog.text
    (tmp_path / "absent").mkdir()
    kept = []

    def one_is_on_disk():
        kept.append(tiers.store(data(len(kept))))
        return any(block is not None and block.place is Place.DISK for block in kept)

    wait_until(one_is_on_disk)


def test_a_folder_that_vanishes_costs_its_blocks_and_nothing_else(make, tmp_path, caplog):
    tiers = make(1, 20)
    blocks = [tiers.store(data(number)) for number in range(3)]
    wait_until(lambda: blocks[1].place is Place.DISK)
    for file in [*tmp_path.glob("*/*"), *tmp_path.glob("*")]:
        file.unlink() if file.is_file() else file.rmdir()
    with pytest.raises(CorruptBlockError, match="cannot be read"):
        loaded(tiers, blocks[0])
    assert blocks[0].dropped
    assert tiers.disk_failures == 1
    assert (loaded(tiers, blocks[2]) == data(2)).all()
    assert "fails" in caplog.text


def test_an_unwritable_folder_is_reported(make, tmp_path, caplog):
    tiers = make(1, 20, path=Path("/sys"))  # where not even root makes a folder
    assert tiers.store(data(1)) is not None
    assert "let this user write there" in caplog.text


def test_a_folder_that_is_a_file_is_reported(make, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    tiers = make(1, 20, path=tmp_path / "file")
    assert [tiers.store(data(number)) is not None for number in range(3)] == [True] * 3
    assert "no existing folder" in caplog.text


def damage_cut(raw):
    return raw[:-1]


def damage_longer(raw):
    return raw + b"\0"


def damage_contents(raw):
    return raw[:-1] + bytes([raw[-1] ^ 1])


def damage_header(raw):
    return bytes([raw[0] ^ 1]) + raw[1:]


def damage_version(raw):
    return raw[:4] + bytes([raw[4] + 1]) + raw[5:]


def damage_all(raw):
    return b""


@pytest.mark.parametrize(
    "damage", [damage_cut, damage_longer, damage_contents, damage_header, damage_version, damage_all]
)
def test_a_damaged_file_is_never_served(make, tmp_path, damage):
    tiers = make(0, 4)
    block, other = tiers.store(data(1)), tiers.store(data(2))
    wait_until(lambda: {block.place, other.place} == {Place.DISK})
    (file,) = tmp_path.glob(f"*/{block.serial}.block")
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CorruptBlockError, match=str(file.name)):
        loaded(tiers, block)
    assert block.dropped
    assert figures(tiers)["disk"].dropped == 1
    assert tiers.disk_failures == 0
    assert (loaded(tiers, other) == data(2)).all()
    wait_until(lambda: not file.exists())


def test_a_file_of_another_block_is_never_served(make, tmp_path):
    tiers = make(0, 4)
    first, second = tiers.store(data(1)), tiers.store(data(2))
    wait_until(lambda: {first.place, second.place} == {Place.DISK})
    (folder,) = tmp_path.glob(f"{FOLDER_PREFIX}*")
    (folder / f"{second.serial}.block").replace(folder / f"{first.serial}.block")
    with pytest.raises(CorruptBlockError, match="another block"):
        loaded(tiers, first)


def test_a_file_that_somebody_removed_costs_its_block_alone(make, tmp_path):
    tiers = make(0, 4)
    first, second = tiers.store(data(1)), tiers.store(data(2))
    wait_until(lambda: {first.place, second.place} == {Place.DISK})
    (file,) = tmp_path.glob(f"*/{first.serial}.block")
    file.unlink()
    with pytest.raises(CorruptBlockError, match="is gone"):
        loaded(tiers, first)
    assert (loaded(tiers, second) == data(2)).all()
    assert tiers.disk_failures == 0
    assert (figures(tiers)["disk"].loaded, figures(tiers)["disk"].dropped) == (1, 1)


def test_closing_removes_all_files_and_drops_all_blocks(make, tmp_path):
    tiers = make(1, 4)
    blocks = [tiers.store(data(number)) for number in range(4)]
    tiers.close()
    tiers.close()
    assert list(tmp_path.iterdir()) == []
    assert all(block.dropped for block in blocks)
    assert tiers.memory_bytes == 0
    assert tiers.store(data(1)) is None


def test_files_are_for_this_user_only(make, tmp_path):
    tiers = make(0, 4)
    block = tiers.store(data(1))
    wait_until(lambda: block.place is Place.DISK)
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}


DIES = """
    import os, sys
    from pathlib import Path
    import numpy as np
    from kvferry.cache.tiers import Tiers
    tiers = Tiers(0, 10000, Path(sys.argv[1]))
    block = tiers.store(np.zeros(100, dtype=np.uint8))
    while block.file is None:
        pass
    print("stored", flush=True)
    sys.stdin.read() if len(sys.argv) > 2 else None
    os._exit(0)
"""


def test_files_of_a_dead_process_are_removed_and_those_of_a_living_one_stay(make, tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(DIES), str(tmp_path)]
    subprocess.run(command, check=True, timeout=DEADLINE, stdout=subprocess.DEVNULL)
    (dead,) = tmp_path.iterdir()
    with subprocess.Popen([*command, "wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as alive:
        try:
            assert alive.stdout.readline() == b"stored\n"
            (living,) = tmp_path.iterdir()  # which removed the dead one's
            assert living != dead
            make(0, 4)
            assert len(list(living.glob("*.block"))) == 1
            assert len(list(tmp_path.iterdir())) == 2
        finally:
            alive.stdin.close()
            alive.wait(DEADLINE)
    make(0, 4)
    assert not living.exists()


FILLS = """
    import logging, resource, sys
    from pathlib import Path
    import numpy as np
    from kvferry.cache.tiers import Tiers
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
    tiers = Tiers(1000, 10**6, Path(sys.argv[1]))
    small = [tiers.store(np.full(900, number, dtype=np.uint8)) for number in range(3)]
    large = tiers.store(np.zeros(9000, dtype=np.uint8))
    while not large.dropped:
        pass
    out = np.empty(900, dtype=np.uint8)
    for number, block in enumerate(small):
        tiers.load(block, out)
        assert (out == number).all()
    print([file.name for file in Path(sys.argv[1]).glob("*/*.part")], tiers.disk_failures)
    tiers.close()
"""


def test_a_write_that_is_cut_off_leaves_no_file_and_no_damaged_block(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(FILLS), str(tmp_path)]
    run = subprocess.run(command, check=True, timeout=DEADLINE, capture_output=True, text=True)
    assert "[] 1" in run.stdout
    assert run.stdout.count("fails") == 1
    assert list(tmp_path.iterdir()) == []


def test_many_threads_share_the_tiers(make):
    tiers = make(4, 12, write_behind_bytes=3 * BLOCK)
    problems = []

    def use(seed):
        generator = np.random.default_rng(seed)
        mine = {}
        try:
            for step in range(150):
                number = seed * 1000 + step
                block = tiers.store(data(number), group=seed, pinned=bool(generator.integers(8) == 0))
                if block is not None:
                    mine[number] = block
                if mine and generator.integers(2):
                    chosen = int(generator.choice(list(mine)))
                    block = mine.pop(chosen)
                    try:
                        assert (loaded(tiers, block) == data(chosen)).all()
                    except CorruptBlockError:
                        assert block.dropped
                        assert not block.pinned
                    tiers.drop(block)
        except BaseException as error:
            problems.append(error)
        for block in mine.values():
            tiers.drop(block)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert not problems
    wait_until(lambda: tiers.memory_bytes == 0)
    assert {(each.blocks, each.nbytes) for group in range(4) for each in tiers.statistics(group)} == {(0, 0)}


def test_a_configuration_without_sizes_has_no_tiers():
    assert make_tiers({}, [10]) is None
    assert make_tiers({"host_cache_size": 0, "disk_cache_size": None, "disk_cache_path": "/x"}, [10]) is None


def test_a_configuration_makes_its_tiers(tmp_path):
    tiers = make_tiers({"host_cache_size": 100, "disk_cache_size": 200, "disk_cache_path": str(tmp_path)}, [10, 100])
    assert {each.tier for each in tiers.statistics(1)} == {"host", "disk"}
    tiers.close()


@pytest.mark.parametrize("name", ["host_cache_size", "disk_cache_size"])
def test_a_tier_smaller_than_a_block_is_refused_with_the_figures(tmp_path, name):
    with pytest.raises(ConfigError, match="99 bytes, and the largest block needs 1") as refusal:
        make_tiers({name: 99, "disk_cache_path": str(tmp_path)}, [10, 100])
    assert refusal.value.setting == f"kv_cache_config.{name}"


def test_a_disk_without_a_folder_is_refused():
    with pytest.raises(ConfigError, match="disk_cache_path"):
        make_tiers({"disk_cache_size": 1000}, [10])
