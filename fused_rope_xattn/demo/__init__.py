"""Cross-view completion, the pre-training task of CroCo, at the size of one minute on a laptop."""
