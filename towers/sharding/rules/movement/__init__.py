"""Values that are moved, whole axes or some of their rows, and come out as they were."""
