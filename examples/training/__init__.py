"""What the examples' commands have in common: the graph of a training, its loop, its folder, and what it says.

An example brings a `graph.Task`, which is its data and its model, and its own command lines. Nothing here knows either of them.
"""
