"""Synchronisation objects that live in shared memory."""

from .mbarrier import Mbarrier, MbarrierUnit

__all__ = ["Mbarrier", "MbarrierUnit"]
