"""How results are shown: HTML pages, notebooks, numbers with their interval."""
