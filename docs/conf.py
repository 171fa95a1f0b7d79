"""How Sphinx builds the site; `make docs` runs it."""

import os
import re
from pathlib import Path

import recoup

# For the processes that execute tutorials: one thread, no progress bars of notebooks, and a profile
# of IPython of their own, in which the kernel does not warn that it is not encrypted.
PROFILE = Path(__file__).parent / "_build" / "ipython" / "profile_default"
PROFILE.mkdir(parents=True, exist_ok=True)
(PROFILE / "ipython_kernel_config.py").write_text('get_config().IPKernelApp.log_level = "ERROR"\n')
os.environ["IPYTHONDIR"] = str(PROFILE.parent)
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"

project = "recoup"
author = "The recoup contributors"
release = version = recoup.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]

# --- pages ---------------------------------------------------------------------------------------

myst_heading_anchors = 3  # the anchors that GitHub gives to headings

# Tutorials are executed each time, and an error in one is an error of the build.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True

# --- reference -----------------------------------------------------------------------------------

default_role = "py:obj"  # `name` in a docstring is a link where there is such a name
toc_object_entries_show_parents = "hide"
smartquotes = False  # "sqrt" is code, also in prose
python_use_unqualified_type_names = True
python_display_short_literal_types = True  # Literal["a", "b"] is shown as "a" | "b"
python_maximum_signature_line_length = 88
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

# --- appearance ----------------------------------------------------------------------------------

html_theme = "furo"
html_title = f"recoup {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# `make docs-links` alone looks on the network.
linkcheck_timeout = 20
linkcheck_workers = 4


def show_attributes(app, what, name, obj, options, lines):
    """Let `.grad` be shown as it is: the role that makes links would drop the dot."""
    lines[:] = [re.sub(r"(?<!`)`(\.\w+)`(?!`)", r"``\1``", line) for line in lines]


def setup(app):
    app.connect("autodoc-process-docstring", show_attributes)
