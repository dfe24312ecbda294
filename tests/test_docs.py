"""What the pages point to is there, and the commands that they tell are understood."""

import re
import shlex
from pathlib import Path

import pytest

from scoff.commands.reproduce import reproduce
from scoff.commands.train import parse_training
from scoff.experiments import reproduce as work

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```.*?^```", re.M | re.S)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = sorted((ROOT / "results").glob("*.md"))  # commands of older commits may be gone


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def commands(page: Path) -> list[str]:
    joined = "\n".join(BLOCK.findall(page.read_text())).replace("\\\n", " ")
    return re.findall(r"^ *(scoff (?:train|reproduce) (?!--resume).*)$", joined, re.M)


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=lambda page: page.name)
def test_links(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", page.read_text())):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands(page, monkeypatch, tmp_path):
    monkeypatch.setattr(work, "reproduce", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    for command in commands(page):
        words = shlex.split(command.split(" # ")[0])
        if words[1] == "train":
            parse_training(words[2], words[3:])
        else:
            reproduce(words[2:])


RUN = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
EXAMPLES = [  # others take long, or need a GPU or files
    pytest.param(block, id=f"{name}-{number}")
    for name in ("layers", "video", "worlds")
    for number, block in enumerate(RUN.findall((ROOT / "docs" / f"{name}.md").read_text()))
    if ".cuda()\n" not in block and "FILE.h5" not in block
]


@pytest.mark.parametrize("block", EXAMPLES)
def test_examples_run(block):
    exec(block, {})


def test_there_are_commands():
    assert len([command for page in PAGES for command in commands(page)]) > 10
