"""Checks on what a run does, beyond the rules each memory keeps: ordering between agents."""

from .races import RaceDetector

__all__ = ["RaceDetector"]
