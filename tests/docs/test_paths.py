"""Files that the documents name exist, pages that they link to, and names that docs/find-your-way.md finds in files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lib.docs.configuration import SECTIONS

from tests.support.modules import is_one_of_many

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
ROOMS = "tridentserve|profiler|placement|dispatch|deployments|traces|scripts|tests"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(rf"(?<![\w./-])((?:{ROOMS})/[\w./-]*\w\.(?:py|yaml|csv|txt|json))(?![\w-])", text))
    assert not [path for path in sorted(named) if not (ROOT / path).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    lost = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if path.startswith(("http://", "https://")):
            continue
        target = page if not path else (page.parent / path).resolve()
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(link)
    assert not lost


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# The entries of the page that leads to the code: each question with its answer.
ENTRIES = re.split(r"^##+ ", (ROOT / "docs" / "find-your-way.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
ANSWERS = {question: answer for question, _, answer in (entry.partition("\n") for entry in ENTRIES) if "?" in question}


# All words of the repository's code.
WORDS = {
    word
    for room in ROOMS.split("|")
    for path in (ROOT / room).rglob("*.py")
    for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))
}


def test_every_question_has_one_answer() -> None:
    assert len(ANSWERS) >= 50
    assert len(ANSWERS) == sum("?" in entry.partition("\n")[0] for entry in ENTRIES)
    assert all(answer.strip() for answer in ANSWERS.values())


@pytest.mark.parametrize("question", ANSWERS)
def test_an_answer_names_few_files_and_directories(question: str) -> None:
    """Directories count too: an answer that names them sends its reader to all of their files."""
    named = set(re.findall(rf"(?<![\w./-])(?:{ROOMS})/[\w./-]+\.\w+|[\w-]+\.md(?![\w-])", ANSWERS[question]))
    assert named
    paths = re.findall(rf"(?<![\w./-])(?:{ROOMS})/[\w./-]*", ANSWERS[question])
    directories = {path.rstrip("./") for path in paths if (ROOT / path.rstrip("./")).is_dir()}
    assert len(named | directories) <= 3


@pytest.mark.parametrize("question", ANSWERS)
def test_names_behind_a_file_are_defined_there(question: str) -> None:
    lost: list[tuple[str, str]] = []
    path_of = rf"`((?:{ROOMS})/[\w./-]+\.py)`"
    # The names stand in brackets behind the file, or in the same brackets as the file.
    for pattern in (rf"{path_of}\s+\((`[^)]*)\)", rf"\({path_of},\s+(`[^)]*)\)"):
        for path, names in re.findall(pattern, ANSWERS[question]):
            code = (ROOT / path).read_text(encoding="utf-8")
            lost += [(path, name) for name in re.findall(r"`([^`]+)`", names) if not is_defined(name, code)]
    assert not lost


@pytest.mark.parametrize("question", ANSWERS)
def test_other_names_in_brackets_exist(question: str) -> None:
    """Names that stand in brackets away from their file."""
    brackets = re.findall(r"\((`[^()]*`)\)", ANSWERS[question])
    assert not {name for names in brackets for name in re.findall(r"`(\w+)`", names)} - WORDS


def test_every_module_is_named() -> None:
    """So that each is found by a question about what it does, or on the way of a request through the house."""
    pages = "".join(
        (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("find-your-way.md", "architecture.md")
    )
    modules = [path for room in ROOMS.split("|") if room != "tests" for path in sorted((ROOT / room).rglob("*.py"))]
    assert len(modules) > 300
    assert not [path for path in filter(has_own_entry, modules) if path.relative_to(ROOT).as_posix() not in pages]


def has_own_entry(path: Path) -> bool:
    """True when a page has to name a module. Its directory stands for a package's `__init__`, for one family of many,
    and for one policy of many."""
    return path.name != "__init__.py" and not is_one_of_many(path)


def is_defined(name: str, code: str) -> bool:
    """True when a module has a class, function, attribute or constant of this name."""
    definition = rf"^\s*(?:(?:async )?def |class ){re.escape(name)}\b|^\s*(?:self\.)?{re.escape(name)}\s*[:=]"
    return re.search(definition, code, re.MULTILINE) is not None


def test_keys_of_the_configuration_exist() -> None:
    known = {f"{section}.{key}" for section, model in SECTIONS.items() for key in model.model_fields}
    sections = "|".join(re.escape(section) for section in SECTIONS)
    named = set(re.findall(rf"`((?:{sections})\.\w+)(?:: \w+)?`", "".join(ANSWERS.values())))
    assert len(named) > 20
    assert named <= known
