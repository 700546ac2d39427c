import subprocess
import sys

SAID = r"""
import os
from kvferry.cli.kept_stdout import kept_stdout

print("before")
try:
    with kept_stdout() as stdout:
        print("of a plugin")
        os.system("echo of a child")
        os.write(1, b"of native code\n")
        print("the answer", file=stdout, flush=True)
        raise RuntimeError
except RuntimeError:
    print("after")
"""


def run(prefix=""):
    return subprocess.run([sys.executable, "-c", prefix + SAID], capture_output=True, text=True, check=True, timeout=60)


def test_only_the_answer_is_on_stdout():
    done = run()
    assert done.stdout.splitlines() == ["before", "the answer", "after"]
    assert sorted(done.stderr.splitlines()) == ["of a child", "of a plugin", "of native code"]


def test_a_stdout_that_is_somebody_elses_stays():
    done = run("import io, sys; sys.stdout = io.StringIO(); ")
    assert "the answer" not in done.stdout
    assert done.stdout.splitlines() == ["of a child", "of native code"]
