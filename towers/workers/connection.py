"""`connect()`: this process as one of the workers that train together, on TensorFlow's own distributed runtime."""
import json
import os
import time
import zlib
from typing import Any, Callable, List, Optional, Sequence, Union

import numpy as np
import tensorflow.compat.v1 as tf

from towers.api.annotations import (ClusterResolver, ConfigProto, GradsAndVars, Graph, Operation, Optimizer, Session,
                                    SessionRunHook, Tensor, TensorLike, Variable)
from towers.api.arguments import OPTIMIZER, check
from towers.devices.placement import session_config
from towers.meeting.sums import EXTREMES, check_reduction
from towers.workers.cluster import Cluster, find_cluster
from towers.workers.collectives import Collectives
from towers.workers.peers import Peers
from towers.workers.plain import AveragingOptimizer, average_gradients, extreme_with_gradient, sum_with_gradient
from towers.workers.sessions import Hook, WatchedSession, watched
from towers.workers.step_numbers import StepNumbers
from towers.workers.variables import broadcast
from towers.workers.watchdog import Watchdog, probe

__all__ = ["Workers", "connect"]


def connect(cluster: Union[Sequence[str], ClusterResolver, None] = None, rank: Optional[int] = None,
            devices: Optional[Sequence[str]] = None, config: Union[ConfigProto, Callable[[int], ConfigProto], None] = None,
            time_limit: Optional[float] = None) -> "Workers":
    """Makes this process one of the workers that train together.

    It starts TensorFlow's server of this worker, and returns when all workers' servers answer. To be called once, before a run.
    Where no cluster is named, the process is one worker alone, and everything works without a server.

    Args:
      cluster: a `tf.distribute.cluster_resolver.ClusterResolver` (Slurm's, Kubernetes'), or a list of addresses "host:port", one
        for each worker. None is what the environment variable TF_CONFIG says, as `python -m towers.launch` sets it: its
        "chief" and its "worker" tasks train, in that order; an "evaluator" is alone, and no chief.
      rank: int, this process's number in a list of addresses.
      devices: list of str, the devices that this worker's towers will stand on: the server has to have its CPU devices.
      config: optional `tf.ConfigProto` to start from; or a function of the worker's local rank that returns one, so that each of
        a machine's workers takes a GPU of its own.
      time_limit: float, seconds that this worker waits for the others, at the start and in each step. Then the process ends, by
        one sentence that names who is missing. None is what the environment variable TOWERS_TIME_LIMIT says, as
        `python -m towers.launch --time-limit 60` sets it, and 300 where it is not set.

    Returns:
      `Workers`.

    Raises:
      TypeError, ValueError: for a malformed cluster, or one without this process.
      RuntimeError: if the port of this worker is taken, or others don't come within the time limit.

    Example:

        workers = towers.workers.connect()
        builder = towers.TowerBuilder(devices, workers=workers)

    A GPU for each worker of a machine:

        def config(local_rank):
            return tf.ConfigProto(gpu_options=tf.GPUOptions(visible_device_list=str(local_rank)))

        workers = towers.workers.connect(devices=["/gpu:0"], config=config)
    """
    found = find_cluster(cluster, rank)
    config = config(found.local_rank) if callable(config) else config
    return Workers(found, session_config(devices or ["/cpu:0"], config), _seconds(time_limit))


def _seconds(time_limit):
    name = "time_limit"
    if time_limit is None:
        name, time_limit = "The environment variable TOWERS_TIME_LIMIT", os.environ.get("TOWERS_TIME_LIMIT", "").strip() or 300.0
    try:
        seconds = float(time_limit)
    except (TypeError, ValueError):
        seconds = 0.0
    if not seconds > 0:
        raise ValueError("%s has to be a number of seconds, more than 0, not %r." % (name, time_limit))
    return seconds


class Workers:
    """This process and the others that it trains with.

    Attributes:
      rank: int, this worker's number.
      size: int, how many workers there are.
      local_rank: int, this worker's number among those of its machine.
      is_chief: whether this one writes checkpoints and summaries: worker 0.
      is_evaluator: whether this process is beside the workers, and alone.
      target: str, the `target` or `master` of this worker's sessions.
      time_limit: float, seconds.
    """

    def __init__(self, cluster: Cluster, config: ConfigProto, time_limit: float) -> None:
        self._cluster = cluster
        self.rank, self.size, self.local_rank = cluster.rank, cluster.size, cluster.local_rank
        self.is_evaluator = cluster.is_evaluator
        self.is_chief = cluster.rank == 0 and not cluster.is_evaluator
        self.time_limit, self.target = time_limit, ""
        self.collectives = Collectives(self.size, self.rank)
        self._watchdog, self._config = Watchdog(cluster, time_limit), config
        self._num_told = 0
        if self.size > 1:
            self._config.experimental.collective_group_leader = "/job:worker/replica:0/task:0"
            self._config.device_filters.append("/job:worker/task:%d" % self.rank)
            self._config.isolate_session_state = True  # a server's sessions would share their variables
            self._serve()

    def __repr__(self) -> str:
        return "Workers(rank=%d, size=%d)" % (self.rank, self.size)

    def _serve(self):
        begun, spec = time.monotonic(), tf.train.ClusterSpec({"worker": list(self._cluster.addresses)})
        try:
            self._server = tf.train.Server(spec, job_name="worker", task_index=self.rank, config=self._config, start=False)
            self.target = self._server.target
            self._steps = StepNumbers(self.rank, self.target, self._config)
            self._server.start()
        except (tf.errors.OpError, RuntimeError) as error:
            raise RuntimeError("The server of %s can't be started: its port is taken, or TensorFlow has a server in this process "
                               "already (%s)." % (self._cluster.describe(self.rank), _first_line(error))) from error
        missing = [rank for rank in range(self.size) if rank != self.rank]
        while missing:
            states = {rank: probe(self._cluster.addresses[rank]) for rank in missing}
            missing = [rank for rank, state in states.items() if state]
            if missing and time.monotonic() - begun > self.time_limit:
                raise RuntimeError("%s waited %.0f seconds for %s, which %s. Start every worker, or correct the addresses." % (
                    self._cluster.describe(self.rank).capitalize(), self.time_limit,
                    " and ".join(self._cluster.describe(rank) for rank in missing), states[missing[0]]))
            time.sleep(0.1 if missing else 0)
        # TensorFlow numbers a group's devices by an order of its own.
        ranks = self._run_once(lambda: self.collectives.join(tf.constant(self.rank), ("ranks",)), "its start")
        self.collectives.order = [int(row) for row in np.argsort(ranks)]

    def session_config(self, config: Optional[ConfigProto] = None) -> ConfigProto:
        """Returns the `ConfigProto` of this worker's sessions.

        Args:
          config: optional `tf.ConfigProto` to start from; it is copied, not changed.
        """
        result = tf.ConfigProto()
        if config is not None:
            result.CopyFrom(config)
        result.MergeFrom(self._config)
        return result

    def session(self, graph: Optional[Graph] = None, config: Optional[ConfigProto] = None) -> Session:
        """Returns a `tf.Session` of this worker, whose runs are watched: they end, or the process does.

        Steps in which workers meet are to be run by one thread.
        """
        return WatchedSession(self._watchdog, self.target, graph, self.session_config(config), self._run_options)

    def hook(self) -> SessionRunHook:
        """Returns a `tf.train.SessionRunHook` for a monitored session: it broadcasts variables, and watches the runs.

        Put it first among the hooks. Every worker initializes, the chief alone restores and saves:

            tf.train.MonitoredTrainingSession(master=workers.target, config=workers.session_config(), hooks=[workers.hook()],
                                              checkpoint_dir=folder if workers.is_chief else None)
        """
        return Hook(self, self._watchdog, self._run_options)

    def all_reduce(self, tensor: TensorLike, reduction: str = "sum", name: Optional[str] = None) -> Tensor:
        """Sums or averages a tensor over workers, or takes the largest or smallest; within towers `towers.all_reduce` does.

        The gradient of a sum is the sum over workers of what reaches it in each; that of the largest goes to the workers that
        have it, in equal parts.

        Args:
          tensor: numeric tensor, of the same shape and dtype in every worker, and in every worker run together.
          reduction: "sum", "mean", "max" or "min"; "mean" takes floating point only.
          name: str, optional name scope.

        Raises:
          ValueError: for another reduction.
          TypeError: for a tensor of no numbers, or the mean of integers.
        """
        check_reduction(reduction)
        with tf.name_scope(name, "all_reduce"):
            tensor = tf.convert_to_tensor(tensor)
            if reduction == "mean" and not tensor.dtype.is_floating:
                raise TypeError("all_reduce takes no mean of %s tensors (%r): cast it first." % (tensor.dtype.name, tensor.name))
            if self.size == 1:
                return tf.identity(tensor)
            if reduction in EXTREMES:
                return extreme_with_gradient(self, tensor, EXTREMES[reduction], name)
            total = sum_with_gradient(self, tensor, name)
            return total if reduction == "sum" else total / self.size

    def average_gradients(self, grads_and_vars: GradsAndVars, weight: Optional[TensorLike] = None) -> GradsAndVars:
        """Averages gradients over workers, in a graph without towers.

            g = sum_w g_w / W    or, with weights,    g = sum_w n_w g_w / sum_w n_w,    W workers

        Args:
          grads_and_vars: list of (gradient, variable), of the same variables in every worker.
          weight: scalar tensor or number, the examples of this worker's batch, where workers' batches may differ in size.

        Returns:
          A list of (gradient, variable), without those that were None. None is there before all are.

        Raises:
          ValueError: where there is no gradient; in every worker, where workers have other gradients.
        """
        return average_gradients(self, grads_and_vars, weight)

    def optimizer(self, optimizer: Optimizer, weight: Optional[TensorLike] = None) -> Optimizer:
        """Returns a `tf.train.Optimizer` that applies gradients averaged over workers; `weight` as for `average_gradients`."""
        check(OPTIMIZER, optimizer=optimizer)
        return AveragingOptimizer(self, optimizer, weight)

    def broadcast_variables(self, variables: Optional[Sequence[Variable]] = None) -> Operation:
        """Returns an op that gives every worker the chief's values of variables: run it after they were initialized or restored.

        A training step of several workers fails until it has run.

        Args:
          variables: list of variables, of known shapes; None is all global variables of the graph.

        Raises:
          ValueError: in every worker, where workers have other variables; for variables of unknown shapes.
          TypeError: for variables that are no numbers.
        """
        variables = tf.global_variables() if variables is None else list(variables)
        unknown = [variable.name for variable in variables if not variable.shape.is_fully_defined()]
        if unknown:
            raise ValueError("The variable %r has no known shape, and can't be broadcast: leave it out of `variables`."
                             % unknown[0])
        if self.size == 1:
            return tf.no_op(name="broadcast_variables")
        self.check_alike("variables", ["%s, %s%s" % (v.op.name, v.dtype.base_dtype.name, v.shape) for v in variables])
        with tf.name_scope("broadcast_variables"):
            return broadcast(self.collectives, variables, ("broadcast", self.collectives.next_of_graph("broadcasts")))

    def tell_all(self, value: Any, what: str = "what they have to tell") -> List[Any]:
        """Returns a list over workers of what each calls this with, JSON; every worker has to call it in the same turn."""
        if self.size == 1:
            return [value]
        text = json.dumps(value).encode()
        self._num_told += 1
        turn = "told %d" % self._num_told
        sizes = self._run_once(lambda: self.collectives.join(tf.constant(len(text)), (turn, "size")), what)
        padded = np.frombuffer(text.ljust((max(sizes) + 7) // 8 * 8), np.int64)  # by spaces, which JSON takes
        told = self._run_once(lambda: self.collectives.join(tf.constant(padded), (turn, "text")), what)
        return [json.loads(row.tobytes().decode()) for row in told]

    def check_variables(self, session: Session, variables: Optional[Sequence[Variable]] = None) -> None:
        """Raises `ValueError` in every worker where their variables are not equal to the bit, and names the first that differs.

        Every worker has to call it at the same step: it compares digests, and costs a read of all variables.

        Args:
          session: `tf.Session` of this worker.
          variables: list of variables, alike in every worker; None is all global variables.
        """
        variables = tf.global_variables() if variables is None else list(variables)
        values = session.run([variable.read_value() for variable in variables])
        digests = [[v.op.name, zlib.crc32(np.ascontiguousarray(value).tobytes())] for v, value in zip(variables, values)]
        told = self.tell_all(digests, "comparing variables")
        for rank, others in enumerate(told):
            for (name, digest), (_, of_chief) in zip(others, told[0]):
                if digest != of_chief:
                    raise ValueError("Workers have other values of the variable %r: worker %d's are not worker 0's. Something "
                                     "writes it in some workers only, or of their own data." % (name, rank))

    def check_alike(self, what: str, items: Sequence[str]) -> None:
        """Compares what workers have, and names the first difference.

        Args:
          what: str, in the plural: "variables".
          items: list of str, in an order that is the same in every worker.

        Raises:
          ValueError: in every worker, where not all call this with the same items.
        """
        told = self.tell_all(items, "comparing %s" % what)
        for rank, others in enumerate(told):
            if others != told[0]:
                place = next((i for i, (a, b) in enumerate(zip(others, told[0])) if a != b), min(len(others), len(told[0])))
                has = [repr(of_worker[place]) if place < len(of_worker) else "no more" for of_worker in (told[0], others)]
                raise ValueError(
                    "Workers differ in their %s: worker 0 has %d of them and worker %d has %d. Where they first differ, at "
                    "number %d, worker 0 has %s and worker %d %s. Every worker has to build the same graph."
                    % (what, len(told[0]), rank, len(others), place, has[0], rank, has[1]))

    def peers(self, num_towers: int) -> Optional[Peers]:
        """Returns the `Peers` of a build of so many towers, None where this worker is alone."""
        return Peers(self, num_towers) if self.size > 1 else None

    def _run_options(self, graph, fetches, feed_dict, options):
        """Returns the `tf.RunOptions` with which a run meets those of the other workers; see `StepNumbers.options`."""
        def meet(key):
            self._run_once(lambda: self.collectives.join(tf.constant(0), ("run", key)), "the beginning of a run")
        return self._steps.options(graph, fetches, feed_dict, options, meet) if self.size > 1 else options

    def _run_once(self, build, what):
        with tf.Graph().as_default() as graph:
            self.collectives.name_graph("of what workers tell")  # not a number: some workers may have begun more graphs
            fetched = build()
            with watched(self._watchdog, what), tf.Session(self.target, graph, self._config) as session:
                return session.run(fetched, options=self._steps.told)


def _first_line(error):
    return str(error).strip().split("\n")[0]
