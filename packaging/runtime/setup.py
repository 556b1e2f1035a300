"""Remove the modules of an earlier build, which setuptools would otherwise add to the wheel."""

import shutil
from pathlib import Path

from setuptools import setup

shutil.rmtree(Path(__file__).parent / "build", ignore_errors=True)
setup()
