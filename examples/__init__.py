"""Examples of lightning_vdp; not installed with the package."""
