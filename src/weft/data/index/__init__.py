"""What a dataset contains: samples and splits, scan of a folder, checks, fingerprint."""
