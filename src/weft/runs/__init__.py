"""Run directories: layout, lock, metrics, and upload to the Hugging Face hub."""
