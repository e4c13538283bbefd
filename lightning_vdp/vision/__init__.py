"""Vision DP: dividing images over the ranks of a sequence group."""
