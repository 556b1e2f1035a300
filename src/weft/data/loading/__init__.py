"""From samples to batches: order, seeding, transforms, dataset and loader."""
