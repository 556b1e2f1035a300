"""Configuration of the documentation site: the Markdown files of docs/, and references generated from the code.

`make docs` builds docs/_build/html; every warning is an error. generate.py writes the generated pages, to
docs/_generated.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import generate

from weft.version import __version__

project, author, release, version = "weft", "the weft authors", __version__, __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
smartquotes = False  # `--model` is an option, not a dash

html_theme = "furo"
html_theme_options = {"top_of_page_buttons": []}
html_title = f"weft {__version__}"
html_static_path = ["site"]
html_css_files = ["style.css"]
html_copy_source = html_show_copyright = False

myst_heading_anchors = 4  # as on GitHub
myst_enable_extensions = ["colon_fence"]  # directives that contain code, in generated pages

default_role = "literal"  # docstrings have code in single backticks
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # otherwise every `forward` has the docstring of torch.nn.Module
maximum_signature_line_length = 90
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]  # a list, not one entry each

# Every reference must resolve, except types of other libraries: nothing is fetched to link them.
nitpick_ignore_regex = [
    (
        "py:(class|exc|obj)",
        r"(abc|collections|contextlib|fastapi|jaxtyping|nn|np|numpy|pathlib|PIL|safetensors|timm|torch|torchvision|types|typing)\..*",
    ),
    ("py:class", r"Dataset|Sampler|State|Tensor|_\w+"),  # of torch without its module, and an alias
    ("py:class", r"dict\[str|inf|s|0\.001"),  # parts of types in docstrings, and of the representation of a range
    ("py:class", r"pydantic\..*|weft\.checkpoints\.confidence\._\w+"),  # in the representation of annotated types
    ("py:class", r"weft\.inference\.scores\.Class(Counts|Score)"),  # types of cached properties
    ("py:class", r"AllowInfNan|FieldInfo|Ge|Le|NoneType|Path|ndarray"),  # in the representation of annotated types
    ("py:class", r"BatchSize|Field|Format|Number|Precision|Seconds"),  # aliases of annotated types
    ("py:class", r"Float|ImageCms\..*|Int64|Loading|LrFinding|Pace|Runtime|UInt8"),  # imported for type checkers alone
    ("py:class", r"WorkerProcess"),  # likewise
]


def setup(app: Any) -> None:
    """Connect the hooks of the build."""
    app.connect("config-inited", lambda app, config: generate.write_pages())  # before Sphinx looks for files
    app.connect("source-read", generate.on_read)
    app.connect("doctree-read", generate.on_doctree)
    app.connect("missing-reference", generate.on_missing_reference)
    app.connect("autodoc-process-docstring", generate.before_napoleon, priority=400)
    app.connect("autodoc-process-docstring", generate.after_napoleon, priority=600)
    app.connect("autodoc-process-signature", generate.on_signature)
    app.connect("autodoc-skip-member", generate.on_member)
