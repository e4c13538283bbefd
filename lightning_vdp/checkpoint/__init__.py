"""Writing, reading, resuming and exporting checkpoints."""
