"""`python -m weft`."""

from __future__ import annotations

import sys

from weft.cli import main

sys.exit(main())
