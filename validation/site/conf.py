"""Settings of Sphinx, for pages that `documents` gathers and `parts` adds to."""

from pathlib import Path

import refattn
from validation.site.parts import public

SITE = Path(__file__).parent

project, release, version = "refattn", refattn.__version__, refattn.__version__
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "numpydoc",
    "myst_parser",
    "sphinx_gallery.gen_gallery",
    "validation.site.parts",
]
nitpicky = True
suppress_warnings = ["config.cache"]  # of settings that are functions
default_role = "literal"  # which `parts` makes a link where it names something public
highlight_language = "text"
templates_path = [str(SITE / "templates")]  # autosummary's would be relative to the pages

myst_enable_extensions = ["dollarmath"]
myst_dmath_allow_space = myst_dmath_allow_digits = False
myst_heading_anchors = 4

autodoc_typehints = "none"  # numpydoc's tables have them
autodoc_member_order = "bysource"
autosummary_context = {"public": public}
numpydoc_show_class_members = False

sphinx_gallery_conf = {
    "examples_dirs": str(SITE / "gallery"),
    "gallery_dirs": "gallery",
    "filename_pattern": r"/\d_",
    "within_subsection_order": "FileNameSortKey",
    "image_scrapers": ("validation.site.parts.figure",),
    "min_reported_time": 60,
    "download_all_examples": False,
    "show_signature": False,
    "write_computation_times": False,
}

html_theme = "pydata_sphinx_theme"
html_title = "refattn"
html_math_renderer = "mathml"
html_static_path, html_css_files = ["static"], ["site.css"]
html_copy_source = html_show_sourcelink = False
html_show_search_summary = False  # which needs a server
html_context = {"default_mode": "auto"}
html_sidebars: dict[str, list[str]] = {"index": []}
html_theme_options = {
    "logo": {"text": f"refattn {version}"},
    "navigation_with_keys": False,
    "show_prev_next": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": [],
    "footer_end": [],
}
