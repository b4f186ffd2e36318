"""How a build tells what it is doing."""

from __future__ import annotations

from collections.abc import Callable

Say = Callable[[str], None]  # takes one line
