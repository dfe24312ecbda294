"""Intuitive physics: an equivalent of the IntPhys benchmark, generated, and the real one on disk.

training_clips() gives possible videos, quadruplets() tests, both as functions of (seed, split,
index). writer.py writes them in the benchmark's layout; layouts.py and files.py read that, and the
real data; cache.py keeps it at the size for training. metrics.py has the benchmark's measures.
"""

from scoff.worlds.intphys.quadruplets import QuadrupletError, Quadruplets, quadruplets
from scoff.worlds.intphys.render import Clips, render
from scoff.worlds.intphys.stages import BLOCKS, MOVEMENTS, VISIBILITIES
from scoff.worlds.intphys.training import training_clips, training_scenes

__all__ = [
    "BLOCKS",
    "MOVEMENTS",
    "VISIBILITIES",
    "Clips",
    "QuadrupletError",
    "Quadruplets",
    "quadruplets",
    "render",
    "training_clips",
    "training_scenes",
]
