"""The one exception of the roofline: bad input, said in one line."""

from __future__ import annotations


class RooflineError(ValueError):
    """The value, the rule it broke and the way out, in one line without a trailing full stop."""
