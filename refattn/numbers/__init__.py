"""Arithmetics that formulas may run on: array types with the array API, for any estimator."""
