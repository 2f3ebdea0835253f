"""Sphinx configuration of the documentation. `make docs` builds it into build/docs."""

import sys
from pathlib import Path

import maxsimd

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

project = "maxsimd"
copyright = "Apache-2.0"
version = release = maxsimd.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "notebooks",
    "http_reference",
    "links_in_checkout",
    "reachable",
]
exclude_patterns = ["extensions"]

myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": False}
autodoc_class_signature = "mixed"

html_theme = "furo"
html_title = f"maxsimd {version}"
html_favicon = "images/favicon.svg"
html_show_sphinx = False
html_copy_source = False
# Furo's own style and script are part of the site; nothing comes from elsewhere.
html_static_path: list[str] = []
copybutton_exclude = ".linenos, .gp, .go"
