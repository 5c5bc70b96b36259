"""Segmentation of street scenes, with so few images a tower that batch norm has to be synced."""
