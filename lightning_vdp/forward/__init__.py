"""Where this package enters models: patches, the start of a call, the first batch, generation."""
