"""Values given to variables, by their initializers: no op is added to the graph."""

__all__ = ["assign"]


def assign(session, values):
    """Gives variables values; all in one run where it can be, since a large graph takes long to prepare for each.

    Args:
      session: `tf.Session` of the variables' graph.
      values: list of (variable, array).
    """
    while values:
        feeds, later = {}, []
        for variable, value in values:
            initializer = variable.initializer  # a tensor where tf.train.init_from_checkpoint made it
            initial_value = getattr(initializer, "op", initializer).inputs[1].name
            if initial_value in feeds:  # of two variables with one initial value
                later.append((variable, value))
            else:
                feeds[initial_value] = variable, value
        session.run([variable.initializer for variable, _ in feeds.values()],
                    {name: value for name, (_, value) in feeds.items()})
        values = later
