"""Every claim of the references, tried: ``python -m validation``."""
