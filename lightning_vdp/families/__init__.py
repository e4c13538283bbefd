"""Model types: the facts about each, and finding the parts of a model."""
