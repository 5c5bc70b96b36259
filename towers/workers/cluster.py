"""Which workers there are, and which of them this process is.

Read by TensorFlow's own cluster resolvers. The ring is the chief and the workers, in that order: parameter servers and an
evaluator have no part in it.
"""
import json
import os
from typing import NamedTuple, Tuple

import tensorflow.compat.v1 as tf

__all__ = ["Cluster", "find_cluster"]

_RING = ("chief", "master", "worker")  # the jobs whose tasks train, the chief's first
_BESIDE = ("evaluator", "ps")


class Cluster(NamedTuple):
    """The workers that train together.

    Attributes:
      addresses: tuple of str, "host:port" of each worker, in the order of their ranks.
      rank: int, this process's number among them.
      is_evaluator: whether this process is none of them and evaluates; it is then alone.
    """
    addresses: Tuple[str, ...]
    rank: int
    is_evaluator: bool = False

    @property
    def size(self) -> int:
        """How many workers there are."""
        return len(self.addresses)

    @property
    def local_rank(self) -> int:
        """This process's number among the workers of its machine."""
        host = self.host(self.rank)
        return sum(self.host(rank) == host for rank in range(self.rank))

    def host(self, rank: int) -> str:
        """Returns the machine's name of a worker."""
        return self.addresses[rank].rpartition(":")[0]

    def describe(self, rank: int) -> str:
        """Returns a worker's name for messages."""
        return "worker %d (%s)" % (rank, self.addresses[rank])


ALONE = Cluster(("localhost:0",), 0)


def find_cluster(cluster=None, rank=None):
    """Returns the `Cluster` that this process is part of.

    Args:
      cluster: a `tf.distribute.cluster_resolver.ClusterResolver`, such as Slurm's or Kubernetes'; or a list of addresses
        "host:port"; None is what the environment variable TF_CONFIG says, and one worker alone where there is none.
      rank: int, this process's number in a list of addresses.

    Raises:
      TypeError: for another cluster.
      ValueError: for one that is malformed, or that this process has no place in.
    """
    if isinstance(cluster, (list, tuple)):
        if rank is None:
            raise ValueError("rank has to say which of the %d addresses is this process's." % len(cluster))
        return _checked(list(cluster), rank, "cluster")
    if rank is not None:
        raise ValueError("rank belongs to a list of addresses; a resolver and TF_CONFIG say the task themselves.")
    if cluster is not None:
        if not hasattr(cluster, "cluster_spec"):
            raise TypeError("cluster has to be a list of addresses or a tf.distribute.cluster_resolver.ClusterResolver, not %r."
                            % (cluster,))
        spec = cluster.cluster_spec()  # first: some find their task by it
        return _ring_of(spec.as_dict(), cluster.task_type, cluster.task_id, type(cluster).__name__)
    return _of_environment()


def _of_environment():
    text = os.environ.get("TF_CONFIG", "")
    if not text.strip():
        return ALONE
    try:
        read = json.loads(text)
    except ValueError as error:
        raise ValueError("TF_CONFIG is no JSON (%s): %r." % (error, text)) from error
    task = read.get("task", {}) if isinstance(read, dict) else None
    if not isinstance(task, dict) or not isinstance(read.get("cluster", {}), dict):
        raise ValueError("TF_CONFIG has to hold {\"cluster\": {job: [addresses]}, \"task\": {\"type\": job, \"index\": "
                         "number}}; it is %s." % text)
    if not read.get("cluster"):
        return ALONE
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    try:
        spec = resolver.cluster_spec().as_dict()
    except (TypeError, ValueError) as error:
        raise ValueError("TF_CONFIG's cluster is none that TensorFlow takes (%s): %r." % (error, read["cluster"])) from error
    return _ring_of(spec, task.get("type"), task.get("index"), "TF_CONFIG")


def _ring_of(jobs, task_type, task_id, source):
    """Returns the `Cluster` of a dict from jobs to addresses."""
    if task_type is None or not _is_number(task_id):
        raise ValueError("%s does not say which task this process is: it needs a type and an index, and has %r and %r."
                         % (source, task_type, task_id))
    task_id = int(task_id)
    if task_type == "evaluator":
        return ALONE._replace(is_evaluator=True)
    if task_type not in _RING:
        raise ValueError("%s says that this process is a %r: only %s train%s." % (
            source, task_type, ", ".join(repr(job) for job in _RING),
            ", and what `towers` builds needs no parameter server" if task_type == "ps" else ""))
    unknown = sorted(set(jobs) - set(_RING) - set(_BESIDE))
    if unknown:
        raise ValueError("%s has a job %r, and the jobs are %s." % (
            source, unknown[0], ", ".join(repr(job) for job in _RING + _BESIDE)))
    ring = [(job, number, address) for job in _RING for number, address in _tasks(jobs.get(job, ()))]
    places = [place for place, (job, number, _) in enumerate(ring) if (job, number) == (task_type, task_id)]
    if not places:
        raise ValueError("%s says that this process is task %d of %r, which has %d." % (
            source, task_id, task_type, len(jobs.get(task_type, ()))))
    return _checked([address for _, _, address in ring], places[0], source)


def _tasks(addresses):
    return sorted((int(number), address) for number, address in addresses.items()) if isinstance(addresses, dict) else list(
        enumerate(addresses))


def _checked(addresses, rank, source):
    if not _is_number(rank) or not 0 <= int(rank) < len(addresses):
        raise ValueError("%s has %d workers, and this one's rank is %r." % (source, len(addresses), rank))
    for address in addresses:
        host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError("%s: %r is no address of a worker; 'host:2222' is." % (source, address))
    twice = sorted({address for address in addresses if addresses.count(address) > 1})
    if twice:
        raise ValueError("%s gives the address %r to more than one worker." % (source, twice[0]))
    return Cluster(tuple(addresses), int(rank))


def _is_number(value):
    return not isinstance(value, bool) and (isinstance(value, int) or isinstance(value, str) and value.isdigit())
