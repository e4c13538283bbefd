"""Two versions of FSDP behind one seam."""
