"""Wrapping modules with FSDP, and what Lightning lacks around it."""
