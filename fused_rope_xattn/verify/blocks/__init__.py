"""Blocks of models that come as repositories, not packages, written out from their formulas.

Class names, children and arguments are theirs, so that checkpoints fit and the swap knows them.
"""
