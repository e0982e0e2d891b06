"""Texts that are joined to the printed formulas: calls, draws, and other ways to compute them."""
