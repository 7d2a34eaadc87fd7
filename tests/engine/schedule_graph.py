"""What a schedule orders by itself: which waits could be dropped because others, or the lanes, already ensure them.

Every operation has a start and an end. An operation with a handle (I/O) lets its lane go on when it has been issued,
all others when they are done. What is put on the lanes after a step starts after that step's clip, because the caller
of step() waits for it.
"""

from collections import deque

ASYNCHRONOUS = {"read_weights", "read_gradient", "read_state", "write", "spill", "commit", "act_write", "act_read"}


class Graph:
    def __init__(self, puts):
        """`puts`: lists of operations, as they were put on the lanes, one after another."""
        self.ops = {}
        self._after = {}
        last_on_lane = {}
        clips = []
        self._before = None
        for ops in puts:
            for op in ops:
                assert op.key not in self.ops, f"{op.key} twice"
                self.ops[op.key] = op
                self._edge((op.key, "start"), (op.key, "end"))
                for other in op.waits:
                    self._edge((other, "end"), (op.key, "start"))
                for clip in clips[-1:]:
                    self._edge((clip, "end"), (op.key, "start"))
                if op.lane:
                    before = last_on_lane.get(op.lane)
                    if before is not None:
                        left = "start" if before.key.kind in ASYNCHRONOUS else "end"
                        self._edge((before.key, left), (op.key, "start"))
                    last_on_lane[op.lane] = op
            clips += [op.key for op in ops if op.key.kind == "clip"]
        self._number = {key: number for number, key in enumerate(self.ops)}

    def _edge(self, one, other):
        self._after.setdefault(one, set()).add(other)

    def ordered(self, one, other):
        """Whether `one` is always done before `other` starts."""
        if self._before is None:
            self._before = self._all_before()
        return bool(self._before[other] >> self._number[one] & 1)

    def _all_before(self):
        """For each start, which ends come before it, as bits. Every edge leads from an earlier put to a later one."""
        incoming = {}
        for one, others in self._after.items():
            for other in others:
                incoming.setdefault(other, []).append(one)
        before = {}
        for key in self.ops:
            for moment in ("start", "end"):
                bits = 0
                for other in incoming.get((key, moment), ()):
                    bits |= before[other] | (1 << self._number[other[0]] if other[1] == "end" else 0)
                before[key, moment] = bits
        return {key: before[key, "start"] for key in self.ops}

    def redundant(self, key, wait):
        """Whether `wait` would be done before `key` starts even if `key` did not wait for it."""
        goal, start = (key, "start"), (wait, "end")
        seen, queue = {start}, deque([start])
        while queue:
            here = queue.popleft()
            for there in self._after.get(here, ()):
                if here == start and there == goal and not self._by_lane(wait, key):
                    continue
                if there == goal:
                    return True
                if there not in seen:
                    seen.add(there)
                    queue.append(there)
        return False

    def _by_lane(self, one, other):
        """Whether the direct edge is there without the wait: neighbours on a lane, or a clip and what is put later."""
        ops = list(self.ops.values())
        lane = [op.key for op in ops if op.lane and op.lane == self.ops[other].lane]
        if one in lane and one.kind not in ASYNCHRONOUS and lane.index(other) - 1 == lane.index(one):
            return True
        return one.kind == "clip" and (one.step < other.step or other.kind == "rollback" or other.phase in ("r", "k"))
