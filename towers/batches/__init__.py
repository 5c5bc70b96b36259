"""How a batch is divided, and what each part counts."""
