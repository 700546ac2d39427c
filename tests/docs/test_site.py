import os
import re
import subprocess
import sys

import pytest
from docs.environment import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The whole site, built as strictly as CI builds it."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_in_the_site(site):
    assert all(
        (site / path.relative_to(ROOT / "docs")).with_suffix(".html").exists() for path in ROOT.glob("docs/**/*.md")
    )


def test_nothing_in_the_site_is_fetched_from_elsewhere(site):
    fetched = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=\"?((?:https?:)?//[^\"\s>]+)")
    found = {where for page in site.glob("**/*.html") for where in fetched.findall(page.read_text())}
    assert not found


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_the_front_pages_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []
