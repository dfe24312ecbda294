"""The paper's experiments, one module each."""

from scoff.experiments.base import NAMES, Experiment, Finished, Preset, find_experiment

__all__ = ["NAMES", "Experiment", "Finished", "Preset", "find_experiment"]
