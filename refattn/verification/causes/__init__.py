"""Causes of failures: alternatives that are tested as verdicts are, and how they are named."""
