"""Instructions that the machine executes itself, one file per family."""

from . import allocation, bulk, collective, memory, sync, tensor  # noqa: F401  (fill the table)
from .table import FULL, LANES, Handler, Wait, bind, first_lane

__all__ = ["FULL", "LANES", "Handler", "Wait", "bind", "first_lane"]
