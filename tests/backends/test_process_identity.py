import subprocess
import sys

import msgspec
import pytest

from kvferry_backends.process_identity import ProcessWatch, own_identity


def test_a_living_process_is_not_gone():
    assert not ProcessWatch(own_identity()).gone


def test_a_process_is_gone_when_it_has_ended_though_nobody_reaped_it():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        watch = ProcessWatch(_identity_of(child.pid))
        assert not watch.gone
        child.kill()
        while not watch.gone:
            pass
        watch.close()
        assert watch.gone


def test_a_process_that_had_ended_before_is_gone():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        identity = _identity_of(child.pid)
    assert ProcessWatch(identity).gone


def test_another_process_with_the_same_id_does_not_stand_for_it():
    assert ProcessWatch(msgspec.structs.replace(own_identity(), start_ticks=1)).gone


@pytest.mark.parametrize("field", ["boot_id", "pid_namespace", "network_namespace"])
def test_a_process_elsewhere_is_never_said_to_be_gone(field):
    other = "another" if field == "boot_id" else 1
    identity = msgspec.structs.replace(own_identity(), pid=4_000_000, **{field: other})
    assert not ProcessWatch(identity).gone


def _identity_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return msgspec.structs.replace(own_identity(), pid=pid, start_ticks=ticks)
