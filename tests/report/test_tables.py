import math

import pytest

from scoff.report import Estimate, Lowest, Table
from scoff.report.tables import format_number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0005, "0.0005"),
        (0.0539, "0.054"),
        (0.8731, "0.873"),
        (0.8904, "0.890"),
        (0.9, "0.9"),
        (11.3595, "11.4"),
        (1234.5678, "1,235"),
        (0.0999, "0.100"),
        (0.000512, "0.00051"),
        (0.0000512, "5.1e-5"),
        (5e-5, "5e-5"),
        (1.5e300, "1.5e300"),
        (-0.0539, "-0.054"),
        (0.0, "0"),
        (1.0, "1"),
        (1234567, "1,234,567"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers_have_one_format(value: float, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([0.05, 0.06, 0.0517], "0.054 ± 0.005"),
        ([11.0, 12.0, 11.1], "11.4 ± 0.6"),
        ([0.00018, 0.00021, 0.00021], "0.00020 ± 0.00002"),
        ([1e-7, 3e-7], "2.0e-7 ± 1.4e-7"),
        ([1.0, 1.001], "1.00 ± 0.00"),
        ([0.0626, 0.06261], "0.063 ± 0.000"),
        ([374.0, 374.01], "374 ± 0"),
        ([2.0, 2.0], "2.00 ± 0.00"),
        ([0.3], "0.3"),
        ([-3.0, 3.0], "0.00 ± 4.24"),
        ([0.3, math.nan, 0.2], "nan"),
        ([0.3, math.inf], "inf"),
    ],
)
def test_a_spread_has_the_decimals_of_its_mean(values: list[float], text: str) -> None:
    assert str(Estimate.of(values)) == text


def test_estimate_is_mean_and_sample_deviation() -> None:
    estimate = Estimate.of(iter([1.0, 2.0, 3.0]))
    assert estimate == Estimate(2.0, 1.0, 3)
    assert Estimate.of([1.0]).spread is None
    assert Estimate.of([1.0, math.nan]).count == 2
    with pytest.raises(ValueError, match="values: got none"):
        Estimate.of([])


@pytest.fixture
def table() -> Table:
    return Table(
        "Error",
        ["Model", "Parameters", "2", "10"],
        [
            ("Paper",),
            ("LSTM", None, 0.8731, 11.3595),
            ("Ours, three seeds",),
            ("SCOFF", 142305, Estimate(0.0005, 0.0001, 3), Estimate(0.05, 0.004, 3)),
            ("RIMs", 1410220, Estimate(0.001, 0.0001, 3), Estimate(math.nan, None, 3)),
        ],
        note="Made up.",
        highlight=Lowest(columns=[2, 3], rows=[3, 4]),
    )


def test_text_is_aligned_at_the_means(table: Table) -> None:
    assert table.text() == (
        "Error\n"
        "Model  Parameters                  2             10\n"
        "───────────────────────────────────────────────────\n"
        "Paper\n"
        "LSTM            –    0.873             11.4\n"  # noqa: RUF001
        "Ours, three seeds\n"
        "SCOFF     142,305  0.00050 ± 0.00010  0.050 ± 0.004\n"
        "RIMs    1,410,220   0.0010 ± 0.0001     nan\n"
        "Made up.\n"
    )


def test_markdown(table: Table) -> None:
    assert table.markdown() == (
        "**Error**\n\n"
        "| Model | Parameters | 2 | 10 |\n"
        "| :--- | ---: | ---: | ---: |\n"
        "| *Paper* |  |  |  |\n"
        "| LSTM | – | 0.873 | 11.4 |\n"  # noqa: RUF001
        "| *Ours, three seeds* |  |  |  |\n"
        "| SCOFF | 142,305 | **0.00050 ± 0.00010** | **0.050 ± 0.004** |\n"
        "| RIMs | 1,410,220 | 0.0010 ± 0.0001 | nan |\n"
        "\nMade up.\n"
    )


def test_equal_lowest_values_are_all_marked_and_others_never() -> None:
    rows = [("a", 1.0), ("b", 1), ("c", 0.5), ("d", math.nan), ("e", None), ("f", -math.inf)]
    table = Table("", ["m", "x"], rows, highlight=Lowest([1], [0, 1, 3, 4, 5]))
    assert table.highlighted() == {(0, 1), (1, 1)}
    assert Table("", ["m", "x"], rows, highlight=Lowest([1], [3, 4])).highlighted() == set()
    assert Table("", ["m", "x"], rows).highlighted() == set()


def test_hostile_cells_keep_to_their_cell() -> None:
    table = Table("t", ["a", "b"], [("x|y\n<b>*[\x1b[31m", 1)])
    assert table.text().splitlines()[3] == "x|y <b>*[[31m  1"
    assert table.markdown().splitlines()[4] == r"| x\|y \<b>\*\[\[31m | 1 |"


def test_empty_table_and_wrong_rows() -> None:
    assert Table("t", ["a", "b"], []).text() == "t\na  b\n────\n"
    assert Table("t", ["a"], [("x",)]).text() == "t\na\n─\nx\n"
    with pytest.raises(ValueError, match="rows: got one of 2 cells, wants 3"):
        Table("t", ["a", "b", "c"], [("x", 1)])
