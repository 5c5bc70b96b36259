"""What messages are made of."""
__all__ = ["TowersWarning", "some_of"]


class TowersWarning(UserWarning):
    """What this library warns of: that N towers would not train as one tower on the whole batch, or would not do what was asked.

    Example:

        warnings.simplefilter("error", towers.TowersWarning)  # in tests, say
    """


def some_of(names, most=4):
    """Returns names as a message has them, a str: the first few in quotes, and how many more there are."""
    more = len(names) - most
    return ", ".join(map(repr, names[:most])) + (" and %d more" % more if more > 0 else "")
