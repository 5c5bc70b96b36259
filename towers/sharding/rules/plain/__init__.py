"""Rules that only plain towers are asked by, which know less of the batch and change nothing."""
