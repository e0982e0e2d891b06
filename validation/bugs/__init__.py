"""Run public implementations, and list their bugs."""
