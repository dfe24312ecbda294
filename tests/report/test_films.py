"""Figures made of pictures."""

import base64
import io
import re
import xml.etree.ElementTree as Tree

import pytest
import torch
from PIL import Image

from scoff.report.films import SEAM, Lane, animation, gif, png, runs, strip, timeline

BLACK = torch.zeros(3, 6, 6, 3, dtype=torch.uint8)


def opened(uri: str):
    kind, data = uri.split(",")
    assert kind.endswith(";base64")
    return Image.open(io.BytesIO(base64.b64decode(data)))


def pixels(image) -> torch.Tensor:
    rgb = image.convert("RGB")
    flat = torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8)
    return flat.view(rgb.height, rgb.width, 3)


def test_pictures_come_back_as_they_were():
    picture = torch.zeros(5, 7, 3, dtype=torch.uint8)
    picture[1, 2] = torch.tensor([240, 110, 30])
    picture[4] = 255
    assert torch.equal(pixels(opened(png(picture))), picture)


def test_a_film_has_all_frames_in_order():
    film = torch.zeros(5, 8, 8, 3, dtype=torch.uint8)
    for number in range(5):
        film[number, :, number] = 255
    moving = opened(gif(film, 0.2))
    assert (moving.n_frames, moving.info["loop"]) == (5, 0)
    for number in range(5):
        moving.seek(number)
        assert torch.equal(pixels(moving), film[number])
        assert moving.info["duration"] == (1000 if number == 4 else 200)


def test_figures_are_xml_with_all_pictures():
    drawn = strip([("a & b", BLACK), ("<c>", BLACK)], ["1", "2", "3"], title='"t"', caption="c")
    tree = Tree.fromstring(drawn.svg)
    space = "{http://www.w3.org/2000/svg}"
    assert len(tree.findall(f"{space}image")) == 6
    words = [text.text for text in tree.findall(f"{space}text")]
    assert words == ["1", "2", "3", "a & b", "<c>"]
    with pytest.raises(ValueError, match="a: got 3 pictures, wants 2 as heads"):
        strip([("a", BLACK)], ["1", "2"], title="t", caption="c")


def test_two_films_side_by_side_are_one():
    drawn = animation([("a", BLACK), ("b", BLACK + 255)], title="t", caption="c")
    (uri,) = re.findall(r'href="([^"]+)"', drawn.svg)
    whole = pixels(opened(uri))
    assert whole.shape == (6, 6 + SEAM + 6, 3)
    assert whole[:, :6].max() == 0
    assert whole[:, -6:].min() == 255


def test_lanes_are_drawn_where_something_was_the_case():
    lane = Lane("x", [None, 1, 1, 2, None, 2], faint=[False, False, True, True, False, False])
    assert runs(lane) == [(1, 2, 1, False), (2, 3, 1, True), (3, 4, 2, True), (5, 6, 2, False)]
    drawn = timeline(BLACK, [0, 2, 5], 6, [lane], title="t", caption="c")
    tree = Tree.fromstring(drawn.svg)
    space = "{http://www.w3.org/2000/svg}"
    rects = [r for r in tree.findall(f"{space}rect") if r.get("fill") != "none"]
    assert len(rects) == 4
    starts = [float(r.get("x")) for r in rects]
    assert starts == sorted(starts)
    assert sum(r.get("fill-opacity") is not None for r in rects) == 2
    with pytest.raises(ValueError, match="x: got 6 values, wants 7 frames"):
        timeline(BLACK, [0, 2, 5], 7, [lane], title="t", caption="c")


def test_what_is_on_a_lane_is_named_where_there_is_room():
    lane = Lane("x", [0] * 9 + [1], words={0: "a & b", 1: "a long word"}, legend="What it is.")
    drawn = timeline(BLACK, [0, 5, 9], 10, [lane], title="t", caption="c")
    assert drawn.caption == "c What it is."
    assert ">a &amp; b</text>" in drawn.svg
    assert "a long word" not in drawn.svg
