"""Rules of branches, loops and functions, and of the lists that loops read and write."""
