"""The documentation agrees with the code: generated parts are current, links lead somewhere, commands exist."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def write_docs():
    spec = importlib.util.spec_from_file_location("write_docs", ROOT / "tools" / "write_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_parts_are_current():
    module = write_docs()
    stale = [str(path.relative_to(ROOT)) for path, text in module.pages().items() if path.read_text() != text]
    assert not stale, f"run {module.COMMAND}: {stale}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} points at {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_the_text_exist(page):
    for module in re.findall(r"python -m (moejax\.\w+)", page.read_text()):
        assert importlib.util.find_spec(module), f"{page.name} names {module}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_in_the_text_exist(page):
    """Paths in backticks, from the root or from the package."""
    folders = "moejax|parallel|models|moe|data|observe|checkpoint|benches|tools"
    for name in re.findall(rf"`((?:{folders})/[\w/.]+\.py)`", page.read_text()):
        assert (ROOT / name).exists() or (ROOT / "moejax" / name).exists(), f"{page.name} names {name}"
