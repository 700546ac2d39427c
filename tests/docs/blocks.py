"""The fenced blocks of a page, in order, each with what its first line and the comment before it say."""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from markdown_it import MarkdownIt

RUN = {"python", "console", "yaml", "toml", "json"}
SHOWN = {"text", "mermaid", "cpp"}
_NAME = re.compile(r"(?:#|//) ([\w./-]+\.\w+)\s*")
_SHORT = re.compile(r"<!-- run: (.+) -->\s*", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block; ``line`` is that of its opening fence, ``short`` the command to run instead."""

    page: str
    line: int
    language: str
    text: str
    short: str | None

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @cached_property
    def file(self) -> str | None:
        """The file that the block is, as its first line says: ``# engine.yaml``."""
        named = _NAME.fullmatch(self.text.partition("\n")[0])
        return named[1] if named else None


def read_blocks(path: Path, name: str) -> list[Block]:
    """Read a page's blocks.

    Raises:
        ValueError: an indented block, which nobody could run, or a language that nobody knows what to do with.
    """
    tokens = MarkdownIt("commonmark").parse(path.read_text())
    blocks = []
    for before, token in zip([None, *tokens], tokens, strict=False):
        line = (token.map or [0])[0] + 1
        if token.type == "code_block":
            raise ValueError(f"{name}:{line}: an indented block; put it between fences, with its language")
        if token.type == "fence":
            short = _SHORT.fullmatch(before.content) if before is not None and before.type == "html_block" else None
            blocks.append(_block(name, line, token.info, token.content, short[1].strip() if short else None))
    return blocks


def _block(page: str, line: int, info: str, text: str, short: str | None) -> Block:
    language = info.split()[0] if info.split() else ""
    if language not in RUN | SHOWN:
        known = ", ".join(sorted(RUN | SHOWN))
        raise ValueError(f"{page}:{line}: {language!r} is no language of a block here: {known}")
    if language == "text" and re.match(r"\$ |kvferry [a-z]+ --", text):
        raise ValueError(f"{page}:{line}: a command is a console block, and is run; <!-- run: … --> names a short form")
    if short and language != "console":
        raise ValueError(f"{page}:{line}: <!-- run: … --> stands before a console block alone")
    return Block(page, line, language, text, short)
