"""The guide and the API as a folder of static pages: ``python -m validation.site``."""
