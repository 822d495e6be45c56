"""Links between pages, and paths that pages name, lead somewhere; pages keep to plain English."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, REPOSITORY, anchors, codes, links, prose

_IN_REPOSITORY = re.compile(
    r"^(?:moebatch|tests|policies|jobs|docs|demo)/[\w./-]+$|^[A-Z]+(?:\.md)?$|^Makefile$"
)
_IDIOMS = re.compile(
    r"\b(?:whoever|somebody|nobody|so-manieth|is had back|at hand|is told|at work)\b", re.IGNORECASE
)
_MADE_BY_RUNS = re.compile(r"^jobs/demo\.(?:answers|submit)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}: there is no {target}"
        assert REPOSITORY in (target, *target.parents), f"{page.name}: {link} is elsewhere"
        if anchor:
            assert anchor in anchors(target.read_text()), f"{page.name}: {link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_paths_in_the_repository_exist(page: Path) -> None:
    """Where things are is said by path, so a change that moves them moves this too."""
    if page.name == "CHANGELOG.md":
        return
    for code in codes(page.read_text()):
        if "/" in code and _IN_REPOSITORY.match(code) and not _MADE_BY_RUNS.match(code):
            assert (REPOSITORY / code).exists(), f"{page.name}: there is no {code}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_sentences_name_their_actor_and_use_the_terms_of_the_field(page: Path) -> None:
    found = _IDIOMS.findall(prose(page.read_text()))
    assert not found, f"{page.name}: {found}"


def test_every_page_can_be_reached_from_the_index() -> None:
    index = REPOSITORY / "docs/index.md"
    targets = (link.partition("#")[0] for link in links(index.read_text()))
    assert set(PAGES) <= {index, *((index.parent / target).resolve() for target in targets)}
