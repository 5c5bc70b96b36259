"""A watched session for one client of many machines: TensorFlow's own may wait forever for a server that has died."""
import time
from typing import Optional, Sequence

from towers.api.annotations import ConfigProto, Graph, Session
from towers.workers.cluster import find_cluster
from towers.workers.sessions import WatchedSession
from towers.workers.watchdog import Watchdog, probe

__all__ = ["watched_session"]

_MEND = ("All of them answer (%s), so one was started anew meanwhile, or the step is slow: start again from the last checkpoint, "
         "or give a larger time_limit.")


class _Servers:
    """The servers of one client, for a `Watchdog`, as a `Cluster` that this process is no worker of."""
    rank = None

    def __init__(self, addresses):
        self.addresses, self.size = addresses, len(addresses)

    def describe(self, rank):
        """Returns a server's name for messages, the client's for None."""
        return "this client" if rank is None else "server %d (%s)" % (rank, self.addresses[rank])


class _Session(WatchedSession):

    def close(self):
        """As `tf.Session.close`, which waits for the servers too."""
        with self._watchdog.waiting("the end of its session"):
            super().close()


def watched_session(servers: Sequence[str], graph: Optional[Graph] = None, config: Optional[ConfigProto] = None,
                    time_limit: float = 300.0) -> Session:
    """Returns a session on servers, for towers of one client on many machines.

    Where a server has died a run fails, as TensorFlow may find it itself, or the process ends by one sentence that names the
    server. Runs of a plain `tf.Session` may wait forever.

    Args:
      servers: list of addresses "host:port" of all servers that the graph's devices are on; the first one is the session's
        target.
      graph: `tf.Graph`; None is the default graph.
      config: optional `tf.ConfigProto`.
      time_limit: float, seconds that servers may take to come, and that a run may take.

    Returns:
      A `tf.Session`.

    Raises:
      ValueError: for what is no address, or no time limit.
      RuntimeError: if a server does not answer within the time limit.

    Example:

        builder = towers.TowerBuilder(["/job:worker/task:0/gpu:0", "/job:worker/task:1/gpu:0"])
        config = towers.session_config(builder.devices)
        with towers.workers.watched_session(["host0:2222", "host1:2222"], config=config) as session:
    """
    if isinstance(servers, str) or not servers:
        raise ValueError("servers has to be a list of addresses 'host:port', not %r." % (servers,))
    if not time_limit > 0:
        raise ValueError("time_limit is a number of seconds, more than 0, not %r." % (time_limit,))
    watched, begun = _Servers(find_cluster(list(servers), 0).addresses), time.monotonic()
    missing = list(range(watched.size))
    while missing:
        states = {server: probe(watched.addresses[server]) for server in missing}
        missing = [server for server, state in states.items() if state]
        if missing and time.monotonic() - begun > time_limit:
            raise RuntimeError("This client waited %.0f seconds for %s, which %s. Start every server, or correct the addresses."
                               % (time_limit, " and ".join(map(watched.describe, missing)), states[missing[0]]))
        time.sleep(0.1 if missing else 0)
    return _Session(Watchdog(watched, float(time_limit), mend=_MEND), "grpc://" + watched.addresses[0], graph, config)
