"""Tests; they mirror the tree. A package, so that `from tests.emulator.x import y` means ours."""
