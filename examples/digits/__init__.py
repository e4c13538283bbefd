"""Teaches a small vision-language model to read handwritten digits, on two CPU processes, in about two minutes.

Run it from the folder that holds ``examples``::

    lightning-vdp fit --config examples/digits/cpu.yaml
"""
