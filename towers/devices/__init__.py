"""Where towers and variables stand, and what a graph has once for all towers."""
