"""A small language model, its data and its training loop: what `python -m vescale_compile train` runs."""
