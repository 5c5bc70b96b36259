"""What a synced layer computes, as graph functions: moments, their merge, normalization, and the gradient's sums."""
