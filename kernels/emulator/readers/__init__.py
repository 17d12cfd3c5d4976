"""What each machine instruction is about to do, as rows of events; one file per family.

A *reader* looks at an instruction's operands before it executes, with the same `Binding` as the
handlers, so that handlers know nothing of records. An opcode that no reader knows is refused: a
cycle model must not miss work.
"""

from . import barriers, copies, memory, tensor  # noqa: F401  (they fill the table)
from .memory import wavefronts
from .table import NONE, Reader, Row, class_of, reader

__all__ = ["NONE", "Reader", "Row", "class_of", "reader", "wavefronts"]
