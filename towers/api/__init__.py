"""What users hand over and are told: kinds of arguments, annotations, the words of messages."""
