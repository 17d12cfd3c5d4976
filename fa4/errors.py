"""What fa4 raises, beside Python's own TypeError and ValueError."""

from __future__ import annotations


class UnsupportedError(ValueError):
    """The request is well formed, but no kernel here can do it.

    The text names each value that is out of reach, the rule it breaks and the way out;
    `fa4.supports` returns the same text without tensors.
    """


class MissingDependencyError(ImportError):
    """A package that this backend needs is absent, or its version is not one that was tested."""
