"""Console blocks: their commands, and what is compared of what they print."""

import re
from dataclasses import dataclass

from docs.blocks import Block

_STATUS = re.compile(r"\s+# exit status (\d+)\s*$")
_REMARK = re.compile(r"\s{2,}# .*$")


@dataclass(frozen=True)
class Command:
    """One command of a console block, what is shown below it, and the exit status that it must have."""

    where: str
    text: str
    shown: tuple[str, ...]
    status: int

    @property
    def in_background(self) -> bool:
        return self.text.endswith(" &")


def commands(block: Block) -> list[Command]:
    """Cut a console block into its commands; a line that ends with a backslash, or begins with ``> ``, goes on.

    Raises:
        ValueError: no prompt in the first line, or a short form for more than one command.
    """
    found: list[tuple[int, list[str], list[str]]] = []
    for number, line in enumerate(block.text.splitlines(), block.line + 1):
        if line.startswith("$ "):
            found.append((number, [line[2:]], []))
        elif not found:
            raise ValueError(f"{block.page}:{number}: a console block begins with '$ '")
        elif not found[-1][2] and (found[-1][1][-1].endswith("\\") or line.startswith("> ")):
            found[-1][1].append(line.removeprefix("> "))
        else:
            found[-1][2].append(line.rstrip())
    made = [_command(f"{block.page}:{number}", "\n".join(lines), shown) for number, lines, shown in found]
    if block.short is None:
        return made
    if len(made) != 1:
        raise ValueError(f"{block.where}: <!-- run: … --> goes with one command, and here are {len(made)}")
    return [Command(made[0].where, block.short, made[0].shown, made[0].status)]


def _command(where: str, text: str, shown: list[str]) -> Command:
    status = _STATUS.search(text)
    text = _STATUS.sub("", text)
    while shown and not shown[-1]:
        shown.pop()
    return Command(where, _REMARK.sub("", text).rstrip(), tuple(shown), int(status[1]) if status else 0)


def matches(shown: tuple[str, ...], printed: str) -> bool:
    """Whether what is printed is what is shown: ``…`` in a line is anything, on a line of its own any lines.

    How wide the columns of a table are does not matter.
    """
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == "…" else re.escape(_narrow(line)).replace("…", ".*?") + r"\n" for line in shown
    )
    lines = "".join(f"{_narrow(line)}\n" for line in printed.rstrip().splitlines())
    return re.fullmatch(pattern, lines) is not None


def _narrow(line: str) -> str:
    return re.sub(r"(?<=\S) {2,}", " ", line.rstrip())
