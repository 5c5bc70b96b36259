"""What messages are made of."""
__all__ = ["some_of"]


def some_of(names, most=4):
    """Returns names as a message has them, a str: the first few in quotes, and how many more there are."""
    more = len(names) - most
    return ", ".join(map(repr, names[:most])) + (" and %d more" % more if more > 0 else "")
