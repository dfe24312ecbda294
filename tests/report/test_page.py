import importlib.resources
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from scoff.report import (
    Estimate,
    Figure,
    Line,
    Lowest,
    RunInfo,
    Section,
    Table,
    affinity,
    curves,
    drawing,
    lines,
    to_svg,
    write_page,
)
from scoff.report.figures import COLOURS, SERIES, label_colour
from scoff.report.plots import tick_label

HOSTILE = "</style></svg><script>alert('x')</script>\"'`&$\\frac{ --> id=\"a\" url(#b)"
VOID = {"meta", "br", "img", "link", "hr", "input"}


class Reader(HTMLParser):
    """Checks that tags balance; collects tags, attributes and text."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def values(self, attribute: str) -> list[str]:
        return [attrs[attribute] or "" for _, attrs in self.tags if attribute in attrs]


def some_figures(name: str = "SCOFF") -> list[Figure]:
    texts = {"title": f"{name} figure", "caption": name}
    axes = {"x_label": name, "y_label": name}
    series = [
        Line(name, [200, 500, 1000], [0.1, 0.2, math.nan], [0.05, 0.1, 0.2], [0.2, 0.3, 0.4]),
        Line("GRU", [200, 500, 1000], [0.3, 0.0, math.inf], dashed=True),
    ]
    seeds = [[(step, 1 / (step + seed)) for step in range(1, 50)] for seed in (1, 2, 3)]
    probs = [[[0.9, 0.1], [0.2, math.nan]]] * 6
    marks = ["", name] * 3
    active = [[True, False]] * 6
    return [
        lines(series, x_log=True, y_log=True, **texts, **axes),
        curves({"GRU": seeds, name: seeds[:1]}, y_label=name, **texts),
        affinity(probs, columns=[0.5, name] * 3, marks=marks, active=active, **texts),
    ]


def write(path: Path, name: str = "SCOFF") -> str:
    table = Table(
        name,
        ["Model", name, "Error"],
        [(name,), (name, -3, Estimate(0.1, 0.02, 3)), ("b", None, Estimate(math.nan, None, 3))],
        note=name,
        highlight=Lowest([2], [1, 2]),
    )
    figures = some_figures(name)
    run = RunInfo(name, name, {name: {"lr": 1e-3, "list": [1, name]}}, {"os": name}, 75.0, 1234)
    write_page(
        path,
        title=name,
        lead=f"{name}\n\nUse `nn.GRU`.",
        sections=[Section(name, name, [table], figures), Section("Again", "", [], figures)],
        runs=[run],
        rerun=[name, "make"],
    )
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("page") / "deep" / "page.html")


def test_page_holds_everything(html: str) -> None:
    page = Reader(html)
    for text in (
        "0.100",
        "± 0.020",
        "−3",  # noqa: RUF001
        "nan",
        "1,234 parameters",
        "1 min",
        "SCOFF.list",
        "Table 1.",
        "Figure 6.",
        "How to rerun",
    ):
        assert text in page.text
    assert "<code>nn.GRU</code>" in html
    assert "<strong>0.100</strong>" in html
    assert ("html", {"lang": "en"}) in page.tags
    assert page.values("scope").count("col") == 3
    assert page.values("role").count("img") == 6


def test_headings_come_in_order(html: str) -> None:
    levels = [int(tag[1]) for tag, _ in Reader(html).tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_page_loads_nothing(html: str) -> None:
    page = Reader(html)
    assert not {"script", "link", "img", "iframe", "object", "base"} & {tag for tag, _ in page.tags}
    assert not page.values("src")
    assert all(value.startswith("#") for value in page.values("href"))
    assert "@import" not in html
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", html))
    assert set(re.findall(r"\w+=\"https?://[^\"]*\"", html)) == {
        'xmlns="http://www.w3.org/2000/svg"'
    }


def test_ids_are_unique_and_references_resolve(html: str) -> None:
    page = Reader(html)
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    used = set(re.findall(r"(?:href=\"|url\(|labelledby=\")#?([^\")]+)", html))
    assert used <= set(ids)


def test_same_input_gives_the_same_bytes(html: str, tmp_path: Path) -> None:
    assert write(tmp_path / "page.html") == html


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    html = write(tmp_path / "page.html", HOSTILE)
    page = Reader(html)
    assert not {"script"} & {tag for tag, _ in page.tags}
    assert len([tag for tag, _ in page.tags if tag == "style"]) == 1
    # 1 h1, 1 title, 1 lead, 2 of the section and at least its table, figures and run
    assert page.text.count("<script>alert(") >= 20
    # a label of a figure, cut into lines, and left as it was
    assert 'id="a" url(#b)' in page.text
    ids = page.values("id")
    assert len(ids) == len(set(ids))


def test_writing_is_atomic(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    with pytest.raises(AttributeError):
        write_page(path, title="", lead="", sections=[None], runs=[], rerun=[])
    assert path.read_text() == "old"
    write(path)
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


def test_empty_page(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page(path, title="t", lead="", sections=[Section("s")], runs=[], rerun=[])
    assert "How to rerun" not in Reader(path.read_text()).text


def test_a_table_of_many_columns_has_spreads_below_means(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    for count, look in ((10, "data"), (11, "data many")):
        table = Table(
            "t", ["", *"x" * (count - 1)], [["a", *[Estimate(1.0, 0.1, 3)] * (count - 1)]]
        )
        write_page(path, title="", lead="", sections=[Section("s", "", [table])], runs=[], rerun=[])
        assert ("table", {"class": look}) in Reader(path.read_text()).tags


def test_a_label_has_one_colour_on_a_page(html: str) -> None:
    for label, (light, dark) in zip(("SCOFF", "GRU"), SERIES, strict=False):
        assert re.findall(rf"{label_colour(label)}: (#\w+);", html) == [light, dark]
        assert all(f"var({label_colour(label)}," in figure.svg for figure in some_figures()[:2])


def test_labels_of_many_figures_have_the_colours_that_are_told_apart_best(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    figures = [Figure("", "", "<svg></svg>", labels) for labels in (("a", "b"), ("c",), ("c",))]
    write_page(path, title="", lead="", sections=[Section("s", figures=figures)], runs=[], rerun=[])
    for label, (light, dark) in zip("cab", SERIES, strict=False):
        found = re.findall(rf"{label_colour(label)}: (#\w+);", path.read_text())
        assert found == [light, dark]


def test_labels_of_one_figure_differ_where_there_are_more_than_colours(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    often, rare = tuple("abcde"), ("v", "w", "x", "y")
    many = [often, often, often, rare, (*often, "z")]
    figures = [Figure("", "", "<svg></svg>", labels) for labels in many]
    write_page(path, title="", lead="", sections=[Section("s", figures=figures)], runs=[], rerun=[])
    html = path.read_text()
    for figure in figures:
        colours = {
            re.findall(rf"{label_colour(label)}: (#\w+);", html)[0] for label in figure.labels
        }
        assert len(colours) == len(figure.labels)


@pytest.mark.parametrize(
    ("ticks", "labels"),
    [
        ([1.002, 1.008, 1.014], ["1.002", "1.008", "1.014"]),
        ([1.0, 1.025, 1.05], ["1", "1.025", "1.05"]),
        ([1 / 3, 2 / 3], ["0.333", "0.667"]),
        ([0.0, 0.1 + 0.2, 12_000.0], ["0", "0.3", "12,000"]),
        ([12_000.0, 12_005.0], ["12,000", "12,005"]),
        ([0.0502, 0.0504], ["0.0502", "0.0504"]),
    ],
)
def test_ticks_are_told_as_exactly_as_they_are_apart(ticks: list[float], labels: list[str]) -> None:
    assert [tick_label(tick, ticks) for tick in ticks] == labels


def test_colours_can_be_read_in_both_modes() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for pair in [*SERIES, COLOURS["muted"], COLOURS["accent"]]:
        for colour, paper in zip(pair, ("#ffffff", "#14171a"), strict=True):
            low, high = sorted([luminance(colour), luminance(paper)])
            assert (high + 0.05) / (low + 0.05) >= 4.5, colour


def test_own_drawings_follow_the_page() -> None:
    with drawing(100) as figure:
        figure.add_subplot(title="a < b").plot([1, 2], [3, 4], "k")
        svg = to_svg(figure, "<t>")
        assert svg == to_svg(figure, "<t>")
    assert "stroke: currentColor" in svg
    assert "#000000" not in svg
    assert 'aria-label="&lt;t&gt;"' in svg
    assert 'viewBox="0 0 400 100"' in svg
    assert ">a &lt; b</text>" in svg
    Reader(svg)


@pytest.mark.parametrize("values", [[], [math.nan, math.nan], [0.0, -1.0], [1.0, 1.0]])
@pytest.mark.parametrize("log", [False, True])
def test_plots_of_little_or_nothing(values: list[float], log: bool) -> None:
    texts = {"title": "t", "caption": "", "y_label": "y"}
    x = list(range(1, len(values) + 1))
    line = Line("a", x, values, values, values)
    for series in ([line], []):
        Reader(lines(series, x_label="x", x_log=log, y_log=log, **texts).svg)
    points = list(zip(x, values, strict=True))
    for runs in ({"a": [points, points[:1]]}, {"a": []}, {"": [points]}, {}):
        Reader(curves(runs, y_log=log, **texts).svg)


def test_what_has_no_place_is_a_cross_at_the_edge() -> None:
    texts = {"title": "t", "caption": "", "x_label": "x", "y_label": "y"}

    def crosses(y_log: bool, *y: float) -> int:
        line = Line("a", [1, 2, 3, 4], y, marker=False)
        return lines([line], y_log=y_log, **texts).svg.count("<use ")

    for y_log, lost in ((True, 3), (False, 2)):
        marks_of_ticks = crosses(y_log, 1.0, 1.0, 1.0, 1.0)
        assert crosses(y_log, 1.0, math.nan, math.inf, 0.0) == marks_of_ticks + lost


def test_a_curve_of_one_point_is_seen() -> None:
    for points, marks in ([(1, 2.0)], 1), ([(1, 2.0), (2, 1.0)], 0):
        svg = curves({"a": [points]}, title="t", caption="", y_label="y").svg
        assert len(re.findall(r"<use [^>]*--label-", svg)) == marks


def test_affinity_of_nothing_and_of_wrong_lengths() -> None:
    Reader(affinity([], columns=[], marks=[], title="t", caption="").svg)
    with pytest.raises(ValueError, match="marks: got 2, wants one for each of 1 steps"):
        affinity([[[1.0]]], columns=["a"], marks=["", ""], title="t", caption="")


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_a_missing_package_is_named(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    wants = rf"^scoff.report needs {package}: pip install 'scoff\[experiments\]'$"

    def use() -> object:
        if package == "matplotlib":
            return lines([], title="", caption="", x_label="", y_label="")
        return write_page(tmp_path / "p.html", title="", lead="", sections=[], runs=[], rerun=[])

    with pytest.raises(ModuleNotFoundError, match=wants):
        use()


def test_import_is_light() -> None:
    code = "import scoff.report, sys; print({'matplotlib', 'jinja2'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "set()\n", result.stderr


def test_template_is_part_of_the_package() -> None:
    assert importlib.resources.files("scoff.report").joinpath("template.html.j2").is_file()
