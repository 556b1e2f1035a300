"""Content of a dataset: samples and splits, scan of a folder, checks, fingerprint."""
