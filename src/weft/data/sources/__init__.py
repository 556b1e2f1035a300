"""Open a dataset by name: folder, table, tar shards, torchvision, Hugging Face, digits."""
