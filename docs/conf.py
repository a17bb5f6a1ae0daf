"""Sphinx's settings; `make docs` builds the pages, and a warning fails it."""

from importlib.metadata import version as _version

project = "rksc-agents"
author = "the rksc-agents developers"
release = _version("rksc-agents")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "rksc-agents"
html_copy_source = False
source_suffix = {".md": "markdown"}
myst_heading_anchors = 3
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
autodoc_typehints = "none"  # the docstrings say them, with units and ranges
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
suppress_warnings = ["myst.xref_missing"]  # links out of this folder; test_docs.py follows all of them
