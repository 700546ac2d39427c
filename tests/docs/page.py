"""Runs all blocks of one page, in order, in a folder of its own."""

import json
import os
import re
import select
import signal
import subprocess
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from docs.blocks import SHOWN, Block, read_blocks
from docs.console import Command, commands, matches
from docs.environment import ROOT, copy_examples, free_ports, make_environment, replace_ports

from kvferry.config import parse_engine_args
from kvferry.config.schema import EngineArgs
from kvferry.integrations.checkpoints import find_checkpoint

SECONDS = 400
"""How long one block may take, on a machine that has other work."""
PAIR_PORTS = ("8001", "8002")
"""Where pages that start no workers find the pair that all pages share: context, generation."""


class BlockFailed(AssertionError):
    """A block that does not do what its page says."""


@dataclass
class Page:
    """A page under way: its folder and environment, what runs in the background, and what ran."""

    name: str
    folder: Path
    environment: dict[str, str]
    ports: dict[str, str]
    background: list[subprocess.Popen[str]] = field(default_factory=list)
    python: subprocess.Popen[str] | None = None
    answers: int = -1
    ran: list[str] = field(default_factory=list)

    def run(self, block: Block) -> None:
        """Run one block, as its language and its first line ask for."""
        started = time.monotonic()
        if block.file:
            self._write(block)
        if block.language == "python":
            self._run_python(block)
        elif block.language == "console":
            for command in commands(block):
                self._run_command(command)
        elif block.language not in SHOWN:
            _check_document(block)
        self.ran.append(f"{block.where} {block.language} {time.monotonic() - started:.1f} s")

    def close(self) -> None:
        """End what still runs; whoever does not end well has failed."""
        for process in self.background:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        endings = {}
        for process in self.background:
            process.communicate(timeout=SECONDS)
            endings[process.args[2]] = process.returncode
        if self.python is not None:
            self.python.communicate(timeout=SECONDS)
            endings["python"] = self.python.returncode
            os.close(self.answers)
        if bad := {what: status for what, status in endings.items() if status not in (0, -signal.SIGTERM)}:
            raise BlockFailed(f"{self.name}: at its end {bad}\n{self._log()}")

    def kill(self) -> None:
        """End what still runs, at once."""
        for process in [*self.background, *([self.python] if self.python else [])]:
            process.kill()
            process.communicate()
        if self.python:
            os.close(self.answers)

    def _write(self, block: Block) -> None:
        text = block.text if block.language != "json" else block.text.partition("\n")[2]
        path = self.folder / block.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(replace_ports(text, self.ports))

    def _run_python(self, block: Block) -> None:
        if block.file and Path(block.file).name.startswith("test_"):
            self._run_command(Command(block.where, f"pytest -q -p no:cacheprovider {block.file}", (), 0))
            return
        if self.python is None:
            self.python = self._start_python()
        order = {"page": str(ROOT / block.page), "line": block.line, "code": replace_ports(block.text, self.ports)}
        print(json.dumps(order), file=self.python.stdin, flush=True)
        ready, _, _ = select.select([self.answers], [], [], SECONDS)
        answer = os.read(self.answers, 1 << 20) if ready else b""
        if not answer:
            raise BlockFailed(f"{block.where}: no answer from python\n{self._log()}")
        if error := json.loads(answer)["error"]:
            raise BlockFailed(f"{block.where}: {error}")

    def _start_python(self) -> subprocess.Popen[str]:
        self.answers, theirs = os.pipe()
        child = str(Path(__file__).with_name("python_child.py"))
        with (self.folder / "python.log").open("w") as log:
            process = subprocess.Popen(
                [str(self.folder.parent / "venv" / "bin" / "python"), child, str(theirs)],
                cwd=self.folder,
                env=self.environment,
                pass_fds=[theirs],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )
        os.close(theirs)
        return process

    def _run_command(self, command: Command) -> None:
        text = replace_ports(self._with_processes(command.text), self.ports)
        if command.in_background:
            self._start(command, text.removesuffix("&").strip())
            return
        done = subprocess.run(
            ["bash", "-c", _IN_ONE_SHELL, "bash", text],
            cwd=self.folder,
            env={**self.environment, "STATE": str(self.folder.parent / "shell")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        self._compare(command, done)

    def _compare(self, command: Command, done: subprocess.CompletedProcess[str]) -> None:
        said = f"{command.where}: $ {command.text}\n{done.stdout}{done.stderr}"
        if done.returncode != command.status:
            raise BlockFailed(f"{said}\nexit status {done.returncode}, not {command.status}\n{self._log()}")
        back = {real: named for named, real in self.ports.items()}
        printed = [replace_ports(text, back) for text in (done.stdout, done.stderr, done.stderr + done.stdout)]
        if command.shown and not any(matches(command.shown, text) for text in printed):
            shown = "\n".join(command.shown)
            raise BlockFailed(f"{said}\nis not what the page shows:\n{shown}")

    def _start(self, command: Command, text: str) -> None:
        """Start what goes on in the background; its first line says that it is ready."""
        with (self.folder / f"background-{len(self.background) + 1}.log").open("w") as log:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {text}"],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.background.append(process)
        ready, _, _ = select.select([process.stdout], [], [], SECONDS)
        line = process.stdout.readline() if ready else ""
        if not line:
            raise BlockFailed(f"{command.where}: $ {command.text}\nprinted no line\n{self._log()}")
        self._compare(command, subprocess.CompletedProcess(text, command.status, line, ""))

    def _with_processes(self, text: str) -> str:
        """Let ``%1`` be the id of the first process in the background."""
        if not text.startswith("kill "):
            return text
        return re.sub(r"%(\d)", lambda found: str(self.background[int(found[1]) - 1].pid), text)

    def _log(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-4000:]}" for path in self.folder.glob("*.log"))


_IN_ONE_SHELL = """
[ -e "$STATE" ] && . "$STATE"
eval "$1"
status=$?
{ export -p; printf 'cd %q\\n' "$PWD"; } > "$STATE"
exit $status
"""
"""A command finds the variables and the folder that the ones before it left."""


def _check_document(block: Block) -> None:
    """A document must be one; what looks like an engine configuration must be a right one."""
    if block.language == "toml":
        tomllib.loads(block.text)
    elif block.language == "json":
        json.loads(block.text if block.file is None else block.text.partition("\n")[2])
    elif isinstance(document := yaml.safe_load(block.text), dict) and set(document) <= set(EngineArgs.model_fields):
        parse_engine_args(document)


def run_page(path: Path, folder: Path, shared_ports: Callable[[], Mapping[str, str]]) -> list[str]:
    """Run a page's blocks; return what ran, a line each.

    Raises:
        BlockFailed: naming the page and the line.
    """
    name = str(path.relative_to(ROOT))
    blocks = read_blocks(path, name)
    text = "\n".join(block.short or block.text for block in blocks if block.language not in SHOWN)
    (folder / "page").mkdir()
    if "examples/" in text:
        copy_examples(folder / "page")
    wants_pair = any(f"127.0.0.1:{port}" in text and f"--port {port}" not in text for port in PAIR_PORTS)
    if "smollm2" in text:
        find_checkpoint("smollm2")  # the first start on a machine converts it, which some pages leave to others
    ports = free_ports(text, shared_ports() if wants_pair else {})
    page = Page(name, folder / "page", make_environment(folder), ports)
    try:
        for block in blocks:
            page.run(block)
    except BaseException:
        page.kill()
        raise
    page.close()
    return page.ran
