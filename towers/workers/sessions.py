"""Sessions whose runs are watched, since one that waits for a dead worker would wait forever."""
import contextlib

import tensorflow.compat.v1 as tf

__all__ = ["Hook", "WatchedSession", "watched"]

_OF_A_LOST_WORKER = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)


@contextlib.contextmanager
def watched(watchdog, what, place=None):
    """Watches a `with` block in which runs wait for other workers; see `Watchdog.waiting`. It ends, or the process does."""
    with watchdog.waiting(what, place) as wait:
        try:
            yield
        except _OF_A_LOST_WORKER:  # TensorFlow 2 may find it before the watchdog does
            watchdog.end_if_one_has_ended(wait)
            raise


def _global_step(run, graph):
    """Returns a graph's global step by a session's `run`, None where it has none or it can't be read."""
    try:
        step = tf.train.get_global_step(graph)
        return None if step is None else int(run(step))
    except (tf.errors.OpError, RuntimeError, TypeError, ValueError):  # not initialized, the session is closed, or no number
        return None


def _place(run, graph):
    """Returns a function that says in which run a session is, by its global step."""
    def said():
        step = _global_step(run, graph)
        return None if step is None else "the run after global step %d" % step
    return said


class WatchedSession(tf.Session):
    """A `tf.Session` in which nothing waits for other workers longer than their time limit.

    Args:
      watchdog: `towers.workers.watchdog.Watchdog`.
      target, graph, config: as `tf.Session` takes them.
      run_options: optional function of a graph and of a run's fetches, fed values and options that returns its options.
    """

    def __init__(self, watchdog, target, graph, config, run_options=None):
        self._watchdog, self._num_runs, self._run_options = watchdog, 0, run_options
        super().__init__(target, graph, config)

    def _watched(self):
        self._num_runs += 1
        return watched(self._watchdog, "run %d of its session" % self._num_runs, _place(super().run, self.graph))

    def run(self, fetches, feed_dict=None, options=None, run_metadata=None):
        """As `tf.Session.run`."""
        with self._watched():
            if self._run_options:
                options = self._run_options(self.graph, fetches, feed_dict, options)
            return super().run(fetches, feed_dict, options, run_metadata)

    def make_callable(self, fetches, feed_list=None, accept_options=False):
        """As `tf.Session.make_callable`."""
        made = super().make_callable(fetches, feed_list, accept_options or self._run_options is not None)

        def call(*values, **kwargs):
            with self._watched():
                if feed_list is None:
                    kwargs.update(zip(("options", "run_metadata"), values))
                    values = ()
                if self._run_options:
                    kwargs["options"] = self._run_options(self.graph, fetches, feed_list, kwargs.get("options"))
                return made(*values, **kwargs)
        return call


class Hook(tf.train.SessionRunHook):
    """Makes variables equal when a monitored session was made, and watches its runs; see `Workers.hook`."""

    def __init__(self, workers, watchdog, run_options=None):
        self._workers, self._watchdog, self._run_options = workers, watchdog, run_options
        self._broadcast, self._waiting, self._num_runs, self._began = None, contextlib.ExitStack(), 0, None
        self._run = None  # the wait of the run that goes on

    def begin(self):
        """Builds the broadcast, before the graph is finalized."""
        self._broadcast = self._workers.broadcast_variables()

    def after_create_session(self, session, coord):
        """Gives every worker the chief's variables, which it initialized or restored."""
        self._waiting.close()
        if self._run_options:
            run = session.run

            def run_with_options(fetches, feed_dict=None, options=None, run_metadata=None):
                return run(fetches, feed_dict, self._run_options(session.graph, fetches, feed_dict, options), run_metadata)
            session.run = run_with_options  # a monitored session drops the experimental options that a hook asks for
        try:
            with self._watchdog.waiting("its start") as wait:
                try:
                    session.run(self._broadcast)
                except _OF_A_LOST_WORKER:  # maybe in a run, after which a monitored session is made anew
                    self._watchdog.end_if_one_has_ended(self._run or wait)
                    raise
        except _OF_A_LOST_WORKER as error:
            # Of these errors a monitored session makes its session anew, and would do so forever.
            raise RuntimeError("The connection between workers was lost, though all of them answer: start all again, from the "
                               "last checkpoint (%s)." % str(error).strip().split("\n")[0]) from error
        self._num_runs, self._began = 0, _global_step(session.run, session.graph)

    def before_run(self, run_context):
        """Begins to watch a run."""
        self._waiting.close()
        self._num_runs += 1
        what = "run %d of its session" % self._num_runs
        if self._began is not None:
            what += ", which began at global step %d" % self._began
        session = run_context.session
        self._run = self._waiting.enter_context(self._watchdog.waiting(what, _place(session.run, session.graph)))

    def after_run(self, run_context, run_values):
        """The run is over."""
        self._waiting.close()
        self._run = None

    def end(self, session):
        """The session is over."""
        self._waiting.close()
