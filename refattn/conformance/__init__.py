"""What it takes to check an implementation of random-feature attention."""

from __future__ import annotations

__all__: list[str] = []
