"""What towers compute while they wait for one another in the backward pass.

The gradient of a convolution by its kernel goes into no meeting any more. It is ready at the same moment as the gradient by
its input, which leads to the next one, and TensorFlow may well run it first, so that the other towers wait for it. If it runs
once its tower has left its part of the next meeting, it fills the time until the others have come.
"""
from towers.graph.private import control_flow_of, run_after
from towers.graph.walk import ancestors

__all__ = ["fill_meetings"]


def fill_meetings(left, made):
    """Lets ops that lead to no meeting run after the tower's next contribution to one.

    Only those nearest to a meeting do: what waits keeps its inputs in memory. No edge is added between towers, nor one that
    could close a circle, since no op that waits leads to an op that is waited for.

    Args:
      left: list of the ops whose results towers leave at meetings of the backward pass, in the order of each tower.
      made: list of the ops that the backward pass made.
    """
    position = {op: index for index, op in enumerate(made)}
    lead_on, seen, waiting = ancestors(left), set(left), set()
    for op in left:
        flow = control_flow_of(op)  # an op inside a loop can't wait for one outside
        stack = [tensor.op for tensor in op.inputs] if op in position else []
        while stack:
            here = stack.pop()
            if here in seen or here not in position or control_flow_of(here) is not flow:
                continue
            seen.add(here)
            fillers = [c for tensor in here.outputs for c in tensor.consumers()
                       if c not in lead_on and position.get(c, len(made)) < position[op]]
            for filler in fillers:
                if filler not in waiting and control_flow_of(filler) is flow:
                    waiting.add(filler)
                    run_after(filler, [op])
            if not fillers:
                stack.extend(tensor.op for tensor in here.inputs)
