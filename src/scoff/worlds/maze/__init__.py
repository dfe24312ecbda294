"""BabyAI's GoToObjMaze: rooms, doors and one object to go to, seen through a small window.

Thousands of mazes at once, as PyTorch tensors on any device. `gym.py` has them as Gymnasium
environments.
"""

from scoff.worlds.maze.cells import MISSIONS
from scoff.worlds.maze.levels import Levels, levels, mission
from scoff.worlds.maze.mazes import NUM_ACTIONS, Mazes, Step
from scoff.worlds.maze.options import MazeOptions
from scoff.worlds.maze.pictures import MazePainter, ViewPainter

__all__ = [
    "MISSIONS",
    "NUM_ACTIONS",
    "Levels",
    "MazeOptions",
    "MazePainter",
    "Mazes",
    "Step",
    "ViewPainter",
    "levels",
    "mission",
]
