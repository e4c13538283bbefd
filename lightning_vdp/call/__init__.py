"""One divided forward: what travels with it and what the ranks agree on about it."""
