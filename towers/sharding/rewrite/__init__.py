"""Carrying a plan out: conversions, where towers meet, and ops built anew."""
