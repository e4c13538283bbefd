"""Ulysses: dividing the language model's sequence over the ranks of a sequence group."""
