"""Instructions that the machine executes itself, one file per family."""

from . import bulk, collective, memory, sync, tensor  # noqa: F401  (they fill the table)
from .table import FULL, LANES, Handler, Wait, bind, first_lane

__all__ = ["FULL", "LANES", "Handler", "Wait", "bind", "first_lane"]
