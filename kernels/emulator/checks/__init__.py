"""Checks on what a run does, beyond the rules each memory keeps: ordering between agents."""

from .globals import GlobalRaces
from .races import RaceDetector

__all__ = ["GlobalRaces", "RaceDetector"]
