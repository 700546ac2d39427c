"""Which page runs in which of the test files, each of which one worker of pytest-xdist takes as a whole."""

from pathlib import Path

from docs.environment import ROOT

_BY_FILE = {
    "start": ["README.md", "CONTRIBUTING.md", "docs/index.md", "docs/quickstart.md", "docs/architecture.md"],
    "extend": [
        "docs/write-a-model-plugin.md",
        "docs/write-a-backend.md",
        "docs/test-your-plugin.md",
        "docs/testing.md",
        "examples/*/README.md",
    ],
    "operate": ["docs/operat*.md", "docs/serving.md", "docs/metrics.md", "docs/preflight.md", "docs/lock.md"],
}


def all_pages() -> list[Path]:
    """Every page that somebody reads: the site, the front of the repository, the examples."""
    return sorted(
        [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/*.md"), *ROOT.glob("core/native/*.md")]
    )


def pages_of(file: str) -> list[Path]:
    """The pages of one test file; those that none names belong to ``reference``."""
    named = {file: {path for pattern in patterns for path in ROOT.glob(pattern)} for file, patterns in _BY_FILE.items()}
    wanted = named[file] if file in named else set(all_pages()) - set().union(*named.values())
    return sorted(wanted)


def name_of(path: Path) -> str:
    """A page's name in a test's id."""
    return str(path.relative_to(ROOT))
