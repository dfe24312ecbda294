"""Draws film.gif: a clip of four balls, and what a SCOFF and a GRU of its size predict.

python docs/figures/film.py            # writes film.gif beside this file
python docs/figures/film.py out.gif    # elsewhere

Also prints how many of the balls each model has within their radius, frame by frame.
"""

import sys
from pathlib import Path

import torch
from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from scoff.experiments.balls import BallsTask, predict
from scoff.experiments.balls_report import example
from scoff.experiments.evaluate import load
from scoff.experiments.films import OUTLINE, Chosen, by_object_file, outlined, to_rgb, watch
from scoff.experiments.reproduce import expand, finished
from scoff.pretrained import find
from scoff.report.films import as_image
from scoff.training.run import Run

SCALE, GAP, HEAD, FOOT = 3, 12, 26, 26  # times a frame's pixels; pixels
PAPER, INK, GREY = (255, 255, 255), (31, 41, 51), (150, 150, 150)
COLOURS, NONE = 32, Image.Dither.NONE
MILLISECONDS, LAST = 110, 1500  # a frame, and the one before it starts again


def main(out: Path) -> None:
    runs = [run for _, _, run in finished(expand([find("4balls")]))]
    scoff, gru = (
        watch(Chosen(model, run, model), example)
        for model in ("scoff", "gru-matched")
        for run in runs
        if run.config.model == model
    )
    owners = by_object_file(scoff)
    assert owners is not None
    panels = {
        "truth": enlarged(to_rgb(scoff.frames)),
        "SCOFF": outlined(scoff.whole, scoff.identity, SCALE),
        "SCOFF, by object file": enlarged(owners),
        "GRU": outlined(gru.whole, gru.identity, SCALE),
    }
    side = SCALE * scoff.frames.shape[-1]
    font = ImageFont.truetype(findfont("DejaVu Sans"), 14)
    pictures = []
    for frame in range(1, len(scoff.frames)):  # nobody paints the first
        canvas = Image.new("RGB", (4 * side + 3 * GAP, HEAD + side + FOOT), PAPER)
        draw = ImageDraw.Draw(canvas)
        for number, (name, film) in enumerate(panels.items()):
            left = number * (side + GAP)
            draw.text((left, 4), name, INK, font)
            canvas.paste(as_image(film[frame]), (left, HEAD))
        ahead = frame + 1 - scoff.context
        told, colour = ("given", GREY) if ahead <= 0 else (f"{ahead} frames ahead", OUTLINE)
        draw.text((0, HEAD + side + 6), "1 frame ahead" if ahead == 1 else told, colour, font)
        pictures.append(canvas)
    times = [MILLISECONDS] * (len(pictures) - 1) + [LAST]
    palette = pictures[len(pictures) // 2].quantize(COLOURS, Image.Quantize.MAXCOVERAGE)
    first, *rest = (picture.quantize(COLOURS, palette=palette, dither=NONE) for picture in pictures)
    for run in runs:
        print(f"{run.config.model}:", *balls_found(run.path))
    first.save(out, save_all=True, append_images=rest, duration=times, loop=0, optimize=True)


@torch.no_grad()
def balls_found(path: Path) -> list[int]:
    """In each predicted frame of the first test clip"""
    cpu = torch.device("cpu")
    _, config, model = load(Run.open(path), cpu)
    clips = BallsTask(config, cpu, ["test"]).clips(torch.zeros(1, dtype=torch.int64), "test")
    return predict(config, model, clips).found.hits[0].tolist()


def enlarged(film: Tensor) -> Tensor:
    return film.repeat_interleave(SCALE, 1).repeat_interleave(SCALE, 2)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".gif"))
