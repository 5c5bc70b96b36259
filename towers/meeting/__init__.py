"""Where towers meet: whose turn it is, what each leaves, what all get."""
