"""What model functions write, and update ops: as one tower would."""
